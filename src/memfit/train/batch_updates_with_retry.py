"""Updates from batches: a divided one, or several; divided further, with the same result, when out of memory.

batch ─┬─ part ── forward ── backward          out of memory: buffers, random numbers and gradients are
       ├─ part ── forward ── backward    or    restored, and the same batches are processed again
       └─ part ── forward ── backward          in twice as many parts
"""

import copy
from collections.abc import Iterator, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from memfit.errors import AmbiguousBatchError, UsageError
from memfit.random_state import get_random_state, set_random_state
from memfit.strategies.accumulation import Accumulation
from memfit.strategies.mechanisms.inspect_tensors import tensor_version, tensors_in_object
from memfit.strategies.mechanisms.split_batch import BatchSplitter, warn_of_batch_norms
from memfit.strategies.plan import Plan
from memfit.strategies.precision import autocast_of_model
from memfit.train.accumulation_ledger import AccumulationLedger, AccumulationWindowCopy
from memfit.train.accumulation_window import AccumulationWindow, StepResult
from memfit.train.arena_steps import ArenaSteps
from memfit.train.ranks.rank_agreement import RAN_OUT, PeerOutOfMemoryError, is_out_of_memory
from memfit.train.step_snapshots import StepSnapshot, StepSnapshots
from memfit.train.training_job import Loss

_NO_CONTEXT: AbstractContextManager[None] = nullcontext()


