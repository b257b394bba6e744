"""How the gradients of all ranks become one mean: after a window's backwards, or in each of them.

    ddp, zero1   forward, backward | forward, backward | ... | reduce     after all ranks succeeded
    fsdp2        forward, backward | forward, backward | ...              in each backward: equally many on
                                                                          all ranks, with the same divisor

The mean over N ranks of gradients that were divided by ``total / weight`` becomes the gradient of one process
with all data when it is multiplied by ``total * N / weight of all ranks``: left out if that is 1.
"""

import operator
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Literal
from weakref import ref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memfit.errors import UsageError
from memfit.strategies.mechanisms.inspect_tensors import tensors_in_object
from memfit.train.accumulation_window import AccumulationWindow
from memfit.train.ranks.rank_agreement import SingleRank
from memfit.train.window_gradients import KeptGradients, WindowGradients

Phase = Literal["preparation", "forward", "backward", "update"]
BUCKET_BYTES = 25 << 20  # DistributedDataParallel's


class RankGradients:
    """Gradients that need no reduction: those of a single process."""

    reduces_in_backward = False

    def __init__(self, ranks: SingleRank) -> None:
        self.ranks = ranks

    def open(self, window: AccumulationWindow, *, pads: bool) -> int:  # noqa: ARG002 - as below
        """Agree on a window before its first forward; return how many micro-batches this rank lacks."""
        return 0

    def agree_on_divisor(self, window: AccumulationWindow, weight: float) -> float:  # noqa: ARG002 - as below
        """Agree on the divisor of a micro-batch, if its backward reduces; return the largest weight."""
        return weight

    def run_empty_backward(self, loss: torch.Tensor) -> None:
        """Run a backward that changes nothing on any rank, if the other ranks wait for one."""

    def close(self, window: AccumulationWindow, gradients: WindowGradients) -> None:
        """Reduce a window's gradients, weight and loss, after all ranks agreed that none failed."""

    def are_apart(self, phase: Phase) -> bool:  # noqa: ARG002 - as below
        """Return whether the ranks run a phase without collective operations."""
        return True


