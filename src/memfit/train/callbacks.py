"""What is to happen at moments of training.

    on_fit_begin
      on_epoch_begin
        on_window_begin             a batch for ``step``, or the next of ``windows``
          on_micro_step_end(loss)   after each backward
          on_retry(parts)           memory ran out: the window begins again, in so many parts
          on_optimizer_step_begin   gradients are final: summed, unscaled, clipped
          on_optimizer_step_end     parameters are new; neither where fp16 gradients were not finite
        on_window_end(result)
      on_epoch_end
    on_fit_end                      also when training ends by an exception

Epochs are those of ``fit``; all else is called wherever training is steered from. Callbacks are called in the
order in which they were given, ``Saving`` last, so that it saves what the others became.
"""

from typing import TYPE_CHECKING, Any

import torch

from memfit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from memfit.train.engine import Engine
    from memfit.train.step_result import StepResult


class Callback:
    """Does nothing; override what you need. What ``state_dict`` returns is saved with the run."""

    def on_fit_begin(self, engine: "Engine") -> None:
        """Training begins, or goes on."""

    def on_epoch_begin(self, engine: "Engine") -> None:
        """A pass over the data begins; ``engine.epoch`` were before."""

    def on_window_begin(self, engine: "Engine") -> None:
        """Gradients are summed from here on."""

    def on_micro_step_end(self, engine: "Engine", loss: torch.Tensor) -> None:
        """A backward is done; ``loss`` is the micro-batch's, detached."""

    def on_retry(self, engine: "Engine", parts: int) -> None:
        """Memory ran out, and the window begins again in this many parts."""

    def on_optimizer_step_begin(self, engine: "Engine") -> None:
        """Gradients are as the optimizer will find them."""

    def on_optimizer_step_end(self, engine: "Engine") -> None:
        """Parameters are updated."""

    def on_window_end(self, engine: "Engine", result: "StepResult") -> None:
        """A window is closed, and became this."""

    def on_epoch_end(self, engine: "Engine") -> None:
        """A pass over the data is done; ``engine.epoch`` counts it."""

    def on_fit_end(self, engine: "Engine") -> None:
        """Training ended."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, in plain values and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""


class EarlyStopping(Callback):
    """Ends ``fit`` when something stops getting better.

    Args:
        metric: ``metric(engine)``, asked at the end of each epoch: the lower the better. The mean of the
            epoch's training losses, if none is given.
        patience: epochs without improvement after which training ends.
        min_delta: what counts as improvement.
    """

    def __init__(
        self, metric: "Callable[[Engine], float] | None" = None, *, patience: int = 3, min_delta: float = 0.0
    ) -> None:
        if patience < 1:
            raise UsageError(f"EarlyStopping: patience={patience} must be at least 1.")
        self._metric, self._patience, self._min_delta = metric, patience, min_delta
        self.best = float("inf")
        self.waited = 0
        self._sum: torch.Tensor | None = None
        self._updates = 0

    def on_fit_begin(self, engine: "Engine") -> None:
        """End at once, if a run that goes on had ended."""
        if self.waited >= self._patience:
            engine.stop()

    def on_window_end(self, engine: "Engine", result: "StepResult") -> None:  # noqa: ARG002
        """Add the loss, on its device, if there was an update."""
        if self._metric is None and result.updated:
            self._sum = result.loss_tensor if self._sum is None else self._sum + result.loss_tensor
            self._updates += 1

    def on_epoch_end(self, engine: "Engine") -> None:
        """Compare, and stop when patience is at its end."""
        if self._metric is not None:
            value = float(self._metric(engine))
        elif self._sum is not None:
            value = float(self._sum) / self._updates
        else:
            return
        self._sum, self._updates = None, 0
        if value < self.best - self._min_delta:
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited >= self._patience:
            engine.stop()

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, epochs since, and the epoch's losses so far."""
        return {"best": self.best, "waited": self.waited, "sum": self._sum, "updates": self._updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.best, self.waited = state["best"], state["waited"]
        self._sum, self._updates = state["sum"], state["updates"]


class Saving(Callback):
    """Saves the run to a file, whole or not at all: every so many windows, after epochs and at ``fit``'s end.

    At an end by an exception, too, if the run is whole then: no window is open, no update torn.

    Args:
        path: the file; each save takes the place of the one before.
        every: windows.
    """

    def __init__(self, path: Any, *, every: int = 1) -> None:
        if every < 1:
            raise UsageError(f"Saving: every={every} must be at least 1.")
        self._path, self._every, self._windows = path, every, 0
        self._saved = True

    def on_window_end(self, engine: "Engine", result: "StepResult") -> None:  # noqa: ARG002
        """Save, if it is time."""
        self._windows += 1
        self._saved = self._windows % self._every == 0
        if self._saved:
            engine.save(self._path)

    def on_epoch_end(self, engine: "Engine") -> None:
        """Save at the end of an epoch, too."""
        engine.save(self._path)
        self._saved = True

    def on_fit_end(self, engine: "Engine") -> None:
        """Save what was trained since."""
        if not self._saved and engine.is_whole:
            engine.save(self._path)
            self._saved = True
