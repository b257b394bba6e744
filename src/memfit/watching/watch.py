"""``memfit.watch()``: a training run, watched from inside its own process.

    each training step     what PyTorch counts, beside what a dry run predicted
    no more memory         a post-mortem (``postmortem.py``), and the script's exception as ever

Nothing that goes wrong here is the script's business: it is said once, and the run goes on without.
"""

import atexit
import functools
import os
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from memfit.api import read
from memfit.errors import UsageError
from memfit.records import Phase, Trace
from memfit.report.escape import inert
from memfit.report.terminal.progress_line import Show, progress_line
from memfit.units import GIB
from memfit.watching import messages
from memfit.watching.prediction import Counted, Prediction

if TYPE_CHECKING:
    from memfit.recording.recorder import Recorder
    from memfit.watching.postmortem import Failure

TOLERANCE = 1.0
"""Percent by which a step may differ from its prediction before that is said."""
WHOLE_STEPS = 2
"""Training steps after which those are forgotten: so many at most are in a post-mortem's history."""
LONGEST = 200_000
"""Changes of label after which what is past is forgotten where no training step ends."""


class ScalarWriter(Protocol):
    """What takes scalars: ``torch.utils.tensorboard.SummaryWriter``, or anything that has its method."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> Any:
        """Take one."""


def watch(
    prediction: Trace | str | Path | None = None,
    *,
    writer: ScalarWriter | None = None,
    folder: str | Path = ".",
    labels: bool = False,
    files: int = 3,
) -> "Watch":
    """Watch a training run: what each step holds, and who held what when memory runs out.

    On a terminal a line on standard error is kept up to date: the step, the peak that PyTorch has counted
    (``torch.cuda.max_memory_allocated()``, whose counters are left alone), what was predicted, and the
    difference. Elsewhere there is one line at the end. The first difference beyond 1 % is said, once.

    When an allocation fails for good, a trace (``memfit-oom-1.memfit``, for ``memfit explain``) and a report
    (``.html``) are written, while all that held memory is alive; then the exception goes on.

    Args:
        prediction: the trace of a dry run of the same script (``memfit dry-run -o run.memfit``), or its path.
            After its last step, that step is what is expected of all later ones.
        writer: where scalars go at each step: a ``SummaryWriter`` of TensorBoard.
        folder: where post-mortems are written. No file is ever overwritten.
        labels: record which line and which module allocates, for the post-mortem: microseconds for each
            allocation and each call of a module. Without, it names parameters, gradients and optimizer state
            by module, and activations by operation.
        files: how many post-mortems at most; a script may go on after one.

    Returns:
        A context manager; ``start()`` and ``stop()`` do the same where a block does not fit.

    Raises:
        UsageError: there is no such folder, an argument is not what it should be, or the trace holds no
            training step, or is a post-mortem.
        FileFormatError: the file is no trace.

    >>> with watch("run.memfit"):  # doctest: +SKIP
    ...     train()
    """
    if not isinstance(prediction, Trace | str | Path | None):
        raise UsageError(f"prediction={prediction!r}: give the trace of a dry run, or its path.")
    if writer is not None and not callable(getattr(writer, "add_scalar", None)):
        raise UsageError(f"writer={writer!r} has no add_scalar. Give a SummaryWriter, or nothing.")
    if not isinstance(files, int) or files < 0:
        raise UsageError(f"files={files!r}: give a whole number, 0 for no post-mortem.")
    if not isinstance(folder, str | Path) or not Path(folder).is_dir():
        raise UsageError(f"There is no folder {folder} for post-mortems. Make it, or name another.")
    if isinstance(prediction, str | Path):
        prediction = read(prediction)
    expected = None if prediction is None else Prediction.of(prediction)
    return Watch(expected, writer, Path(folder).resolve(), labels=labels, files=files)


class Watch:
    """A run that is watched: what ``watch`` returns."""

    def __init__(
        self,
        prediction: Prediction | None,
        writer: ScalarWriter | None,
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
        self._begin_anew()

    @property
    def _elsewhere(self) -> bool:
        """Whether this is a process that was forked from the one that is watched."""
        return self._process != os.getpid()

    def _begin_anew(self) -> None:
        self._failures = 0
        self._step = 0
        self._last: tuple[int, Counted] | None = None
        self._differs = False
        self._broken = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to watch; do nothing where memfit watches already, as under ``memfit dry-run``."""
        import torch  # under memfit, that is when its recorder comes

        from memfit.recording.recorder import Recorder, installed

        if installed() is not None:
            _say("watch() stands aside: memfit is watching this script already.")
            return
        recorder = Recorder(
            None, None, labels=self._labels, on_change=self._changed, end_now=lambda: None, live=True
        )
        self._recorder, until_stop = recorder, self._until_stop
        self._process = os.getpid()
        self._begin_anew()
        until_stop.callback(recorder.remove)
        recorder.install()
        # Not at once: it would initialise CUDA, and a process that did so cannot fork.
        torch.cuda._lazy_call(functools.partial(self._observe, recorder))  # type: ignore[no-untyped-call]
        if sys.stderr is not None and sys.stderr.isatty():
            self._show = until_stop.enter_context(progress_line(sys.stderr))
        atexit.register(self.stop)
        until_stop.callback(atexit.unregister, self.stop)

    def stop(self) -> None:
        """Watch no longer: everything is as it was before. To stop twice is to stop once.

        In a process that was forked from this one it does nothing: the terminal is not its own.
        """
        if self._recorder is None or self._elsewhere:
            return
        self._recorder = self._show = None
        self._until_stop.close()
        try:
            self._conclude()
        except Exception as error:  # noqa: BLE001 - of CUDA that an error has ended, say
            _say(f"there is no last line: {type(error).__name__}: {error}")

    # -- while the script runs ----------------------------------------------------------------

    def _observe(self, recorder: "Recorder") -> None:
        """Wait for failures of the allocator, unless this is over: CUDA is initialised now."""
        from memfit.watching.postmortem import observe

        if self._recorder is not recorder:
            return
        try:
            self._until_stop.callback(observe(self._out_of_memory))
        except Exception as error:  # noqa: BLE001 - whatever it is, the script goes on
            _say(f"there will be no post-mortem: {error}")

    def _changed(self) -> None:
        """Look whether a training step is over: called at each change of phase."""
        recorder = self._recorder
        if recorder is None:
            return
        step = recorder.steps.completed
        if step > self._step:
            self._step = step
            self._try_to_compare(step)
            if step % WHOLE_STEPS == 0:
                recorder.forget()
        elif len(recorder.book.serials) > LONGEST and recorder.book.phase is Phase.INPUT:
            recorder.forget()

    def _try_to_compare(self, step: int) -> None:
        if self._broken or self._elsewhere:
            return
        try:
            self._compare(step)
        except Exception as error:  # noqa: BLE001 - the writer's, say: the script goes on
            self._broken = True
            _say(f"steps are compared no longer: {type(error).__name__}: {error}")

    def _compare(self, step: int) -> None:
        import torch

        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return
        measured = _counted()
        if not measured.peak:  # it trains on the CPU, or PyTorch was told to count nothing
            return
        self._last = step, measured
        expected = self._expected(step)
        if self._show is not None:
            self._show(messages.state(step, measured, expected))
        if self._prediction is not None and expected is not None and not self._differs:
            found = messages.differences(measured, expected, TOLERANCE)
            if found:
                self._differs = True
                _say(f"step {step:,}: {found} ({messages.source(self._prediction, torch.__version__)})")
        if self._writer is not None:
            self._write_scalars(self._writer, step, {"measured": measured, "predicted": expected})

    def _expected(self, step: int) -> Counted | None:
        return None if self._prediction is None else self._prediction.at(step)

    def _write_scalars(self, writer: ScalarWriter, step: int, found: dict[str, Counted | None]) -> None:
        for whose, held in found.items():
            if held is not None:
                writer.add_scalar(f"memfit/peak_allocated_GiB/{whose}", held.peak / GIB, step)
                writer.add_scalar(f"memfit/allocated_GiB/{whose}", held.allocated / GIB, step)

    def _out_of_memory(self, failure: "Failure") -> None:
        """Write a post-mortem: called where an allocation has failed, before PyTorch raises."""
        from memfit.watching.postmortem import write

        if self._recorder is None or self._elsewhere or not self._writing.acquire(blocking=False):
            return  # one that another thread meets meanwhile has the same reasons
        try:
            self._failures += 1
            if self._failures <= self._files:
                for line in write(self._recorder, failure, self._folder):
                    _say(line)
            elif self._failures == self._files + 1:
                again = " again" if self._files else ""
                _say(f"out of memory{again}; no more than {self._files} post-mortems are written (files=).")
        except BaseException as error:
            _say(f"no post-mortem was written: {type(error).__name__}: {error}")
            if not isinstance(error, Exception):
                raise  # Ctrl-C: the script gets that, and not the exception that is due
        finally:
            self._writing.release()

    def _conclude(self) -> None:
        if self._last is None:
            _say("no training step with memory of a GPU was completed while watching.")
            return
        step, measured = self._last
        # Since then there may have been more, or a step that none followed.
        most = Counted(max(measured.peak, _counted().peak), measured.allocated)
        line = messages.state(step, most, self._expected(step))
        if self._prediction is not None:
            import torch

            line += f" ({messages.source(self._prediction, torch.__version__)})"
        _say(line.removeprefix("memfit: "))


def _counted() -> Counted:
    """Return what PyTorch counts now. CUDA is initialised."""
    import torch

    counted = torch._C._cuda_memoryStats(torch.cuda.current_device())["allocated_bytes"]["all"]
    return Counted(counted["peak"], counted["current"])


def _say(text: str) -> None:
    """Print a line on standard error, if there is one."""
    try:
        print(inert(f"memfit: {text}"), file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):
        return  # closed, or nobody reads it