class ReplicaGradients(RankGradients):
    """Gradients of a DistributedDataParallel, which the engine has it reduce after the last backward.

    Its own reduction, inside the last backward, could not be undone when one rank runs out of memory there.

    Args:
        ranks: that train together.
        replica: reduces nothing in the script's backwards from here on.
    """

    def __init__(self, ranks: SingleRank, replica: DistributedDataParallel) -> None:
        super().__init__(ranks)
        self._replica = replica
        self._broadcasts = False  # in zero1's step, whose ranks wait for each other there
        self._parameters = [each for each in replica.module.parameters() if each.requires_grad]
        self.activate()

    def open(self, window: AccumulationWindow, *, pads: bool) -> int:  # noqa: ARG002 - no rank needs to have as many
        """Check that DistributedDataParallel still reduces the gradients of all trainable parameters."""
        trainable = [each for each in self._replica.module.parameters() if each.requires_grad]
        if len(trainable) != len(self._parameters) or not all(map(operator.is_, trainable, self._parameters)):
            raise UsageError(
                f"{len(self._parameters)} parameters were trainable when the engine was created, and "
                f"{len(trainable)} are now. DistributedDataParallel reduces the gradients of those with "
                "which it was created. Freeze or unfreeze parameters (requires_grad) before creating the "
                "engine: for each stage, call memfit.revert(model) and create another engine of the model."
            )
        return 0

    def activate(self) -> None:
        """Leave the reduction to the engine, as ``no_sync`` does for a block of code."""
        self._replica.require_backward_grad_sync = False
        self._replica.require_forward_param_sync = False

    def deactivate(self) -> None:
        """Have backwards outside the engine reduce again."""
        self._replica.require_backward_grad_sync = True
        self._replica.require_forward_param_sync = True

    def allocate(self) -> KeptGradients | None:
        """Have gradients live in the buckets that are reduced; return them, or None if they are to be apart.

        The buckets then have their final sizes from the first window on: DistributedDataParallel chooses them
        after the first reduction. How a sum is rounded depends on them, if more than two ranks add up.
        """
        self._reduce()
        if self._replica.reducer._rebuild_buckets():
            self._reduce()
        if self._replica.gradient_as_bucket_view:
            return KeptGradients(self._parameters)
        for parameter in self._parameters:
            parameter.grad = None
        return None

    def close(self, window: AccumulationWindow, gradients: WindowGradients) -> None:
        """Weigh this rank's gradients by the weight of all ranks, and reduce them to their mean."""
        window.interrupted, self._broadcasts = True, False
        held = dict(gradients.items())
        lacking = sum(each not in held for each in self._parameters) if window.done else 0
        weights, lacking_anywhere, *ways = self.ranks.total(window.weight, lacking, *_ways_of(window))
        _expect_weighed_alike(window, *ways)
        mean = weights / self.ranks.size
        if mean and window.total is not None and window.total != mean:
            factor = window.total / mean
            gradients.multiply(factor)
            window.loss = None if window.loss is None else window.loss * factor
        window.total, window.weight = mean or None, mean
        _average_loss_over_ranks(window, self.ranks, self._replica)
        unused = self._unused(held) if lacking_anywhere else []
        if gradients.sums is None:
            self._reduce()
        else:
            self._reduce_sums(gradients, unused)
        for parameter in unused:  # as in one process: an optimizer would decay what got a gradient of zeros
            parameter.grad = None
        self._synchronize_buffers()

    def are_apart(self, phase: Phase) -> bool:
        """Return whether the ranks run a phase without collective operations."""
        return phase != "update" or not self._broadcasts

    def agree_before_broadcast(self, optimizer: torch.optim.Optimizer) -> None:
        """Have zero1's ranks broadcast their shares once all have updated them: until then, one may fail.

        Source: ``ZeroRedundancyOptimizer.step`` calls the inner optimizer's step, then ``_sync_params``
        (torch/distributed/optim/zero_redundancy_optimizer.py, PyTorch 2.14).
        """
        optimizer._sync_params = partial(self._broadcast, ref(optimizer))  # type: ignore[attr-defined]

    def _broadcast(self, reference: "ref[Any]") -> None:
        self.ranks.agree("an update")
        optimizer: Any = reference()
        self._broadcasts = True
        type(optimizer)._sync_params(optimizer)
        self._broadcasts = False

    def _unused(self, held: dict[nn.Parameter, torch.Tensor]) -> list[nn.Parameter]:
        """Return the parameters that have no gradient on any rank."""
        held_here = [each in held for each in self._parameters]
        used = torch.tensor(held_here, dtype=torch.float64, device="cpu")
        used = self.ranks.total_of_hosts(used)
        return [each for each, ranks in zip(self._parameters, used.tolist(), strict=True) if not ranks]

    def _reduce(self) -> None:
        """Run a backward that adds zeros, in which DistributedDataParallel reduces all gradients."""
        reducer = self._replica.reducer
        _, sparse = self._replica._build_params_for_reducer()  # type: ignore[no-untyped-call]
        outputs = [each.view_as(each) for each in self._parameters]
        zeros = [_zeros(each, sparse=kind) for each, kind in zip(self._parameters, sparse, strict=True)]
        self.deactivate()
        try:
            reducer.prepare_for_backward(outputs if self._replica.find_unused_parameters else [])
            torch.autograd.backward(outputs, zeros)
        finally:
            self.activate()

    def _reduce_sums(self, gradients: WindowGradients, unused: Iterable[nn.Parameter]) -> None:
        """Reduce sums in another dtype than the parameters', which DistributedDataParallel does not know."""
        skipped, held = set(unused), dict(gradients.items())
        for parameter in self._parameters:
            if parameter not in held and parameter not in skipped:
                gradients.set(parameter, torch.zeros_like(parameter))
        held = dict(gradients.items())
        for bucket in _buckets(held[each] for each in self._parameters if each not in skipped):
            flat = torch.cat([each.reshape(-1) for each in bucket])
            self.ranks.add_up(flat.mul_(1 / self.ranks.size))
            parts = torch.split(flat, [each.numel() for each in bucket])
            torch._foreach_copy_(
                bucket, [part.view_as(each) for part, each in zip(parts, bucket, strict=True)]
            )

    def _synchronize_buffers(self) -> None:
        """Broadcast the buffers of the first rank, as DistributedDataParallel does before a window's forward.

        After the reduction no rank can fail before it, so that none waits.
        """
        self._replica.require_forward_param_sync = True
        if self._replica.will_sync_module_buffers():  # type: ignore[no-untyped-call]
            self._replica._sync_buffers()  # type: ignore[no-untyped-call]
        self._replica.require_forward_param_sync = False


