"""A model that returns its loss, slice by slice of its batch: each slice's backward follows its forward.

    forward     for each slice: model, backward of its loss into sums       nothing runs twice
    backward    sums * the gradient of the loss ──> the parameters

In float16, gradients need the loss scale, which only the backward knows: the slices run again there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from memfit.errors import UsageError
from memfit.random_state import DrawnRandomNumbers
from memfit.strategies.mechanisms.buffer_snapshots import BufferTracker, own_generators
from memfit.strategies.mechanisms.in_place_gradient_accumulation import autocast_dtype, autocast_to
from memfit.strategies.mechanisms.independent_samples import place_of_loss, without_saving
from memfit.strategies.mechanisms.join_outputs import JoinedOutputs, OutputLayouts
from memfit.strategies.mechanisms.loss_divisor import LossRule, SumOfSlices
from memfit.strategies.mechanisms.numbers_of_forward import Number, numbers_of_forward
from memfit.strategies.mechanisms.slice_parameters import leaf_aliases, parameters_replaced

Call = Callable[[], Any]
"""Runs the model's forward on a slice."""


@dataclass
class LossOfSlices:
    """The loss of a batch in slices.

    Args:
        module: the model.
        calls: its forward on each slice.
        sizes: samples of each slice.
        layouts: of its outputs.
        rule: how its loss is divided.
        inputs: the arguments that require a gradient, with the leaves that the calls have in their place.
    """

    module: nn.Module
    calls: Sequence[Call]
    sizes: Sequence[int]
    layouts: OutputLayouts
    rule: LossRule
    inputs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    divisor: Number | None = None
    """By what the sum of all slices is divided; None for a sum."""
    python_numbers: Sequence[float] = ()
    """Those that multiply or divide it, too."""

    def output(self) -> Any:
        """Return what the model returns for the batch: with the loss's gradient, and no other's."""
        parameters = [each for each in self.module.parameters() if each.requires_grad]
        outputs = JoinedOutputs(self.layouts, sum(self.sizes))
        loss = _HeldGradients.apply(self, outputs, *[each for each, _ in self.inputs], *parameters)
        leaves, spec = tree_flatten(outputs.whole())
        anchor = torch.empty(0, requires_grad=True)
        leaves = [
            loss
            if each is _LOSS
            else _WithoutGradient.apply(each, anchor)
            if isinstance(each, torch.Tensor) and each.is_floating_point()
            else each
            for each in leaves
        ]
        return tree_unflatten(leaves, spec)

    def run(
        self, outputs: JoinedOutputs | None, backward: Callable[[torch.Tensor], None] | None
    ) -> torch.Tensor:
        """Run all slices, forward and the backward of what each adds, and return the loss of the batch."""
        slices = SumOfSlices(self.rule)
        for call, samples in zip(self.calls, self.sizes, strict=True):
            with torch.enable_grad():
                with numbers_of_forward(wanted=self.rule.needs_numbers) as numbers:
                    whole = call() if backward else without_saving(call, own_generators(self.module))
                leaves, spec = tree_flatten(whole)
                del whole
                place = place_of_loss(leaves)
                if place is None:
                    raise UsageError(
                        "batch_slices: the model returns a loss for some slices of a batch only."
                    )
                own, leaves[place] = (
                    slices.add(leaves[place], self.rule.counts(numbers.found if numbers else ())),
                    _LOSS,
                )
            if outputs is not None:
                kept = [each.detach() if isinstance(each, torch.Tensor) else each for each in leaves]
                outputs.add(tree_unflatten(kept, spec), samples)
                del kept
            del leaves
            if backward is not None and own.requires_grad:
                with autocast_to(own.device.type, None):  # as any backward
                    backward(own)
            del own
        loss = slices.loss()
        self.divisor, self.python_numbers = slices.divisor, slices.python_numbers
        return loss

    def differentiate(
        self, outputs: JoinedOutputs | None, upstream: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """Run all slices; return the loss, and the gradients of their sum of each input and parameter.

        Aliases of the parameters collect them: the parameters' own gradients, and hooks on them, are left
        to the script's backward.
        """
        aliases = leaf_aliases(self.module)
        leaves = [leaf for _, leaf in self.inputs]
        with parameters_replaced(self.module, aliases):
            loss = self.run(outputs, lambda own: torch.autograd.backward(own, upstream))
        found = [each.grad for each in (*leaves, *aliases.values())]
        for leaf in leaves:
            leaf.grad = None
        return loss, found

    def kind(self) -> str:
        """Return the type of the model's device."""
        return next((each.device.type for each in self.module.parameters()), "cpu")

    def needs_scaled_loss(self) -> bool:
        """Return whether gradients may be computed in float16, whose range needs the loss scale."""
        lower = autocast_dtype(self.kind())
        own = {each.dtype for each in self.module.parameters()}
        return torch.float16 in (own if lower is None else {lower})


class _Loss:
    """Stands for the loss among a model's outputs."""


_LOSS = _Loss()


class _HeldGradients(torch.autograd.Function):
    """The loss of a batch, whose gradients were computed in the forward."""

    @staticmethod
    def forward(
        ctx: Any, work: LossOfSlices, outputs: JoinedOutputs, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.work, ctx.again = work, None
        kind = work.kind()
        ctx.autocast = kind, autocast_dtype(kind)
        if work.needs_scaled_loss():
            tracker = BufferTracker("the model")
            ctx.before = tracker.snapshot(work.module)
            ctx.again = DrawnRandomNumbers.start((torch.default_generator, *ctx.before.generators))
            loss = work.run(outputs, None)
            tracker.record_changes(ctx.before)
            ctx.again.keep_drawn()
            ctx.save_for_backward(*parameters)  # a change of theirs before the backward is an error
        else:
            loss, gradients = work.differentiate(outputs)
            ctx.save_for_backward(*gradients)
            work.calls = ()
        ctx.divisor = work.divisor
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise UsageError(
                "batch_slices: a second derivative (create_graph=True) needs the whole graph of the model. "
                "Leave out batch_slices."
            )
        upstream = upstream if upstream.dtype == torch.float64 else upstream.float()
        divisor = 1 if ctx.divisor is None else ctx.divisor
        if not ctx.work.rule.is_quotient:
            divisor = divisor + (divisor == 0)  # a mean of nothing has gradients of 0
        factor = upstream / divisor
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        if ctx.again is not None:
            _ = ctx.saved_tensors
            with ctx.before.restored(), ctx.again.replay(), autocast_to(*ctx.autocast):
                _, gradients = ctx.work.differentiate(None, factor)
            if not keep:
                ctx.work.calls = ()
            return None, None, *gradients
        return (
            None,
            None,
            *[
                each if each is None else each * factor if keep else each.mul_(factor)
                for each in ctx.saved_tensors
            ],
        )


class _WithoutGradient(torch.autograd.Function):
    """An output beside the loss, whose graph does not exist any more."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, _anchor: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # noqa: ARG004
        raise UsageError(
            "batch_slices: the script differentiates an output of the model that the model returns beside "
            "its loss. With batch_slices, only the loss has gradients. Leave out batch_slices, or have the "
            "model return no loss (transformers: pass no labels)."
        )
