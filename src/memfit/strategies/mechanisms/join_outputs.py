"""Join what a model returns for slices of a batch to what it returns for the whole batch.

    slice 0's output ──> token 0 ─┐                 each slice's output is copied into the whole and freed;
    slice 1's output ──> token 1 ─┼──> the whole    a token stands for it in the graph
    slice 2's output ──> token 2 ─┘

``torch.cat`` would hold all slices' outputs beside the whole.
"""

from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from memfit.errors import UsageError

Layout = tuple[int | None, ...]
"""Of each output: the dimension along which its samples lie; None for what is no tensor."""
OutputLayouts = dict[TreeSpec, Layout]
"""By their containers: what earlier batches have shown of the outputs."""


class JoinedOutputs:
    """The outputs of the slices of one batch.

    Args:
        layouts: what earlier batches have shown; completed by what this one does.
        samples: of the batch.
    """

    def __init__(self, layouts: OutputLayouts, samples: int) -> None:
        self._layouts, self._samples = layouts, samples
        self._spec: TreeSpec | None = None
        self._waiting: list[tuple[list[Any], int]] = []
        """Outputs with their samples, until two slices of different sizes have shown the layout."""
        self._joined: list[Any] | None = None

    def add(self, output: Any, samples: int) -> None:
        """Add the output of the next slice.

        Raises:
            UsageError: it cannot be joined.
        """
        leaves, spec = tree_flatten(output)
        if self._spec is None:
            self._spec = spec
        if spec != self._spec:
            raise UsageError(
                "batch_slices: the model returns differently built outputs for different slices of a batch."
            )
        self._waiting.append((leaves, samples))
        if self._joined is None and (layout := self._layout(last=False)) is not None:
            self._begin(layout)
        if self._joined is not None:
            self._store()

    def whole(self) -> Any:
        """Return the outputs of the batch."""
        if self._joined is None:
            self._begin(self._layout(last=True) or ())
            self._store()
        if self._joined is None or self._spec is None:
            raise AssertionError("a batch without slices")
        whole = [each.whole() if isinstance(each, _JoinedTensor) else each for each in self._joined]
        return tree_unflatten(whole, self._spec)

    def _layout(self, *, last: bool) -> Layout | None:
        """Return the layout of the outputs; None if what has been added does not show it yet."""
        if self._spec in self._layouts:
            return self._layouts[self._spec]
        (first, samples), (other, others) = self._waiting[0], self._waiting[-1]
        if samples == others and not last:
            return None
        found = tuple(
            samples_dimension(*each, samples, others) if isinstance(each[0], torch.Tensor) else None
            for each in zip(first, other, strict=True)
        )
        if samples != others and self._spec is not None:
            self._layouts[self._spec] = found
        return found

    def _begin(self, layout: Layout) -> None:
        leaves, samples = self._waiting[0]
        self._joined = [
            leaf if dim is None else _JoinedTensor(leaf, dim, samples, self._samples)
            for leaf, dim in zip(leaves, layout, strict=True)
        ]

    def _store(self) -> None:
        for leaves, samples in self._waiting:
            for joined, leaf in zip(self._joined or (), leaves, strict=True):
                if isinstance(joined, _JoinedTensor):
                    joined.add(leaf, samples)
                elif not (joined is leaf or joined == leaf):
                    raise UsageError(
                        f"batch_slices: the model returns {joined!r:.40} for one slice of a batch, and "
                        f"{leaf!r:.40} for another. memfit joins only tensors that have rows for each sample."
                    )
        self._waiting = []


def samples_dimension(first: torch.Tensor, other: torch.Tensor, samples: int, others: int) -> int | None:
    """Return the dimension of an output along which samples lie, by its shapes for two numbers of them.

    Raises:
        UsageError: there is none, or several.

    >>> samples_dimension(torch.zeros(5, 3), torch.zeros(5, 12), 1, 4)
    1
    """
    if first is other:  # a parameter
        return None
    varying = [
        dim
        for dim, (size, smaller) in enumerate(zip(first.shape, other.shape, strict=False))
        if (size != smaller if samples != others else size == samples)
    ]
    fits = len(first.shape) == len(other.shape) and bool(varying)
    fits = fits and all(first.size(dim) * others == other.size(dim) * samples for dim in varying)
    if not fits or (len(varying) > 1 and samples != others):
        shape = " x ".join(map(str, other.shape)) or "one number"
        raise UsageError(
            f"batch_slices: for {others} samples the model returns a tensor ({shape}, "
            f"{str(other.dtype).removeprefix('torch.')}) that has no row for each of them. It combines "
            "samples with each other, and slices of a batch would give another result."
        )
    return varying[0]


class _JoinedTensor:
    """One output of the whole batch, filled slice by slice."""

    def __init__(self, first: torch.Tensor, dim: int, samples: int, all_samples: int) -> None:
        self.dim = dim
        self._rows = first.size(dim) // samples  # of each sample
        shape = [*first.shape]
        shape[dim] = self._rows * all_samples
        format_ = torch.contiguous_format
        if first.dim() == _IMAGES and _is_channels_last(first):
            format_ = torch.channels_last
        self.tensor = torch.empty(shape, dtype=first.dtype, device=first.device, memory_format=format_)
        self.gradient: torch.Tensor | None = None
        """Of the whole, while the slices' backwards use it."""
        self._begin = 0
        self._tokens: list[torch.Tensor] = []

    def add(self, part: torch.Tensor, samples: int) -> None:
        """Copy the output of the next slice."""
        length = samples * self._rows
        if part.requires_grad:
            self._tokens.append(_Store.apply(part, self, self._begin, length, not self._tokens))
        else:
            self.tensor.narrow(self.dim, self._begin, length).copy_(part)
        self._begin += length

    def whole(self) -> torch.Tensor:
        """Return the output, which nothing here holds any longer."""
        joined: torch.Tensor = _Whole.apply(self, *self._tokens) if self._tokens else self.tensor
        del self.tensor, self._tokens
        return joined


_IMAGES = 4
"""Dimensions of a batch of images."""


def _is_channels_last(images: torch.Tensor) -> bool:
    return not images.is_contiguous() and images.is_contiguous(memory_format=torch.channels_last)


class _Store(torch.autograd.Function):
    """Copy a slice's output into the whole; the result, of no elements, stands for it."""

    @staticmethod
    def forward(
        ctx: Any, part: torch.Tensor, joined: _JoinedTensor, begin: int, length: int, is_first: bool
    ) -> torch.Tensor:
        ctx.joined, ctx.place, ctx.is_first = joined, (joined.dim, begin, length), is_first
        joined.tensor.narrow(*ctx.place).copy_(part)
        return part.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        gradient = ctx.joined.gradient.narrow(*ctx.place)
        if ctx.is_first:  # and the last to run
            ctx.joined.gradient = None
        return gradient, None, None, None, None


class _Whole(torch.autograd.Function):
    """The whole output; its gradient is what each slice's backward takes its part of."""

    @staticmethod
    def forward(ctx: Any, joined: _JoinedTensor, *tokens: torch.Tensor) -> torch.Tensor:
        ctx.joined, ctx.tokens = joined, len(tokens)
        return joined.tensor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise UsageError(
                "batch_slices: a second derivative (create_graph=True) needs the whole graph of the model. "
                "Leave out batch_slices."
            )
        ctx.joined.gradient = gradient
        return None, *[gradient.new_empty(0) for _ in range(ctx.tokens)]