class ShardGradients(RankGradients):
    """Gradients of fully_shard's parameters: each backward reduces them, and leaves each rank its share."""

    reduces_in_backward = True

    def __init__(self, ranks: SingleRank, model: nn.Module) -> None:
        super().__init__(ranks)
        self._model = model
        self._agreed = False
        self._empty = False
        self.hook = model.register_forward_hook(partial(_watch_results, ref(self)))

    def open(self, window: AccumulationWindow, *, pads: bool) -> int:
        """Return how many micro-batches the rank with the most has more than this one."""
        self._agreed = False
        (most, least) = self.ranks.agree("the start of a window", window.planned, -window.planned)
        if not pads and most != -least:
            raise UsageError(
                f"The ranks have windows of {int(-least)} and {int(most)} micro-batches. With fsdp2 each "
                "backward is collective, so all ranks must run equally many: pass loaders of equal length, "
                "or use engine.fit or engine.step."
            )
        return int(most) - window.planned

    def agree_on_divisor(self, window: AccumulationWindow, weight: float) -> float:
        """Return the largest weight of the ranks' micro-batches; agree on the divisor before the first."""
        total = weight * window.planned if window.total is None else window.total
        total, largest = self.ranks.agree("a backward", total, weight)
        if not self._agreed:
            window.total, self._agreed = total or 1.0, True
        return largest

    def run_empty_backward(self, loss: torch.Tensor) -> None:
        """Run a micro-batch's backward with gradients of zeros, which all ranks reduce.

        A loss of no tokens may be 0 / 0, and zero times its gradients is not zero: the gradients of the
        model's results are replaced.
        """
        self._empty = True
        try:
            (loss * 0.0).backward()  # type: ignore[no-untyped-call]
        finally:
            self._empty = False

    def of_result(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient with which a result of the model goes backward."""
        return torch.zeros_like(gradient) if self._empty else gradient

    def close(self, window: AccumulationWindow, gradients: WindowGradients) -> None:  # noqa: ARG002 - as above
        """Share weight and loss; the gradients are reduced, and corrected by these when they are final."""
        window.interrupted = True
        weights, *ways = self.ranks.total(window.weight, *_ways_of(window))
        _expect_weighed_alike(window, *ways)
        window.weight = weights / self.ranks.size
        if not weights:
            window.total = None
            return
        _average_loss_over_ranks(window, self.ranks, self._model)

    def are_apart(self, phase: Phase) -> bool:
        """Return whether the ranks run a phase without collective operations: only before a window."""
        return phase == "preparation"


def _watch_results(reference: "ref[ShardGradients]", _module: nn.Module, _inputs: Any, results: Any) -> None:
    gradients = reference()
    if gradients is not None:
        for each in tensors_in_object(results):
            if each.requires_grad:
                each.register_hook(gradients.of_result)  # type: ignore[no-untyped-call]


def _ways_of(window: AccumulationWindow) -> tuple[float, float]:
    """Return 1 for how a rank weighs its micro-batches: with weights or without; (0, 0) if it has none."""
    return float(window.weighted and window.done > 0), float(not window.weighted and window.done > 0)


def _expect_weighed_alike(window: AccumulationWindow, given: float, others: float) -> None:
    """Check that all ranks weigh their micro-batches in the same way."""
    if given and others:
        here = "weights" if window.weighted else "none"
        raise UsageError(
            f"In this update, micro-batches have weights on {given:.0f} of the ranks and none on "
            f"{others:.0f}; here they have {here}. A weight is the divisor that a loss returns beside its "
            "sum, or the one passed to engine.backward. Do the same on all ranks."
        )


def _average_loss_over_ranks(window: AccumulationWindow, ranks: SingleRank, model: nn.Module) -> None:
    """Replace a window's loss by the mean over the ranks; a rank without data has none of its own."""
    if ranks.size == 1 or not window.weight:
        return
    own = window.loss
    if own is None:
        parameter = next(model.parameters())
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        own = torch.zeros((), dtype=dtype, device=parameter.device)
    window.loss = (ranks.add_up(own.to(torch.float64, copy=True)) / ranks.size).to(own.dtype)


def _zeros(parameter: nn.Parameter, *, sparse: bool) -> torch.Tensor:
    """Return a gradient of zeros that takes no memory."""
    if sparse:
        return torch.zeros_like(parameter, layout=torch.sparse_coo)
    return parameter.new_zeros(()).expand(parameter.shape)


def _buckets(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield tensors of one dtype and device each, which together are reduced at once."""
    kinds: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        bucket = kinds.setdefault((tensor.dtype, tensor.device), [])
        bucket.append(tensor)
        if sum(each.nbytes for each in bucket) >= BUCKET_BYTES:
            yield kinds.pop((tensor.dtype, tensor.device))
    yield from kinds.values()