class DividedBatchStepper:
    """Steps on full batches.

    Args:
        ledger: of the engine's windows.
        model: the model passed to ``loss``.
        plan: how batches are divided, and in what precision forwards run.
        loss: ``loss(model, batch)`` returns the loss of a batch or a part of one.
        splitter: splits batches.
        arena_steps: in which each call is a step.
        retry: whether a batch is started again when memory runs out.
    """

    def __init__(
        self,
        ledger: AccumulationLedger,
        model: nn.Module,
        plan: Plan,
        loss: Loss,
        splitter: BatchSplitter,
        arena_steps: ArenaSteps,
        *,
        retry: bool,
    ) -> None:
        self._ledger, self._model, self._arena_steps = ledger, model, arena_steps
        self._precision, self._accumulation = plan.precision, plan.accumulation or Accumulation()
        self._is_divided = self._accumulation.several and not self._accumulation.gathers
        self._loss_of, self._splitter, self._retry = loss, splitter, retry
        self._snapshots = StepSnapshots(model)
        self._last_part: Any = None  # for ranks that run out of data where all must run equally many
        self.finer = 1
        """Factor on the plan's number of parts: doubled each time memory ran out."""

    def update(self, batches: list[Any]) -> StepResult:
        """Make one update from a batch; from the other ranks' batches, when this rank has none left."""
        result = self.gather(None, batches, closes=True)
        if result is None:
            raise AssertionError  # a window that closes has a result
        return result

    def gather(
        self, window: AccumulationWindow | None, batches: list[Any], *, closes: bool
    ) -> StepResult | None:
        """Process a batch in a window of its parts, or several in the window that gathers them.

        Update if that closes the window; tell the other ranks, which do the same, if this one fails.
        """
        with self._ledger.reporting():
            return self._train(batches, window, closes=closes)

    def _train(
        self, batches: list[Any], gathered: AccumulationWindow | None, *, closes: bool
    ) -> StepResult | None:
        ledger, retried = self._ledger, 0
        ledger.prepare()
        samples = self._samples(batches, gathered)
        seen = _versions(batches) if self._retry else []
        snapshot = self._snapshots.take() if self._retry else None
        if gathered is not None and gathered.done and ledger.window is None:
            ledger.open(gathered, pads=True)  # a run that resumed inside it
        before = ledger.copy_window() if self._retry else None
        step = _NO_CONTEXT
        if self._arena_steps.arena is not None:
            step = self._arena_steps.train(batches, *self._differences(gathered, closes=closes))
        with step:
            try:
                window = self._process(batches, gathered, samples, self.finer, snapshot, before)
                while window is None:
                    ledger.prepare()
                    _expect_unchanged(batches, seen)
                    samples = [self._splitter.size(batch) for batch in batches]
                    retried += 1
                    self._arena_steps.abandon(restarts=True)
                    ledger.notify("on_retry", sum(map(len, self._sizes(samples, self.finer << retried))))
                    window = self._process(
                        batches, gathered, samples, self.finer << retried, snapshot, before
                    )
                self.finer <<= retried
                if snapshot is not None and not retried:  # restoring writes, too
                    self._snapshots.record_writes(snapshot)
                result = ledger.make_update(window, retried) if closes else None
                if result is not None and result.found_inf:  # the optimizer allocated nothing
                    self._arena_steps.abandon()
            except BaseException:
                ledger.roll_back(snapshot, before)
                raise
        if result is not None:  # callbacks allocate outside the arena's step
            ledger.notify("on_window_end", result)
        return result

    def _samples(self, batches: list[Any], gathered: AccumulationWindow | None) -> list[int] | None:
        """Return the sizes of batches if they are needed: to divide them, or as weights among the ranks'.

        The size of a batch that is not divided may not be known; its weight is then 1.
        """
        weighs = gathered is None and self._ledger.gradients.ranks.size > 1
        if self._is_divided or self.finer > 1 or (weighs and self._know_sizes(batches)):
            return [self._splitter.size(batch) for batch in batches]
        if self._retry:
            for batch in batches[:1]:
                self._splitter.observe(batch)
        return None

    def _differences(self, gathered: AccumulationWindow | None, *, closes: bool) -> Iterator[str]:
        """Yield how an update differs from others of batches of the same shapes."""
        if self.finer > 1:
            yield f"{self.finer} times the parts"
        if gathered is not None and gathered.done:
            yield f"{gathered.done} carried over"
        if not closes:
            yield "no update yet"

    def _sizes(self, samples: list[int], finer: int) -> list[list[int]]:
        """Return the sizes of each batch's parts."""
        return [self._accumulation.part_sizes(number, finer) for number in samples]

    def _process(
        self,
        batches: list[Any],
        gathered: AccumulationWindow | None,
        samples: list[int] | None,
        finer: int,
        snapshot: StepSnapshot | None,
        before: AccumulationWindowCopy | None,
    ) -> AccumulationWindow | None:
        """Run forward and backward on the parts of batches; on whole batches if ``samples`` is None.

        Returns:
            None if memory ran out and smaller parts may fit: everything is restored, and the exception is
            gone with all that its frames held.
        """
        sizes = [[1]] * len(batches) if samples is None else self._sizes(samples, finer)
        try:
            # Before the first forward, in which other ranks may wait for this one.
            divisions = [self._divided(batch, own) for batch, own in zip(batches, sizes, strict=True)]
            window = self._window(gathered, len(sizes[0]) if sizes else 0)
            for divided, own in zip(divisions, sizes, strict=True):
                for number, (part, size) in enumerate(zip(divided, own, strict=True), 1):
                    if gathered is None:
                        self._micro_step(window, part, sum(own), size)
                    else:
                        window.holds_parts = number < len(own)
                        share = size / sum(own)
                        self._micro_step(
                            window, part, window.planned, share, completes=not window.holds_parts
                        )
            self._pad(window)
            self._ledger.gradients.ranks.agree("engine.step", same=self._ledger.progress)
        except PeerOutOfMemoryError:
            if snapshot is None or snapshot.lost:
                raise UsageError(
                    "Another rank ran out of memory, and this one cannot undo the step: it "
                    f"changed the buffers {snapshot and snapshot.lost}, which no earlier step changed."
                ) from None
            self._ledger.roll_back(snapshot, before)
            return None
        except Exception as error:
            if finer > self.finer:
                error.add_note(
                    f"The batch was divided into {sum(map(len, sizes))} parts, because memory ran out in an "
                    "earlier attempt."
                )
            if not is_out_of_memory(error) or not self._can_retry(
                error, batches, None if samples is None else sizes, snapshot
            ):
                raise
            self._ledger.gradients.ranks.agree("engine.step", failure=RAN_OUT)
            self._ledger.roll_back(snapshot, before)
            warn_of_batch_norms(
                self._model,
                "each part of a batch",
                because="Memory ran out, so memfit divides batches from here on. ",
            )
            return None
        return window

    def _divided(self, batch: Any, sizes: list[int]) -> list[Any]:
        return [_shallow_copy(batch)] if len(sizes) == 1 else self._splitter.split(batch, sizes)

    def _can_retry(
        self,
        error: Exception,
        batches: list[Any],
        sizes: list[list[int]] | None,
        snapshot: StepSnapshot | None,
    ) -> bool:
        """Return whether batches whose parts had these sizes can be repeated in smaller ones.

        If not, note the reason in the error, unless the parts were single samples or ``retry`` is off.
        """
        ledger = self._ledger
        if snapshot is None or ledger.update.in_backward:
            return False
        if ledger.gradients.reduces_in_backward and ledger.gradients.ranks.size > 1:
            error.add_note(
                "The batch cannot be retried: with fsdp2 the other ranks are inside a collective operation."
            )
            return False
        if sizes is None and not self._know_sizes(batches, error):
            return False
        largest = map(self._splitter.size, batches) if sizes is None else map(max, sizes)
        if max(largest, default=1) == 1:
            return False
        if snapshot.lost:
            error.add_note(
                f"The batch cannot be retried: the step changed the buffers {snapshot.lost}, "
                "which no earlier step had changed. memfit copies only buffers that earlier steps have "
                "changed, so it cannot restore these."
            )
        return not snapshot.lost

    def _pad(self, window: AccumulationWindow) -> None:
        """Run as many forwards and backwards as the rank with the most, where these are collective.

        They repeat the last part, count for nothing, and leave buffers and random numbers as they were.
        """
        if not self._ledger.lacking:
            return
        if self._last_part is None:
            raise UsageError(
                "This rank has no batch in its first step. With fsdp2 all ranks run each forward together: "
                "give each rank at least one batch."
            )
        random = get_random_state()
        buffers = [(each, each.clone()) for each in self._model.buffers()]
        while self._ledger.lacking:
            loss = self._loss(_shallow_copy(self._last_part))
            self._ledger.pad(window, loss[0] if isinstance(loss, tuple) else loss)
        set_random_state(random)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)

    def _window(self, gathered: AccumulationWindow | None, parts: int) -> AccumulationWindow:
        """Return the open window for an attempt: of a batch's parts, or one that gathers batches."""
        if gathered is None:
            return self._ledger.open(AccumulationWindow(parts, holds_parts=True), pads=True)
        return self._ledger.window or self._ledger.open(replace(gathered), pads=True)

    def _know_sizes(self, batches: list[Any], error: Exception | None = None) -> bool:
        """Return whether the sizes of batches are known; if not, note that in an error."""
        try:
            for batch in batches:
                self._splitter.size(batch)
        except UsageError as why:
            if error is None and isinstance(why, AmbiguousBatchError):  # its weight among the ranks' matters
                raise
            if error is not None:
                error.add_note(f"The batch cannot be retried in smaller parts. {why}")
            return False
        return True

    def _micro_step(
        self, window: AccumulationWindow, part: Any, total: int, size: float, *, completes: bool = True
    ) -> None:
        """Run forward and backward on a part, whose mean loss counts for ``size`` of ``total``."""
        if self._ledger.gradients.reduces_in_backward:
            self._last_part = _shallow_copy(part)
        loss = self._loss(part)
        if not isinstance(loss, torch.Tensor) and not (isinstance(loss, tuple) and len(loss) == 2):  # noqa: PLR2004
            raise UsageError(
                f"loss(model, batch) returned a {type(loss).__name__}. It must return the mean loss "
                "as a tensor, or a pair: the summed loss and its divisor."
            )
        if isinstance(loss, tuple):
            weight = float(loss[1])
            mean = loss[0] / weight if weight else loss[0]
            self._ledger.backward(window, mean, weight, completes=completes)
        else:
            window.total = window.total or float(total)
            self._ledger.backward(window, loss, None, share=float(size), completes=completes)

    def _loss(self, part: Any) -> torch.Tensor | tuple[torch.Tensor, float | torch.Tensor]:
        with autocast_of_model(self._precision, self._model):
            return self._loss_of(self._model, part)


def _shallow_copy(batch: Any) -> Any:
    """Return a batch from which a loss may remove entries, as ``batch.pop("labels")``: it may be retried."""
    return copy.copy(batch) if isinstance(batch, MutableMapping | list) else batch


def _versions(batches: list[Any]) -> list[tuple[torch.Tensor, int]]:
    return [(tensor, tensor_version(tensor)) for batch in batches for tensor in tensors_in_object(batch)]


def _expect_unchanged(batches: list[Any], seen: list[tuple[torch.Tensor, int]]) -> None:
    now = _versions(batches)
    if len(now) != len(seen) or any(
        tensor is not other or version != before
        for (tensor, version), (other, before) in zip(now, seen, strict=True)
    ):
        raise UsageError(
            "Memory ran out, and the batch cannot be retried: the loss function or the model "
            "changed the batch in place. Use out-of-place operations on the batch."
        )


def raise_missing_loss(model: nn.Module, batch: Any) -> torch.Tensor:  # noqa: ARG001 - stands for a loss
    """Refuse to train without a loss."""
    raise UsageError("engine.step and engine.fit need a loss function: pass it as Engine(..., loss=...).")
