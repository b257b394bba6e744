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

from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import torch

from memfit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from weakref import ref

    from memfit.train.accumulation_window import StepResult


Mode = Literal["min", "max"]
"""Whether lower or higher values are better."""


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

    watched: str = ""
    """The name of the validated metric that it needs, if any: checked before the first epoch."""

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


class EarlyStopping(Callback):
    """Ends ``fit`` when a metric stops improving.

    Args:
        metric: the name of a validated metric, or ``metric(engine)``, called at the end of each epoch. By
            default the validated ``"loss"`` or, without validation, the mean of the epoch's training losses.
        patience: epochs without improvement after which training ends.
        min_delta: the smallest change that counts as an improvement.
        mode: ``"min"`` if lower is better, ``"max"`` if higher is.
    """

    def __init__(
        self,
        metric: "Callable[[Any], float] | str | None" = None,
        *,
        patience: int = 3,
        min_delta: float = 0.0,
        mode: Mode = "min",
    ) -> None:
        if patience < 1:
            raise UsageError(f"EarlyStopping: 'patience' must be at least 1, not {patience}.")
        _expect_mode("EarlyStopping", mode)
        self._metric, self._patience, self._min_delta, self._mode = metric, patience, min_delta, mode
        self.watched = metric if isinstance(metric, str) else ""
        self.best = _worst(mode)
        self.waited = 0
        self._sum: torch.Tensor | None = None
        self._updates = 0

    def on_fit_begin(self, engine: EngineSeenByCallbacks) -> None:
        """End at once if the resumed run had already ended."""
        if self.waited >= self._patience:
            engine.stop()

    def on_window_end(self, engine: EngineSeenByCallbacks, result: "StepResult") -> None:  # noqa: ARG002
        """Add the loss on its device, if there was an update."""
        if self._metric is None and result.updated:
            self._sum = result.loss_tensor if self._sum is None else self._sum + result.loss_tensor
            self._updates += 1

    def on_epoch_end(self, engine: EngineSeenByCallbacks) -> None:
        """Compare with the best value, and stop when patience runs out."""
        if self.watched:
            value = _validated("EarlyStopping", engine, self.watched)
        elif callable(self._metric):
            value = float(self._metric(engine))
        elif "loss" in engine.metrics:
            value = engine.metrics["loss"]
        elif self._sum is not None:
            value = float(self._sum) / self._updates
        else:
            return
        self._sum, self._updates = None, 0
        if _improves(value, self.best, self._min_delta, self._mode):
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
        best: the name of a validated metric: save only after epochs in which it is better than ever before.
        mode: as for ``EarlyStopping``.
    """

    def __init__(self, path: Any, *, every: int = 1, best: str = "", mode: Mode = "min") -> None:
        if every < 1:
            raise UsageError(f"Saving: 'every' must be at least 1, not {every}.")
        _expect_mode("Saving", mode)
        self._path, self._every, self._windows = path, every, 0
        self.watched, self._mode, self._best = best, mode, _worst(mode)
        self._saved = True

    def on_window_end(self, engine: EngineSeenByCallbacks, result: "StepResult") -> None:  # noqa: ARG002
        """Save every n-th window."""
        if self.watched:
            return
        self._windows += 1
        self._saved = self._windows % self._every == 0
        if self._saved:
            engine.save(self._path)

    def on_epoch_end(self, engine: EngineSeenByCallbacks) -> None:
        """Save at the end of the epoch."""
        if self.watched:
            value = _validated("Saving", engine, self.watched)
            if not _improves(value, self._best, 0.0, self._mode):
                return
            self._best = value
        engine.save(self._path)
        self._saved = True

    def on_fit_end(self, engine: EngineSeenByCallbacks) -> None:
        """Save what was trained since the last save."""
        if not self._saved and engine.is_whole:
            engine.save(self._path)
            self._saved = True

    def state_dict(self) -> dict[str, Any]:
        """Return the best value so far."""
        return {"best": self._best} if self.watched else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self._best = state.get("best", self._best)


def callbacks_in_call_order(callbacks: "Iterable[Callback]") -> tuple[Callback, ...]:
    """Return callbacks in the order in which they are called.

    Raises:
        UsageError: they are something else.
    """
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


def check_watched_metrics(callbacks: "Iterable[Callback]", names: "Collection[str]") -> None:
    """Check that the metrics that callbacks watch are among those that ``fit`` validates.

    If it validates none, a callback may call ``engine.validate`` itself: only the end of the epoch shows.
    """
    for callback in callbacks:
        if names and callback.watched and callback.watched not in names:
            raise _not_validated(type(callback).__name__, callback.watched, names)


def _validated(who: str, engine: EngineSeenByCallbacks, name: str) -> float:
    if name not in engine.metrics:
        raise _not_validated(who, name, engine.metrics)
    return engine.metrics[name]


def _not_validated(who: str, name: str, names: "Collection[str]") -> UsageError:
    known = f"The metrics are {', '.join(names)}." if names else "There are none."
    return UsageError(
        f"{who}: no validated metric is named {name!r}. {known} Pass engine.fit(validate=..., "
        f"metrics={{{name!r}: ...}})."
    )


def _improves(value: float, best: float, least: float, mode: Mode) -> bool:
    return value < best - least if mode == "min" else value > best + least


def _worst(mode: Mode) -> float:
    return float("inf") if mode == "min" else float("-inf")


def _expect_mode(who: str, mode: str) -> None:
    if mode not in get_args(Mode):
        raise UsageError(f"{who}: 'mode' must be one of {', '.join(get_args(Mode))}, not {mode!r}.")
