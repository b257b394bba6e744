"""``memfit.watch()``: watch a training run from inside its process.

    each training step     the memory that PyTorch reports, beside what a dry run predicted
    out of memory          a post-mortem (``postmortem.py``), then the script's exception as usual

An error in the watch never reaches the script: memfit prints it once, and the run continues without.
"""

import atexit
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from memfit.api.traces import read
from memfit.errors import UsageError
from memfit.records import Phase, Trace
from memfit.report.escape_control_characters import escaped
from memfit.report.terminal.progress_line import Show, show_progress_line
from memfit.units import GIB
from memfit.watching.measure_run_stages import RunStageMeter
from memfit.watching.prediction import PlannedPeak, Prediction, StepMemory
from memfit.watching.prediction_comparison import (
    PeakComparer,
    PredictionComparer,
    prediction_source_text,
    step_progress_text,
)

if TYPE_CHECKING:
    from memfit.recording.recorder import Recorder
    from memfit.watching.postmortem import AllocationFailure

WHOLE_STEPS = 2
"""Training steps after which the recorder drops them: at most this many are in a post-mortem's history."""
LONGEST = 200_000
"""Changes of label after which the recorder drops the past if no training step ends."""


class _ScalarWriter(Protocol):
    """Receives scalars: ``torch.utils.tensorboard.SummaryWriter``, or any object with its method."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> Any:
        """Write one scalar."""


def watch(
    prediction: Trace | str | Path | None = None,
    *,
    writer: _ScalarWriter | None = None,
    folder: str | Path = ".",
    labels: bool = False,
    files: int = 3,
) -> "Watch":
    """Watch a training run: report each step's memory, and what held it when memory runs out.

    On a terminal, memfit keeps one line on standard error up to date: the step, the peak that PyTorch reports
    (``torch.cuda.max_memory_allocated()``, whose counters memfit does not reset), the prediction, and the
    difference. Elsewhere it prints one line at the end. It reports the first difference above 1 %, once. With
    the trace of a whole run it does so for evaluation, saving and loading, too; a line for each is the last.

    When an allocation fails for good, memfit writes a trace (``memfit-oom-1.memfit``, for ``memfit explain``)
    and a report (``.html``) while all tensors are still alive; then the script gets its exception.

    Args:
        prediction: the trace of a dry run of the same script (``memfit dry-run -o run.memfit``), or its path.
            Steps after the last one in the trace are predicted to equal that one. In the trace of a whole run
            (``--whole``), the same holds for each stage and for the steps in it.
        writer: where scalars go at each step: a ``SummaryWriter`` of TensorBoard.
        folder: where post-mortems are written. memfit never overwrites a file.
        labels: record which line and which module allocates, for the post-mortem. This costs microseconds for
            each allocation and each call of a module. Without it, a post-mortem names parameters, gradients
            and optimizer state by module, and activations by operation.
        files: the most post-mortems to write; a script may continue after one.

    Returns:
        A context manager; ``start()`` and ``stop()`` do the same where a ``with`` block is inconvenient.

    Raises:
        UsageError: the folder does not exist, an argument is invalid, or the trace holds no training step or
            is a post-mortem.
        FileFormatError: the file is not a trace.

    >>> with watch("run.memfit"):  # doctest: +SKIP
    ...     train()
    """
    if not isinstance(prediction, Trace | str | Path | None):
        raise UsageError(f"'prediction' must be the trace of a dry run, or its path, not {prediction!r}.")
    if writer is not None and not callable(getattr(writer, "add_scalar", None)):
        raise UsageError(
            f"writer={writer!r} has no add_scalar method. Pass a TensorBoard SummaryWriter, or omit writer."
        )
    if not isinstance(files, int) or files < 0:
        raise UsageError(
            f"'files' must be a whole number, 0 or more, not {files!r}. Use 0 to disable post-mortems."
        )
    if not isinstance(folder, str | Path) or not Path(folder).is_dir():
        raise UsageError(
            f"The folder for post-mortems does not exist: {folder}. Create the folder, or pass another one."
        )
    if isinstance(prediction, str | Path):
        prediction = read(prediction)
    expected = None if prediction is None else Prediction.of(prediction)
    return Watch(expected, writer, Path(folder).resolve(), labels=labels, files=files)


class Watch:
    """What ``watch`` returns: the watch of one training run."""

    def __init__(
        self,
        prediction: Prediction | PlannedPeak | None,
        writer: _ScalarWriter | None,
        folder: Path,
        *,
        labels: bool,
        files: int,
    ) -> None:
        self._prediction = prediction
        self._writer = writer
        self._folder = folder
        self._labels = labels
        self._files = files
        self._recorder: Recorder | None = None
        self._until_stop = ExitStack()
        self._show: Show | None = None
        self._process = 0
        self._writing = threading.Lock()
        self._reset()

    @property
    def _is_forked(self) -> bool:
        """Whether this process was forked from the watched one."""
        return self._process != os.getpid()

    def _reset(self) -> None:
        self._failures = 0
        self._failed_step = -1  # the steps completed when memory last ran out
        self._step = 0
        self._last: tuple[int, StepMemory] | None = None
        self._comparison: PredictionComparer | PeakComparer | None = None
        self._broken = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start watching; do nothing if memfit already records this script, as under ``memfit dry-run``."""
        import torch  # under memfit, importing torch installs the recorder

        from memfit.recording.recorder import Recorder, installed_recorder

        if installed_recorder() is not None:
            _print_line("watch() does nothing in this run, because memfit is already recording the script.")
            return
        recorder = Recorder(
            None,
            None,
            labels=self._labels,
            on_change=self._on_phase_change,
            end_now=lambda _: None,
            live=True,
        )
        self._recorder, until_stop = recorder, self._until_stop
        self._process = os.getpid()
        self._reset()
        until_stop.callback(recorder.remove)
        if self._prediction is not None:
            self._comparison = self._compare_with(self._prediction, recorder)
        recorder.install()
        # Not now: it would initialise CUDA, and a process with CUDA initialised cannot fork.
        torch.cuda._lazy_call(functools.partial(self._observe, recorder))  # type: ignore[no-untyped-call]
        if sys.stderr is not None and sys.stderr.isatty():
            self._show = until_stop.enter_context(show_progress_line())
        atexit.register(self.stop)
        until_stop.callback(atexit.unregister, self.stop)

    def stop(self) -> None:
        """Stop watching, and restore PyTorch's hooks. A second call does nothing.

        In a forked process it does nothing, because the terminal belongs to the parent.
        """
        if self._recorder is None or self._is_forked:
            return
        self._recorder = self._show = None
        self._until_stop.close()
        try:
            self._print_conclusion()
        except Exception as error:  # noqa: BLE001 - CUDA may be unusable after an error
            _print_line(f"no summary of the run was printed: {type(error).__name__}: {error}")

    # -- while the script runs ----------------------------------------------------------------

    def _observe(self, recorder: "Recorder") -> None:
        """Observe failures of the allocator, unless the watch has stopped. Runs once CUDA is initialised."""
        from memfit.watching.postmortem import observe_allocation_failures

        if self._recorder is not recorder:
            return
        try:
            self._until_stop.callback(observe_allocation_failures(self._out_of_memory))
        except Exception as error:  # noqa: BLE001 - the script must continue
            _print_line(f"no post-mortem will be written: {error}")

    def _on_phase_change(self) -> None:
        """Handle the end of a training step. Called at each change of phase."""
        recorder = self._recorder
        if recorder is None:
            return
        step = recorder.steps.completed
        if step > self._step:
            self._step = step
            self._safely(self._compare, step)
            if step % WHOLE_STEPS == 0:
                recorder.forget()
        elif len(recorder.book.serials) > LONGEST and recorder.book.phase is Phase.INPUT:
            recorder.forget()

    def _compare_with(
        self, prediction: Prediction | PlannedPeak, recorder: "Recorder"
    ) -> PredictionComparer | PeakComparer:
        """Return the comparison with a prediction, which follows the stages of the run if it has any."""
        import torch

        if isinstance(prediction, PlannedPeak):
            return PeakComparer(prediction)
        if not prediction.stages:
            return PredictionComparer(prediction, None)
        stages = RunStageMeter(_current_memory, torch.is_grad_enabled)
        recorder.stages.wanted = True
        recorder.book.listeners.append(functools.partial(self._safely, stages.add))
        return PredictionComparer(prediction, stages)

    def _safely(self, action: Callable[..., None], *args: Any) -> None:
        """Do something that the script must not notice if it fails."""
        if self._broken or self._is_forked:
            return
        try:
            action(*args)
        except Exception as error:  # noqa: BLE001 - for example the writer's; the script must continue
            self._broken = True
            _print_line(f"stopped comparing steps: {type(error).__name__}: {error}")

    def _compare(self, step: int) -> None:
        measured = _current_memory()
        if not measured.peak:  # the script trains on the CPU, or PyTorch's statistics are off
            return
        self._last = step, measured
        differences, expected = [], None
        if self._comparison is not None:
            differences = list(self._comparison.step(step, measured))
            expected = self._comparison.expected
        if self._show is not None:
            self._show(step_progress_text(step, measured, expected))
        self._print_differences(differences)
        for whose, held in (("measured", measured), ("predicted", expected)):
            if self._writer is not None and held is not None:
                self._writer.add_scalar(f"memfit/peak_allocated_GiB/{whose}", held.peak / GIB, step)
                self._writer.add_scalar(f"memfit/allocated_GiB/{whose}", held.allocated / GIB, step)

    def _print_differences(self, found: Iterable[str]) -> None:
        for line in found:
            _print_line(f"{line} ({self._source()})")

    def _source(self) -> str:
        import torch

        return "" if self._prediction is None else prediction_source_text(self._prediction, torch.__version__)

    def _out_of_memory(self, failure: "AllocationFailure") -> None:
        """Write a post-mortem. Called when an allocation has failed, before PyTorch raises."""
        from memfit.watching.postmortem import write_postmortem

        if self._recorder is None or self._is_forked or not self._writing.acquire(blocking=False):
            return  # another thread is writing one, for the same shortage
        try:
            self._failures += 1
            self._failed_step = self._step
            if self._failures <= self._files:
                for line in write_postmortem(self._recorder, failure, self._folder):
                    _print_line(line)
            elif self._failures == self._files + 1:
                again = " again" if self._files else ""
                _print_line(
                    f"out of memory{again}; memfit writes no further post-mortem, because watch() was called "
                    f"with files={self._files}."
                )
        except BaseException as error:
            _print_line(f"no post-mortem was written: {type(error).__name__}: {error}")
            if not isinstance(error, Exception):
                raise  # Ctrl-C: the script gets it instead of the out-of-memory error
        finally:
            self._writing.release()

    def _print_conclusion(self) -> None:
        now = _current_memory()
        compared = None if self._broken else self._comparison
        if compared is not None:
            ran_out = self._failed_step == self._step
            self._print_differences(compared.finish(now, ran_out=ran_out))
        if self._last is None:
            import torch

            if torch.cuda.is_available():
                _print_line("no training step that uses a GPU completed while memfit watched.")
            else:
                _print_line("nothing was measured: PyTorch finds no GPU here.")
            return
        step, measured = self._last
        # The peak may have risen since, also in a step that did not complete.
        most = StepMemory(max(measured.peak, now.peak), measured.allocated)
        line = step_progress_text(step, most, self._comparison.expected if self._comparison else None)
        if self._comparison is not None:
            line += f" ({self._source()})"
        _print_line(line.removeprefix("memfit: "))
        for line in compared.table() if compared is not None else ():
            _print_line(line)


def _current_memory() -> StepMemory:
    """Return what PyTorch's counters hold now."""
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return StepMemory(0, 0)
    counted = torch._C._cuda_memoryStats(torch.cuda.current_device())["allocated_bytes"]["all"]
    return StepMemory(counted["peak"], counted["current"])


def _print_line(text: str) -> None:
    """Print a line on standard error, if there is one."""
    try:
        print(escaped(f"memfit: {text}"), file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):
        return  # standard error is closed
