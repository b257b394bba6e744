"""The accounts of training: which window is open, what was counted, and that nobody else does either.

open ── backward ── backward ── ... ── close: update.py, counters, position, callbacks
          |                               |
          interrupted: nothing more until the window is dropped, or a state is loaded
"""

from collections.abc import Callable

import torch

from memfit.errors import TornUpdateError, UsageError
from memfit.train.accumulation_window import Window
from memfit.train.data.position import Position
from memfit.train.oom_retry import Moment
from memfit.train.step_result import StepResult
from memfit.train.update import INTERRUPTED, Update


class Accounts:
    """One window after the other, from opening to update.

    Args:
        update: what is done at a window's end.
        tell: ``tell(moment, *what)`` calls the callbacks.
    """

    def __init__(self, update: Update, tell: Callable[..., None]) -> None:
        self.update, self.tell = update, tell
        self.position = Position()
        self.window: Window | None = None
        self.micro_step = 0
        self.optimizer_step = 0
        self._before = 0  # micro-steps, when the window was opened

    def open(self, window: Window) -> Window:
        """Begin a window."""
        if self.update.torn:
            raise TornUpdateError(INTERRUPTED)
        self.window, self._before = window, self.micro_step
        if window.done:  # of a run that goes on inside it
            self.update.go_on()
        else:
            self.update.begin()
        self.tell("on_window_begin")
        return window

    def backward(self, window: Window, loss: torch.Tensor, weight: float | None) -> None:
        """Go backward from a micro-batch's mean loss."""
        self.expect_whole()
        try:
            if (factor := window.make_room(weight)) != 1.0:
                self.update.multiply(factor)
            root = window.add(loss, weight)
            if root is not None:
                root = self.update.scaler.scaled(root)
                root.backward()  # type: ignore[no-untyped-call]
        except BaseException as error:
            self.update.undo(error)
            raise
        self.count(window, loss)

    def count(self, window: Window, loss: torch.Tensor) -> None:
        """Count a backward that is done."""
        window.interrupted = False
        self.micro_step += 1
        self.tell("on_micro_step_end", loss)

    def close(self, window: Window, retried: int = 0) -> StepResult:
        """Update from a window's gradients."""
        self.expect_whole()
        update, scale = self.update, self.update.scaler.scale
        try:
            loss = window.mean_loss()
            window.interrupted = True
            found_inf, norm = update.make(window, lambda: self.tell("on_optimizer_step_begin"))
            self.drop()
        except BaseException as error:
            update.undo(error)
            raise
        self.position.close()
        self.optimizer_step += not found_inf
        update.done()
        failure, update.failure = update.failure, None
        if failure is not None:
            failure.add_note("The optimizer had stepped: the update is made, and counted.")
            raise failure
        if not found_inf:
            self.tell("on_optimizer_step_end")
        result = StepResult(
            not found_inf, found_inf, scale, self.micro_step, self.optimizer_step, retried, loss, norm
        )
        self.tell("on_window_end", result)
        return result

    def drop(self) -> None:
        """Have no gradients, and no window."""
        self.update.clear()
        self.window = None

    def give_up(self, moment: Moment | None) -> None:
        """Be as before the open window; if it is closed already, that stays."""
        if self.window is None:
            return
        self.micro_step = self._before
        self.drop()
        if moment is not None:
            moment.restore()

    def expect_closed(self) -> None:
        """Complain about an open window."""
        if self.window is not None:
            raise UsageError(
                f"A window is open, with {self.window.done} of {self.window.planned} micro-batches: "
                "give each a backward, or close it with engine.flush()."
            )

    def expect_whole(self) -> None:
        """Complain about a window whose gradients are not what they are to be."""
        if self.window is not None and self.window.interrupted:
            raise UsageError(
                "A backward or the update of this window was interrupted, and its gradients are not whole. "
                "engine.drop() leaves it out, and training goes on with the next; or go on from a saved "
                "state."
            )
