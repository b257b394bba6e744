"""The ledger of accumulation: which window is open, and how many micro-steps and updates were made.

open ── backward ── backward ── ... ── close: optimizer_update.py, counters, position, callbacks
          |                               |
          interrupted: nothing more until the window is dropped, or a state is loaded
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from memfit.errors import RankFailedError, TornUpdateError, UsageError
from memfit.train.accumulation_window import AccumulationWindow, StepResult
from memfit.train.data.loader_position import LoaderPosition
from memfit.train.optimizer_update import INTERRUPTED, OptimizerUpdate
from memfit.train.ranks.rank_agreement import Facts, learning_rates_as_text
from memfit.train.ranks.rank_gradients import Phase, RankGradients
from memfit.train.step_snapshots import StepSnapshot


@dataclass(frozen=True, slots=True, eq=False)
class AccumulationWindowCopy:
    """An open window as it was, with its gradients on the host."""

    window: AccumulationWindow
    micro_step: int
    gradients: list[tuple[nn.Parameter, torch.Tensor]]


class AccumulationLedger:
    """Keeps which accumulation window is open and what was counted in it, from opening to update.

    Args:
        update: runs at a window's end.
        gradients: how those of all ranks become one mean.
        notify: ``notify(event, *arguments)`` calls the callbacks.
    """

    def __init__(
        self, update: OptimizerUpdate, gradients: RankGradients, notify: Callable[..., None]
    ) -> None:
        self.update, self.gradients, self.notify = update, gradients, notify
        self.phase: Phase = "preparation"
        """Of a window: what the other ranks read if this one fails."""
        self.lacking = 0
        """Micro-batches that another rank has more in the open window, if all must run equally many."""
        self.position = LoaderPosition(ranks=gradients.ranks)
        self.window: AccumulationWindow | None = None
        self.resumed_window: AccumulationWindow | None = None
        """The window inside which a state was saved, until its data are read again."""
        self.micro_step = 0
        self.optimizer_step = 0
        self._micro_step_before = 0  # when the window was opened
        self._closed = 0  # windows of loops of the script's own

    def prepare(self) -> None:
        """Begin to prepare the batches of a window, unless one is open: to open it, all ranks meet."""
        if self.window is None:
            self.phase = "preparation"

    def open(self, window: AccumulationWindow, *, pads: bool = False) -> AccumulationWindow:
        """Open a window; ``pads`` if the engine can run micro-batches that this rank lacks."""
        if self.update.torn:
            raise TornUpdateError(INTERRUPTED)
        self.window, self._micro_step_before = window, self.micro_step
        self.phase = "forward"
        self.lacking = self.gradients.open(window, pads=pads)
        if window.done:  # resumed inside the window
            self.update.take_gradients()
        else:
            self.update.begin_window()
        self.notify("on_window_begin")
        return window

    def backward(
        self,
        window: AccumulationWindow,
        loss: torch.Tensor,
        weight: float | None,
        *,
        share: float = 1.0,
        completes: bool = True,
    ) -> None:
        """Run backward from a micro-batch's mean loss; ``share`` and ``completes`` as for ``Window.add``."""
        self.expect_uninterrupted()
        try:
            weight = None if weight is None else float(weight)
            self._make_room(window, share if weight is None else weight)
            self.phase = "backward"
            root = window.add(loss, weight, share=share, completes=completes)
            if root is not None:
                root = self.update.scaler.scaled(root)
                root.backward()  # type: ignore[no-untyped-call]
            else:
                self.gradients.run_empty_backward(loss)
        except BaseException as error:
            self.update.roll_back(error)
            raise
        self.phase = "forward"
        self.count(window, loss)

    def pad(self, window: AccumulationWindow, loss: torch.Tensor) -> None:
        """Run a backward that changes nothing here, and that ranks with more micro-batches wait for."""
        self._make_room(window, 0.0)
        self.gradients.run_empty_backward(loss)
        window.interrupted = False
        self.lacking -= 1

    def _make_room(self, window: AccumulationWindow, weight: float) -> None:
        """Have a window's divisor be at least the weight of the micro-batch that goes backward next."""
        if self.gradients.reduces_in_backward:
            weight = self.gradients.agree_on_divisor(window, weight)
        if (factor := window.make_room(weight)) != 1.0:
            self.update.gradients.multiply(factor)

    def count(self, window: AccumulationWindow, loss: torch.Tensor) -> None:
        """Count a completed backward."""
        window.interrupted = False
        self.micro_step += 1
        self.notify("on_micro_step_end", loss)

    def close(self, window: AccumulationWindow) -> StepResult:
        """Update from a window's gradients, and call the callbacks."""
        with self.reporting():
            self._agree_to_close(self._closed + 1)
        return self._close_agreed(window)

    def flush(self) -> StepResult | None:
        """Close windows until all ranks have closed equally many; return the last one's result, if any.

        A rank may have filled its window, and closed it, while another has fewer micro-batches, or none.
        """
        result = None
        while True:
            window = self.window
            mine = self._closed + (window is not None and window.done > 0)
            with self.reporting():
                most = self._agree_to_close(mine)
            if most == self._closed:
                if window is not None:
                    self.drop()
                return result
            result = self._close_agreed(window or self.open(AccumulationWindow(0, by_hand=True)))

    def _agree_to_close(self, closed: int) -> float:
        """Return the most windows that a rank will have closed."""
        call = "the last engine.backward of a window, or engine.flush"
        return self.gradients.ranks.agree(call, closed, same=self.progress)[0]

    def progress(self) -> Facts:
        """Return what must be the same on all ranks before each update."""
        return {"engine.optimizer_step": f"{self.optimizer_step}"} | learning_rates_as_text(
            self.update.optimizer
        )

    def _close_agreed(self, window: AccumulationWindow) -> StepResult:
        with self.reporting():
            result = self.make_update(window)
        self._closed += 1
        self.notify("on_window_end", result)
        return result

    def make_update(self, window: AccumulationWindow, retried: int = 0) -> StepResult:
        """Update from a window's gradients, after all ranks agreed that none failed in it.

        ``on_window_end`` is left to the caller.
        """
        self.expect_uninterrupted()
        update, scale = self.update, self.update.scaler.scale
        self.phase = "update"
        try:
            self.gradients.close(window, update.gradients)
            loss = window.mean_loss()
            window.interrupted = True
            before_step = partial(self.notify, "on_optimizer_step_begin")
            found_inf, norm = update.run(window.correction, loss, before_step)
            self.gradients.ranks.agree("an update")
            self.drop()
        except BaseException as error:
            update.roll_back(error)
            raise
        self.position.close()
        self.optimizer_step += not found_inf
        update.finish()
        failure, update.scheduler_error = update.scheduler_error, None
        if failure is not None:
            failure.add_note("The optimizer had already stepped: the update was made and counted.")
            raise failure
        if not found_inf:
            self.notify("on_optimizer_step_end")
        return StepResult(
            not found_inf, found_inf, scale, self.micro_step, self.optimizer_step, retried, loss, norm
        )

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Tell the other ranks if this block fails, so that they end too."""
        try:
            try:
                yield
            except BaseException as error:
                self.gradients.ranks.report(error, self.phase, waiting=self.gradients.are_apart(self.phase))
                raise
        except RankFailedError as error:
            phase = "" if self.phase == "update" else f"the {self.phase} of "
            error.add_note(f"This rank was in {phase}update {self.optimizer_step + 1}.")
            raise

    def drop(self) -> None:
        """Drop the gradients and the open window."""
        self.update.clear()
        self.window = None

    def copy_window(self) -> "AccumulationWindowCopy | None":
        """Copy the open window, as ``roll_back`` needs it; None if it has no gradients yet."""
        if self.window is None or not self.window.done:
            return None
        gradients = [(each, tensor.to("cpu", copy=True)) for each, tensor in self.update.gradients.items()]
        return AccumulationWindowCopy(_copy(self.window), self.micro_step, gradients)

    def roll_back(
        self, snapshot: StepSnapshot | None, before: "AccumulationWindowCopy | None" = None
    ) -> None:
        """Undo the open window, or what was added to it since a copy; a window that is closed stays."""
        if self.window is None:
            return
        self.micro_step = self._micro_step_before
        self.drop()
        if snapshot is not None:
            snapshot.restore()
        if before is not None:
            self.window, self.micro_step = _copy(before.window), before.micro_step
            self.update.take_gradients()
            for parameter, gradient in before.gradients:
                self.update.gradients.set(parameter, gradient)

    def expect_closed(self) -> None:
        """Raise an error if a window is open."""
        if self.window is not None:
            raise UsageError(
                f"An accumulation window is open: engine.backward was called for {self.window.done} of its "
                f"{self.window.planned} micro-batches. Call it for the others as well. Or call "
                "engine.flush() to make an update from the micro-batches already processed."
            )

    def expect_uninterrupted(self) -> None:
        """Raise an error if the open window's gradients are incomplete."""
        if self.window is not None and self.window.interrupted:
            raise UsageError(
                "This accumulation window has incomplete gradients: a backward pass or the update was "
                "interrupted. Drop the window with engine.drop() and continue with the next window, or load "
                "a saved state."
            )


def _copy(window: AccumulationWindow) -> AccumulationWindow:
    return replace(window, loss=None if window.loss is None else window.loss.clone())
