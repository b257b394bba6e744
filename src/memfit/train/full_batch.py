"""Steps on full batches: split into micro-batches, and split again, with the same result, when out of memory.

batch ─┬─ part ── forward ── backward          out of memory: buffers and random numbers are restored,
       ├─ part ── forward ── backward    or    gradients dropped, and the same batch is processed again
       └─ part ── forward ── backward          in twice as many parts
"""

import copy
from collections.abc import Callable, MutableMapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from memfit.errors import UsageError
from memfit.strategies.accumulation import Accumulation
from memfit.strategies.mechanisms.tensors import tensors_in, version_of
from memfit.strategies.plan import Plan
from memfit.train.accumulation_ledger import AccumulationLedger
from memfit.train.accumulation_window import Window
from memfit.train.batch_norm_warning import warn_of_batch_norms
from memfit.train.cuda_graphs import StepGraphs
from memfit.train.data.split_batch import even_sizes
from memfit.train.job import Loss
from memfit.train.oom_rollback import StepSnapshot, StepSnapshots, is_out_of_memory
from memfit.train.step_result import StepResult


class FullBatchStepper:
    """Steps on full batches.

    Args:
        ledger: of the engine's windows.
        model: the model passed to ``loss``.
        plan: how batches are divided, and in what precision forwards run.
        loss: ``loss(model, batch)`` returns the loss of a batch or a part of one.
        size: ``size(batch)`` returns its number of samples.
        split: ``split(batch, sizes)`` returns its parts.
        retry: whether a batch is started again when memory runs out.
    """

    def __init__(
        self,
        ledger: AccumulationLedger,
        model: nn.Module,
        plan: Plan,
        loss: Loss,
        size: Callable[[Any], int],
        split: Callable[[Any, list[int]], list[Any]],
        *,
        retry: bool,
    ) -> None:
        self._ledger, self._model, self._plan = ledger, model, plan
        self._loss_of, self._size, self._split, self._retry = loss, size, split, retry
        self._snapshots = StepSnapshots(model)
        self.finer = 1
        """Factor on the plan's number of parts: doubled each time memory ran out."""

    def step(self, batch: Any) -> StepResult:
        """Make one update from a batch."""
        ledger, retried = self._ledger, 0
        # The size of a batch that is not divided is not needed, and may not be known.
        accumulation = self._plan.accumulation
        divided = self.finer > 1 or (accumulation is not None and accumulation.several)
        samples = self._size(batch) if divided else None
        seen = [(tensor, version_of(tensor)) for tensor in tensors_in(batch)] if self._retry else []
        snapshot = self._snapshots.take() if self._retry else None
        graphs = ledger.update.graphs
        with nullcontext() if graphs is None else graphs.window():
            try:
                window = self._process(batch, samples, self.finer, snapshot)
                while window is None:
                    _expect_unchanged(batch, seen)
                    samples = self._size(batch)
                    retried += 1
                    ledger.notify(
                        "on_retry", len(parts(self._plan.accumulation, samples, self.finer << retried))
                    )
                    window = self._process(batch, samples, self.finer << retried, snapshot)
                self.finer <<= retried
                if snapshot is not None and not retried:  # restoring writes, too
                    self._snapshots.record_writes(snapshot)
                return ledger.close(window, retried)
            except BaseException:
                ledger.roll_back(snapshot)
                raise

    def _process(
        self, batch: Any, samples: int | None, finer: int, snapshot: StepSnapshot | None
    ) -> Window | None:
        """Run forward and backward on the parts of a batch; on the whole batch if ``samples`` is None.

        Returns:
            None if memory ran out and smaller parts may fit: everything is restored, and the exception is
            gone with all that its frames held.
        """
        sizes = [1] if samples is None else parts(self._plan.accumulation, samples, finer)
        try:
            window = self._ledger.open(Window(len(sizes), whole=True))
            batches = [_shallow_copy(batch)] if len(sizes) == 1 else self._split(batch, sizes)
            for part, size in zip(batches, sizes, strict=True):
                self._micro_step(window, part, sum(sizes), size)
        except Exception as error:
            if finer > self.finer:
                error.add_note(
                    f"The batch was divided into {len(sizes)} parts, because memory ran out in an earlier "
                    "attempt."
                )
            if snapshot is None or self._ledger.update.in_backward or not is_out_of_memory(error):
                raise
            if samples is None and not self._has_size(batch, error):
                raise
            if (self._size(batch) if samples is None else max(sizes)) == 1:
                raise
            if snapshot.lost:
                error.add_note(
                    f"The batch cannot be retried: the step changed the buffers {snapshot.lost}, "
                    "which no earlier step had changed. memfit copies only buffers that earlier steps have "
                    "changed, so it cannot restore these."
                )
                raise
            self._ledger.roll_back(snapshot)
            warn_of_batch_norms(
                self._model,
                "each part of a batch",
                stacklevel=5,
                because="Memory ran out, so memfit divides batches from here on. ",
            )
            return None
        return window

    def _has_size(self, batch: Any, error: Exception) -> bool:
        try:
            self._size(batch)
        except UsageError as why:
            error.add_note(f"The batch cannot be retried in smaller parts. {why}")
            return False
        return True

    def _micro_step(self, window: Window, part: Any, total: int, size: int) -> None:
        graphs = self._ledger.update.graphs
        if graphs is not None and self._replay_graph(graphs, window, part, total, size):
            return
        loss = self._loss(part)
        if not isinstance(loss, torch.Tensor) and not (isinstance(loss, tuple) and len(loss) == 2):  # noqa: PLR2004
            raise UsageError(
                f"loss(model, batch) returned a {type(loss).__name__}. It must return the mean loss "
                "as a tensor, or a pair: the summed loss and its divisor."
            )
        if isinstance(loss, tuple):
            weight = float(loss[1])
            self._ledger.backward(window, loss[0] / weight if weight else loss[0], weight)
        else:
            window.total = float(total)
            self._ledger.backward(window, loss, float(size))

    def _loss(self, part: Any) -> torch.Tensor | tuple[torch.Tensor, float | torch.Tensor]:
        with self._plan.autocast(self._model):
            return self._loss_of(self._model, part)

    def _replay_graph(self, graphs: StepGraphs, window: Window, part: Any, total: int, size: int) -> bool:
        """Run forward and backward as a CUDA graph; return False if they must run without one."""
        divisor = total / size

        def backward(part: Any) -> torch.Tensor:
            loss = self._loss(part)
            if isinstance(loss, tuple):
                raise UsageError(
                    "cuda_graphs needs a loss function that returns the mean loss, not a pair (sum, "
                    "weight). memfit would have to read the weight from the GPU."
                )
            (loss if divisor == 1.0 else loss / divisor).backward()  # type: ignore[no-untyped-call]
            return loss.detach()

        loss = graphs.accumulate(backward, part, divisor)
        if loss is None:
            return False
        window.total = float(total)
        window.add(loss, float(size))
        self._ledger.count(window, loss)
        return True


