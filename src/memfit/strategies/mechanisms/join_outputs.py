"""Join what a model returns for slices of a batch to what it returns for the whole batch.

    slice 0's output ──> token 0 ─┐                 each slice's output is copied into the whole and freed;
    slice 1's output ──> token 1 ─┼──> the whole    a token stands for it in the graph
    slice 2's output ──> token 2 ─┘

``torch.cat`` would hold all slices' outputs beside the whole.

A dimension may have several rows for each sample: those of a sample together, or those of a time step.

    sequences of 3 in 2 samples      aaabbb     ``view(-1, width)`` where samples come first
                                     ababab     where sequences do
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from memfit.errors import UsageError

DIM_ADVICE = 'pass dim=1 ("dim": 1 in a plan)'
"""What to do where samples lie along the second dimension."""


@dataclass(frozen=True, slots=True)
class SamplesInOutput:
    """Where the samples of a batch are in an output.

    >>> place = SamplesInOutput(0, alternate=True)
    >>> place.rows(torch.tensor([1, 10, 2, 20, 3, 30]), 2, 1, 1).flatten().tolist()
    [10, 20, 30]
    """

    dim: int
    """The dimension along which they lie."""
    alternate: bool = False
    """Whether it has a row of every sample before it has the next row of the first."""

    def rows(self, output: torch.Tensor, samples: int, begin: int, count: int) -> torch.Tensor:
        """Return a view of the rows of some of an output's samples."""
        if self.alternate:
            shape = *output.shape[: self.dim], -1, samples, *output.shape[self.dim + 1 :]
            return output.view(shape).narrow(self.dim + 1, begin, count)
        each = output.size(self.dim) // samples
        return output.narrow(self.dim, begin * each, count * each)

    def pairs(
        self, whole: torch.Tensor, halves: Sequence[torch.Tensor], half: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each sample's rows: in the output of its half of some samples, and in that of all of them."""
        if self.alternate:
            whole, halves = whole.contiguous(), [each.contiguous() for each in halves]
        for index in range(2 * half):
            part, begin = halves[index // half], index % half
            yield self.rows(part, half, begin, 1), self.rows(whole, 2 * half, index, 1)


Layout = tuple[SamplesInOutput | None, ...]
"""Of each output: where its samples are; None for what is no tensor."""


class OutputLayouts(dict[TreeSpec, Layout]):
    """By their containers: what earlier batches have shown of the outputs.

    Args:
        alternate: whether rows of samples likely alternate where there are several of each: their values
            show it, and shapes do not.
    """

    def __init__(self, *, alternate: bool = False) -> None:
        super().__init__()
        self.alternate = alternate

    def place(self, first: torch.Tensor, other: torch.Tensor, samples: int, others: int) -> Any:
        """Return where samples are in an output, by what ``samples_dimension`` is passed."""
        dim = samples_dimension(first, other, samples, others)
        alternate = dim is not None and self.alternate and first.size(dim) > samples
        return None if dim is None else SamplesInOutput(dim, alternate)


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
        """Add the output of the next slice."""
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
        if self._spec is not None and self._spec in self._layouts:
            return self._layouts[self._spec]
        (first, samples), (other, others) = self._waiting[0], self._waiting[-1]
        if samples == others and not last:
            return None
        found = tuple(
            self._layouts.place(*each, samples, others) if isinstance(each[0], torch.Tensor) else None
            for each in zip(first, other, strict=True)
        )
        if samples != others and self._spec is not None:
            self._layouts[self._spec] = found
        return found

    def _begin(self, layout: Layout) -> None:
        leaves, samples = self._waiting[0]
        self._joined = [
            leaf if place is None else _JoinedTensor(leaf, place, samples, self._samples)
            for leaf, place in zip(leaves, layout, strict=True)
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
            f"{str(other.dtype).removeprefix('torch.')}) that has no row for each of them. If samples do not "
            f"lie along dimension 0 of its inputs, {DIM_ADVICE}; otherwise it combines samples with each "
            "other, and slices of a batch would give another result: leave out batch_slices."
        )
    return varying[0]


class _JoinedTensor:
    """One output of the whole batch, filled slice by slice."""

    def __init__(self, first: torch.Tensor, place: SamplesInOutput, samples: int, all_samples: int) -> None:
        self._place, self._samples = place, all_samples
        shape = [*first.shape]
        shape[place.dim] = first.size(place.dim) // samples * all_samples
        format_ = torch.contiguous_format
        if first.dim() == _IMAGES and _is_channels_last(first):
            format_ = torch.channels_last
        self.tensor = torch.empty(shape, dtype=first.dtype, device=first.device, memory_format=format_)
        self.gradient: torch.Tensor | None = None
        """Of the whole, while the slices' backwards use it."""
        self._begin = 0
        self._tokens: list[torch.Tensor] = []

    def rows(self, whole: torch.Tensor, begin: int, samples: int) -> torch.Tensor:
        """Return a view of the rows of some samples in the output, or in its gradient."""
        return self._place.rows(whole, self._samples, begin, samples)

    def add(self, part: torch.Tensor, samples: int) -> None:
        """Copy the output of the next slice."""
        if part.requires_grad:
            self._tokens.append(_Store.apply(part, self, self._begin, samples, not self._tokens))
        else:
            self.store(part, self._begin, samples)
        self._begin += samples

    def store(self, part: torch.Tensor, begin: int, samples: int) -> None:
        """Copy the output of a slice to its place."""
        rows, dim = self.rows(self.tensor, begin, samples), self._place.dim
        of_each = self.tensor.size(dim) // self._samples
        if part.shape != (*self.tensor.shape[:dim], of_each * samples, *self.tensor.shape[dim + 1 :]):
            shape, first = (" x ".join(map(str, each.shape)) for each in (part, self.tensor))
            raise UsageError(
                f"batch_slices: the model returns a tensor ({shape}) for {samples} samples. By its first "
                f"slice, a batch of {self._samples} has ({first}). Return as much for each sample: "
                "pad_packed_sequence has total_length for that."
            )
        rows.copy_(part.reshape(rows.shape))

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
        ctx: Any, part: torch.Tensor, joined: _JoinedTensor, begin: int, samples: int, is_first: bool
    ) -> torch.Tensor:
        ctx.joined, ctx.place, ctx.is_first, ctx.shape = joined, (begin, samples), is_first, part.shape
        joined.store(part, begin, samples)
        return part.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        gradient = ctx.joined.rows(ctx.joined.gradient, *ctx.place).reshape(ctx.shape)
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
