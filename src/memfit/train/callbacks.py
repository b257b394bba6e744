"""Callbacks: what to do at the events of training.

    on_fit_begin
      on_epoch_begin
        on_window_begin             a batch that is divided, or the first of those that are gathered
          on_micro_step_end(loss)   after each backward
          on_retry(parts)           memory ran out: the window starts again, in this many parts
          on_optimizer_step_begin   gradients are final: summed, unscaled, clipped
          on_optimizer_step_end     parameters are updated; neither is called if fp16 gradients are not finite
        on_window_end(result)
      on_epoch_end
    on_fit_end                      also when training ends with an exception

Epochs are those of ``fit``; all other events occur however training is driven. Callbacks are called in the
order given, ``Saving`` last, so that it saves the others' new state.
"""

from typing import TYPE_CHECKING, Any, Protocol

import torch

from memfit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from memfit.train.step_result import StepResult


class TrainingRun(Protocol):
    """What memfit's own callbacks use of the engine that calls them; the argument is the ``Engine``."""

    epoch: int
    epochs: int
    batches: int | None

    @property
    def batch(self) -> int:
        """Batches of this epoch that are done."""

    @property
    def batches_per_update(self) -> int:
        """Batches that make one update."""

    @property
    def is_whole(self) -> bool:
        """Whether no window is open, and the last update was completed or undone."""

    def stop(self) -> None:
        """End ``fit`` after the current batch."""

    def save(self, path: Any) -> None:
        """Save the run to a file."""


class Callback:
    """Does nothing; override what you need. The result of ``state_dict`` is saved with the run."""

    def on_fit_begin(self, engine: TrainingRun) -> None:
        """Training begins or resumes."""

    def on_epoch_begin(self, engine: TrainingRun) -> None:
        """An epoch begins; ``engine.epoch`` counts those before it."""

    def on_window_begin(self, engine: TrainingRun) -> None:
        """A window opens: gradients are summed from here on."""

    def on_micro_step_end(self, engine: TrainingRun, loss: torch.Tensor) -> None:
        """A backward completed; ``loss`` is the micro-batch's, detached."""

    def on_retry(self, engine: TrainingRun, parts: int) -> None:
        """Memory ran out, and the window starts again in this many parts."""

    def on_optimizer_step_begin(self, engine: TrainingRun) -> None:
        """Gradients are final: the optimizer will use them as they are."""

    def on_optimizer_step_end(self, engine: TrainingRun) -> None:
        """Parameters are updated."""

    def on_window_end(self, engine: TrainingRun, result: "StepResult") -> None:
        """A window closed with this result."""

    def on_epoch_end(self, engine: TrainingRun) -> None:
        """An epoch ended; ``engine.epoch`` counts it."""

    def on_fit_end(self, engine: TrainingRun) -> None:
        """Training ended."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, as plain values and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""


class EarlyStopping(Callback):
    """Ends ``fit`` when a metric stops improving.

    Args:
        metric: ``metric(engine)``, called at the end of each epoch; lower is better. By default the mean of
            the epoch's training losses.
        patience: epochs without improvement after which training ends.
        min_delta: the smallest decrease that counts as an improvement.
    """

    def __init__(
        self, metric: "Callable[[Any], float] | None" = None, *, patience: int = 3, min_delta: float = 0.0
    ) -> None:
        if patience < 1:
            raise UsageError(f"EarlyStopping: 'patience' must be at least 1, not {patience}.")
        self._metric, self._patience, self._min_delta = metric, patience, min_delta
        self.best = float("inf")
        self.waited = 0
        self._sum: torch.Tensor | None = None
        self._updates = 0

    def on_fit_begin(self, engine: TrainingRun) -> None:
        """End at once if the resumed run had already ended."""
        if self.waited >= self._patience:
            engine.stop()

    def on_window_end(self, engine: TrainingRun, result: "StepResult") -> None:  # noqa: ARG002
        """Add the loss on its device, if there was an update."""
        if self._metric is None and result.updated:
            self._sum = result.loss_tensor if self._sum is None else self._sum + result.loss_tensor
            self._updates += 1

    def on_epoch_end(self, engine: TrainingRun) -> None:
        """Compare with the best value, and stop when patience runs out."""
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
        """Return the best value, the epochs since, and the epoch's losses so far."""
        return {"best": self.best, "waited": self.waited, "sum": self._sum, "updates": self._updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.best, self.waited = state["best"], state["waited"]
        self._sum, self._updates = state["sum"], state["updates"]


class Saving(Callback):
    """Saves the run to a file, atomically: every n-th window, after each epoch and when ``fit`` ends.

    It also saves if ``fit`` ends with an exception, unless a window is open or an update is torn.

    Args:
        path: the file; each save replaces the previous one.
        every: windows between saves.
    """

    def __init__(self, path: Any, *, every: int = 1) -> None:
        if every < 1:
            raise UsageError(f"Saving: 'every' must be at least 1, not {every}.")
        self._path, self._every, self._windows = path, every, 0
        self._saved = True

    def on_window_end(self, engine: TrainingRun, result: "StepResult") -> None:  # noqa: ARG002
        """Save every n-th window."""
        self._windows += 1
        self._saved = self._windows % self._every == 0
        if self._saved:
            engine.save(self._path)

    def on_epoch_end(self, engine: TrainingRun) -> None:
        """Save at the end of the epoch."""
        engine.save(self._path)
        self._saved = True

    def on_fit_end(self, engine: TrainingRun) -> None:
        """Save what was trained since the last save."""
        if not self._saved and engine.is_whole:
            engine.save(self._path)
            self._saved = True
