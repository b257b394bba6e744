"""The ledger of accumulation: which window is open, and how many micro-steps and updates were made.

open ── backward ── backward ── ... ── close: optimizer_update.py, counters, position, callbacks
          |                               |
          interrupted: nothing more until the window is dropped, or a state is loaded
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from memfit.errors import TornUpdateError, UsageError
from memfit.train.accumulation_window import Window
from memfit.train.data.loader_position import Position
from memfit.train.optimizer_update import INTERRUPTED, OptimizerUpdate
from memfit.train.step_result import StepResult
from memfit.train.step_snapshots import StepSnapshot


@dataclass(frozen=True, slots=True, eq=False)
class WindowCopy:
    """An open window as it was, with its gradients on the host."""

    window: Window
    micro_step: int
    gradients: list[tuple[nn.Parameter, torch.Tensor]]


class AccumulationLedger:
    """Keeps which accumulation window is open and what was counted in it, from opening to update.

    Args:
        update: runs at a window's end.
        notify: ``notify(event, *arguments)`` calls the callbacks.
    """

    def __init__(self, update: OptimizerUpdate, notify: Callable[..., None]) -> None:
        self.update, self.notify = update, notify
        self.position = Position()
        self.window: Window | None = None
        self.resumed_window: Window | None = None
        """The window inside which a state was saved, until its data are read again."""
        self.micro_step = 0
        self.optimizer_step = 0
        self._micro_step_before = 0  # when the window was opened

    def open(self, window: Window) -> Window:
        """Open a window."""
        if self.update.torn:
            raise TornUpdateError(INTERRUPTED)
        self.window, self._micro_step_before = window, self.micro_step
        if window.done:  # resumed inside the window
            self.update.take_gradients()
        else:
            self.update.begin_window()
        self.notify("on_window_begin")
        return window

    def backward(
        self, window: Window, loss: torch.Tensor, weight: float | None, *, completes: bool = True
    ) -> None:
        """Run backward from a micro-batch's mean loss; ``completes`` as for ``Window.add``."""
        self.expect_uninterrupted()
        try:
            if (factor := window.make_room(weight)) != 1.0:
                self.update.multiply(factor)
            root = window.add(loss, weight, completes=completes)
            if root is not None:
                root = self.update.scaler.scaled(root)
                root.backward()  # type: ignore[no-untyped-call]
        except BaseException as error:
            self.update.roll_back(error)
            raise
        self.count(window, loss)

    def count(self, window: Window, loss: torch.Tensor) -> None:
        """Count a completed backward."""
        window.interrupted = False
        self.micro_step += 1
        self.notify("on_micro_step_end", loss)

    def close(self, window: Window) -> StepResult:
        """Update from a window's gradients, and call the callbacks."""
        result = self.make_update(window)
        self.notify("on_window_end", result)
        return result

    def make_update(self, window: Window, retried: int = 0) -> StepResult:
        """Update from a window's gradients; ``on_window_end`` is left to the caller."""
        self.expect_uninterrupted()
        update, scale = self.update, self.update.scaler.scale
        try:
            loss = window.mean_loss()
            window.interrupted = True
            found_inf, norm = update.run(window, lambda: self.notify("on_optimizer_step_begin"))
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

    def drop(self) -> None:
        """Drop the gradients and the open window."""
        self.update.clear()
        self.window = None

    def copy_window(self) -> "WindowCopy | None":
        """Copy the open window, as ``roll_back`` needs it; None if it has no gradients yet."""
        if self.window is None or not self.window.done:
            return None
        gradients = [(each, tensor.to("cpu", copy=True)) for each, tensor in self.update.gradients()]
        return WindowCopy(_copy(self.window), self.micro_step, gradients)

    def roll_back(self, snapshot: StepSnapshot | None, before: "WindowCopy | None" = None) -> None:
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
                self.update.set_gradient(parameter, gradient)

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


def _copy(window: Window) -> Window:
    return replace(window, loss=None if window.loss is None else window.loss.clone())
