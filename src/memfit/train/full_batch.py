"""Whole batches: split into micro-batches, and split finer, with the same result, when memory runs out.

batch ─┬─ part ── forward ── backward          out of memory: buffers and random numbers are put back,
       ├─ part ── forward ── backward    or    gradients dropped, and the same batch goes through again
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
from memfit.strategies.mechanisms.forward_state import tensors_in, version
from memfit.strategies.plan import Plan
from memfit.train.accumulation_window import Window
from memfit.train.batch_norm_warning import warn_of_batch_norms
from memfit.train.cuda_graphs import Graphs
from memfit.train.data.split_batch import even_sizes
from memfit.train.job import Loss
from memfit.train.oom_retry import Moment, Moments, out_of_memory
from memfit.train.step_result import StepResult
from memfit.train.window_ledger import Accounts


class WholeBatches:
    """How an engine goes through whole batches.

    Args:
        accounts: of its windows.
        model: what ``loss`` is given.
        plan: how batches are divided, and in what precision forwards run.
        loss: of a batch or a part of it.
        size: ``size(batch)`` returns its samples.
        split: ``split(batch, sizes)`` returns its parts.
        retry: whether a batch is begun again when memory runs out.
    """

    def __init__(
        self,
        accounts: Accounts,
        model: nn.Module,
        plan: Plan,
        loss: Loss,
        size: Callable[[Any], int],
        split: Callable[[Any, list[int]], list[Any]],
        *,
        retry: bool,
    ) -> None:
        self._accounts, self._model, self._plan = accounts, model, plan
        self._loss_of, self._size, self._split, self._retry = loss, size, split, retry
        self._moments = Moments(model)
        self.finer = 1
        """Times as many parts as the plan says: memory ran out before."""

    def step(self, batch: Any) -> StepResult:
        """Make one update from a batch."""
        accounts, retried = self._accounts, 0
        # Of a batch that goes through whole nobody needs to know the size.
        accumulation = self._plan.accumulation
        divided = self.finer > 1 or (accumulation is not None and accumulation.several)
        samples = self._size(batch) if divided else None
        seen = [(one, version(one)) for one in tensors_in(batch)] if self._retry else []
        moment = self._moments.note() if self._retry else None
        graphs = accounts.update.graphs
        with nullcontext() if graphs is None else graphs.window():
            try:
                window = self._go_through(batch, samples, self.finer, moment)
                while window is None:
                    _expect_unchanged(batch, seen)
                    samples = self._size(batch)
                    retried += 1
                    accounts.tell(
                        "on_retry", len(parts(self._plan.accumulation, samples, self.finer << retried))
                    )
                    window = self._go_through(batch, samples, self.finer << retried, moment)
                self.finer <<= retried
                if moment is not None and not retried:  # putting back is writing, too
                    self._moments.learn(moment)
                return accounts.close(window, retried)
            except BaseException:
                accounts.give_up(moment)
                raise

    def _go_through(
        self, batch: Any, samples: int | None, finer: int, moment: Moment | None
    ) -> Window | None:
        """Go forward and backward through the parts of a batch; it is one part, if nobody knows its samples.

        Returns:
            None if memory ran out, and it is to be done in smaller parts: then all is as before, the
            exception is gone, and all that its frames held.
        """
        sizes = [1] if samples is None else parts(self._plan.accumulation, samples, finer)
        try:
            window = self._accounts.open(Window(len(sizes), whole=True))
            batches = [_own(batch)] if len(sizes) == 1 else self._split(batch, sizes)
            for part, size in zip(batches, sizes, strict=True):
                self._micro_step(window, part, sum(sizes), size)
        except Exception as error:
            if finer > self.finer:
                error.add_note(f"The batch was in {len(sizes)} parts here, since memory had run out before.")
            if moment is None or self._accounts.update.in_backward or not out_of_memory(error):
                raise
            if samples is None and not self._can_tell_size(batch, error):
                raise
            if (self._size(batch) if samples is None else max(sizes)) == 1:
                raise
            if moment.lost:
                error.add_note(f"It cannot be begun again: {moment.lost} was written to.")
                raise
            self._accounts.give_up(moment)
            warn_of_batch_norms(self._model, "from here on, since memory ran out", stacklevel=5)
            return None
        return window

    def _can_tell_size(self, batch: Any, error: Exception) -> bool:
        try:
            self._size(batch)
        except UsageError as why:
            error.add_note(f"It cannot be begun again in smaller parts. {why}")
            return False
        return True

    def _micro_step(self, window: Window, part: Any, total: int, size: int) -> None:
        graphs = self._accounts.update.graphs
        if graphs is not None and self._by_graph(graphs, window, part, total, size):
            return
        loss = self._loss(part)
        if not isinstance(loss, torch.Tensor) and not (isinstance(loss, tuple) and len(loss) == 2):  # noqa: PLR2004
            raise UsageError(
                f"loss(model, batch) returned a {type(loss).__name__}: it is to return a mean, as a tensor, "
                "or a pair of a sum and what that is to be divided by."
            )
        if isinstance(loss, tuple):
            weight = float(loss[1])
            self._accounts.backward(window, loss[0] / weight if weight else loss[0], weight)
        else:
            window.total = float(total)
            self._accounts.backward(window, loss, float(size))

    def _loss(self, part: Any) -> torch.Tensor | tuple[torch.Tensor, float | torch.Tensor]:
        with self._plan.autocast(self._model):
            return self._loss_of(self._model, part)

    def _by_graph(self, graphs: Graphs, window: Window, part: Any, total: int, size: int) -> bool:
        """Go forward and backward by a graph; False if it is to be done as usual."""
        divisor = total / size

        def backward(part: Any) -> torch.Tensor:
            loss = self._loss(part)
            if isinstance(loss, tuple):
                raise UsageError("cuda_graphs need the loss as a mean: a weight would have to be read.")
            (loss if divisor == 1.0 else loss / divisor).backward()  # type: ignore[no-untyped-call]
            return loss.detach()

        loss = graphs.accumulate(backward, part, divisor)
        if loss is None:
            return False
        window.total = float(total)
        window.add(loss, float(size))
        self._accounts.count(window, loss)
        return True


def _own(batch: Any) -> Any:
    """Return a batch that a loss may take entries from, ``batch.pop("labels")``: it may be begun again."""
    return copy.copy(batch) if isinstance(batch, MutableMapping | list) else batch


def _expect_unchanged(batch: Any, seen: list[tuple[torch.Tensor, int]]) -> None:
    now = [(one, version(one)) for one in tensors_in(batch)]
    if len(now) != len(seen) or any(
        one is not other or count != before for (one, count), (other, before) in zip(now, seen, strict=True)
    ):
        raise UsageError(
            "Memory ran out, and the batch cannot be begun again: the loss, or the model, has changed it in "
            "place. Make that operation out of place."
        )


def parts(accumulation: Accumulation | None, samples: int, finer: int) -> list[int]:
    """Return the sizes of a batch's micro-batches, a number of times finer than settings say.

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