def _shallow_copy(batch: Any) -> Any:
    """Return a batch from which a loss may remove entries, as ``batch.pop("labels")``: it may be retried."""
    return copy.copy(batch) if isinstance(batch, MutableMapping | list) else batch


def _expect_unchanged(batch: Any, seen: list[tuple[torch.Tensor, int]]) -> None:
    now = [(tensor, version_of(tensor)) for tensor in tensors_in(batch)]
    if len(now) != len(seen) or any(
        tensor is not other or version != before
        for (tensor, version), (other, before) in zip(now, seen, strict=True)
    ):
        raise UsageError(
            "Memory ran out, and the batch cannot be retried: the loss function or the model "
            "changed the batch in place. Use out-of-place operations on the batch."
        )


def parts(accumulation: Accumulation | None, samples: int, finer: int) -> list[int]:
    """Return the sizes of a batch's micro-batches, ``finer`` times as many as the settings ask for.

    >>> parts(Accumulation(micro_batch_size=4), 10, 1), parts(Accumulation(2), 10, 2)
    ([4, 4, 2], [3, 3, 2, 2])
    """
    if not samples:
        raise UsageError("The batch has no samples.")
    accumulation = accumulation or Accumulation(1)
    micro = accumulation.micro_batch_size
    if micro is None:
        return even_sizes(samples, (accumulation.gradient_accumulation_steps or 1) * finer)
    micro = max(1, micro // finer)
    rest = samples % micro
    return [micro] * (samples // micro) + [rest] * (rest > 0)
