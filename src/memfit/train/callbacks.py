"""Callbacks: what to do at the events of training.

    on_fit_begin
      on_epoch_begin
        on_window_begin             a batch that is divided, or the first of those that are gathered
          on_micro_step_end(loss)   after each backward
          on_retry(parts)           memory ran out: the window starts again, in this many parts
          on_optimizer_step_begin   gradients are final: summed, unscaled, clipped
          on_optimizer_step_end     parameters are updated; neither is called if fp16 gradients are not finite
        on_window_end(result)
      on_validation_end(metrics)    if ``fit`` validates
      on_epoch_end
    on_fit_end                      also when training ends with an exception

Epochs are those of ``fit``; all other events occur however training is driven. Callbacks are called in the
order given, ``Saving`` last, so that it saves the others' new state.
"""

from typing import TYPE_CHECKING, Any, Protocol

import torch

from memfit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from weakref import ref

    from memfit.train.accumulation_window import StepResult


class EngineSeenByCallbacks(Protocol):
    """What memfit's own callbacks use of the engine that calls them; the argument is the ``Engine``."""

    epoch: int
    epochs: int
    rank: int
    """Of this process among those that train together; 0 if it is alone."""
    batches: int | None
    metrics: dict[str, float]

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

    def on_fit_begin(self, engine: EngineSeenByCallbacks) -> None:
        """Training begins or resumes."""

    def on_epoch_begin(self, engine: EngineSeenByCallbacks) -> None:
        """An epoch begins; ``engine.epoch`` counts those before it."""

    def on_window_begin(self, engine: EngineSeenByCallbacks) -> None:
        """A window opens: gradients are summed from here on."""

    def on_micro_step_end(self, engine: EngineSeenByCallbacks, loss: torch.Tensor) -> None:
        """A backward completed; ``loss`` is the micro-batch's, detached."""

    def on_retry(self, engine: EngineSeenByCallbacks, parts: int) -> None:
        """Memory ran out, and the window starts again in this many parts."""

    def on_optimizer_step_begin(self, engine: EngineSeenByCallbacks) -> None:
        """Gradients are final: the optimizer will use them as they are."""

    def on_optimizer_step_end(self, engine: EngineSeenByCallbacks) -> None:
        """Parameters are updated."""

    def on_window_end(self, engine: EngineSeenByCallbacks, result: "StepResult") -> None:
        """A window closed with this result."""

    def on_validation_end(self, engine: EngineSeenByCallbacks, metrics: dict[str, float]) -> None:
        """A validation ended with these means."""

    def on_epoch_end(self, engine: EngineSeenByCallbacks) -> None:
        """An epoch ended; ``engine.epoch`` counts it."""

    def on_fit_end(self, engine: EngineSeenByCallbacks) -> None:
        """Training ended."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, as plain values and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""


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

    def on_window_end(self, engine: EngineSeenByCallbacks, result: "StepResult") -> None:  # noqa: ARG002
        """Save every n-th window."""
        self._windows += 1
        self._saved = self._windows % self._every == 0
        if self._saved:
            engine.save(self._path)

    def on_epoch_end(self, engine: EngineSeenByCallbacks) -> None:
        """Save at the end of the epoch."""
        engine.save(self._path)
        self._saved = True

    def on_fit_end(self, engine: EngineSeenByCallbacks) -> None:
        """Save what was trained since the last save."""
        if not self._saved and engine.is_whole:
            engine.save(self._path)
            self._saved = True


def callbacks_in_call_order(callbacks: "Iterable[Callback]") -> tuple[Callback, ...]:
    """Return callbacks in the order in which they are called."""
    if isinstance(callbacks, Callback) or not all(isinstance(each, Callback) for each in callbacks):
        raise UsageError(
            "Engine(callbacks=[...]) takes a list of memfit.Callback objects, such as memfit.Saving(path)."
        )
    return tuple(sorted(callbacks, key=lambda callback: isinstance(callback, Saving)))


def call_callbacks(reference: "ref[Any]", event: str, *arguments: Any) -> None:
    """Call the callbacks of an engine, held weakly so that it is freed when the script drops it."""
    engine = reference()
    if engine is not None:
        for callback in engine.callbacks:
            detached = (each.detach() if torch.is_tensor(each) else each for each in arguments)
            getattr(callback, event)(engine, *detached)
