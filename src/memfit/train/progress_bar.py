"""A progress bar for ``fit`` that names its unit.

epoch 2/5 ━━━━╸━━━━━ 12/26 batches, 1 per update  3.1/s  0:00:04 left  loss 0.25
epoch 2/5 ━━━━╸━━━━━ 12/26 batches, 4 per update  3.1/s  0:00:04 left  loss 0.25
"""

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from memfit.random_state import preserve_python_random_state

with preserve_python_random_state():  # importing rich draws random numbers from the script's generator
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
        track,
    )
    from rich.table import Column

from memfit.train.callbacks import Callback, EngineSeenByCallbacks

if TYPE_CHECKING:
    from memfit.train.accumulation_window import StepResult

_SECONDS_BETWEEN_LOSSES = 0.5  # reading a loss waits for the device


class ProgressBar(Callback):
    """Shows the progress of ``fit`` in batches, and how many of them make an optimizer step; on rank 0 only.

    Args:
        console: where to draw; the terminal's standard error by default.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(None),  # takes what the others leave, so that these are never cut in 80 columns
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("batches, {task.fields[gathered]} per update {task.fields[rate]}"),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            TextColumn("left  loss {task.fields[loss]}"),
            console=console or Console(stderr=True),
        )
        self._task: TaskID | None = None
        self._shown = 0.0

    def on_fit_begin(self, engine: EngineSeenByCallbacks) -> None:
        """Start drawing."""
        if engine.rank == 0:
            self._progress.start()

    def on_epoch_begin(self, engine: EngineSeenByCallbacks) -> None:
        """Start a bar, at the position of a resumed epoch."""
        if engine.rank:
            return
        self._task = self._progress.add_task(
            "",
            total=engine.batches,
            epoch=f"{engine.epoch + 1}/{engine.epochs}",
            gathered=engine.batches_per_update,
            rate="",
            loss="-",
        )
        self._began, self._before = time.monotonic(), engine.batch

    def on_window_end(self, engine: EngineSeenByCallbacks, result: "StepResult") -> None:
        """Advance the bar."""
        if self._task is None:
            return
        now = time.monotonic()
        self._progress.update(self._task, completed=engine.batch)
        if now - self._shown >= _SECONDS_BETWEEN_LOSSES:
            self._shown = now
            rate = f" {(engine.batch - self._before) / max(now - self._began, 1e-9):.1f}/s "
            self._progress.update(self._task, rate=rate, loss=f"{result.loss:.4g}")

    def on_fit_end(self, engine: EngineSeenByCallbacks) -> None:  # noqa: ARG002
        """Stop drawing and restore the terminal."""
        self._progress.stop()
        self._task = None


def show_rereading_progress(
    items: Iterable[Any], total: int, console: Console | None = None
) -> Iterator[Any]:
    """Yield items, and show a progress bar until the last."""
    where = console or Console(stderr=True)
    yield from track(items, "re-reading the epoch", total, console=where, transient=True)
