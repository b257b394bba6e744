"""A model's forward, slice by slice of its batch: what a slice keeps for its backward exists one at a time.

    forward     batch ── split ──┬─ slice 0 ── model, dropped ──┐
                                 ├─ slice 1 ── model, dropped ──┼──> outputs of the whole batch ── loss
                                 └─ slice 2 ── model, kept ─────┘
    backward    slice 2's backward; slice 1 again, its backward; slice 0 again, its backward

The loop sees one call of the model and one backward pass. Gradients are the sums of those of the slices: the
same terms, added in another order. A dropped slice is a checkpointed call of the whole model.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map_only

from memfit.errors import UsageError
from memfit.strategies.mechanisms.inspect_tensors import tensor_version
from memfit.strategies.mechanisms.join_outputs import JoinedOutputs, OutputLayouts
from memfit.strategies.mechanisms.loss_of_slices import LossOfSlices, place_of_loss
from memfit.strategies.mechanisms.recompute_forward import CheckpointedForward, RecomputeSettings
from memfit.strategies.mechanisms.slice_parameters import (
    Aliases,
    ChainedAliases,
    can_be_replaced,
    parameters_replaced,
)
from memfit.strategies.mechanisms.split_batch import BatchSplitter, even_micro_batch_sizes
from memfit.strategies.mechanisms.wrap_forward import Forward, WrappedForward

_AGAIN = RecomputeSettings("the model", (), use_reentrant=False, preserve_rng_state=True, check=False)
_ADVICE = "Leave out batch_slices, or divide batches in the training loop."


class SlicedForward(WrappedForward):
    """The forward of a model whose batches are divided; ``around`` is its ``BatchSlices``."""

    def __init__(self, module: nn.Module, around: Any, inner: Forward | None) -> None:
        super().__init__(module, around, inner)
        self._again = CheckpointedForward(module, _AGAIN, inner)
        self._splitter = BatchSplitter(advice=_ADVICE)
        self._layouts: OutputLayouts = {}
        self._returns_loss = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward in slices, if a backward may follow.

        Raises:
            UsageError: the batch or the model's outputs cannot be divided.
        """
        forward = self.__wrapped__
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        call = self._rows_first({**dict(enumerate(args)), **kwargs})
        sizes = self._sizes(number_of_samples(call))
        if len(sizes) == 1 or not sizes:
            return forward(*args, **kwargs)
        self._expect_independent_samples()
        parts = [self._arguments(part, len(args)) for part in self._splitter.split(call, sizes)]
        before = self._state()
        if not self._returns_loss:
            outputs = JoinedOutputs(self._layouts, sum(sizes))
            chain = ChainedAliases(self.module) if can_be_replaced(self.module) else None
            for number, (own_args, own_kwargs) in enumerate(parts):
                own = forward if chain is None else _under(chain.of_next_slice(), self.module, forward)
                is_kept = number >= len(sizes) - self.around.kept
                output = (
                    own(*own_args, **own_kwargs)
                    if is_kept
                    else self._again.run_again(own, own_args, own_kwargs)
                )
                if number == 0:
                    self._expect_same_state(before)
                    self._returns_loss = place_of_loss(tree_leaves(output)) is not None
                    if self._returns_loss:
                        break
                outputs.add(output, sizes[number])
            else:
                return outputs.whole()
        calls = [partial(forward, *own_args, **own_kwargs) for own_args, own_kwargs in parts]
        passed = [each for each in tree_leaves(call) if any(each is one for one in tree_leaves(parts[0]))]
        return LossOfSlices(self.module, calls, sizes, self._layouts, passed).output()

    def _arguments(self, part: dict[Any, Any], positional: int) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of one slice as the forward takes them."""
        own = self._rows_first(part)
        return [own.pop(index) for index in range(positional)], own

    def _rows_first(self, call: dict[Any, Any]) -> dict[Any, Any]:
        """Exchange the dimension along which samples lie with the first, in arguments that have it."""
        dim = self.around.dim
        if dim == 0:
            return call
        exchanged: dict[Any, Any] = tree_map_only(
            torch.Tensor, lambda each: each.transpose(0, dim) if each.dim() > dim else each, call
        )
        return exchanged

    def _sizes(self, samples: int) -> list[int]:
        """Return how many samples the slices have.

        Until the outputs have shown along which dimension their samples lie, a first slice of one sample
        helps: what then differs from slice to slice is that dimension.
        """
        sizes = even_micro_batch_sizes(samples, self.around.count) if samples else []
        if len(sizes) > 1 and not self._layouts and sizes[0] > 1:
            return [1, sizes[0] - 1, *sizes[1:]]
        return sizes

    def _expect_independent_samples(self) -> None:
        """Refuse layers whose results depend on the other samples of the batch."""
        for name, part in self.module.named_modules():
            if isinstance(part, _BatchNorm) and (part.training or not part.track_running_stats):
                raise UsageError(
                    f"batch_slices: {name or 'the model'} is a {type(part).__name__} in training mode, "
                    "whose statistics would be over a slice, not over the batch. Use GroupNorm or LayerNorm, freeze "
                    "the statistics (module.eval()), or leave out batch_slices."
                )

    def _state(self) -> dict[str, tuple[int, int]]:
        """Return what identifies the values of buffers, and of tensors that are plain attributes."""
        held = [
            (f"{prefix}.{name}".lstrip("."), value)
            for prefix, part in self.module.named_modules()
            for name, value in (*part._buffers.items(), *vars(part).items())
            if isinstance(value, torch.Tensor)
        ]
        return {name: (id(value), tensor_version(value)) for name, value in held}

    def _expect_same_state(self, before: dict[str, tuple[int, int]]) -> None:
        changed = [name for name, state in self._state().items() if before.get(name) != state]
        if changed:
            raise UsageError(
                f"batch_slices: the model's forward changes its tensor {changed[0]!r}, and would change it "
                f"once in each slice. {_ADVICE}"
            )


def _under(aliases: Aliases, module: nn.Module, forward: Forward) -> Forward:
    def run(*args: Any, **kwargs: Any) -> Any:
        with parameters_replaced(module, aliases):
            return forward(*args, **kwargs)

    return run


def number_of_samples(call: dict[Any, Any]) -> int:
    """Return the number of samples in a model's arguments: the rows of the first tensor.

    Raises:
        UsageError: there is no tensor, or one without rows.
    """
    leaves = tree_leaves(call, is_leaf=lambda each: isinstance(each, PackedSequence))
    first = next((each for each in leaves if isinstance(each, torch.Tensor | PackedSequence)), None)
    if not isinstance(first, torch.Tensor) or not first.dim() or first.is_nested:
        what = "no tensor" if first is None else f"a {type(first).__name__} without a row for each sample"
        raise UsageError(
            f"batch_slices: the model is passed {what}, and memfit cannot divide that. {_ADVICE}"
        )
    return first.size(0)
