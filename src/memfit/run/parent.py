"""The parent process of a run: start the script's process, follow its progress, and read its trace.

this process                       the script's process (child.py)
------------                       -------------------------------
settings        ──── file ───────> load ghost (or none), run script
progress line   <─── pipe ──────── step, allocated, peak, end
read_trace      <─── file ──────── write_trace
"""

import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec

from memfit.atomic_files import check_outputs
from memfit.errors import INTERRUPTED, MemfitError, OutputError, TargetError, UsageError
from memfit.python_command import python_code
from memfit.records import ScriptEnd, Trace
from memfit.run.check_script import check_script
from memfit.run.child_settings import ChildSettings, GhostSettings, write_settings
from memfit.run.options import RunOptions
from memfit.trace.trace_file import read_trace

_REFUSALS: dict[int, type[MemfitError]] = {error.exit_code: error for error in (UsageError, TargetError)}
POLL_INTERVAL = 0.1  # seconds between two checks of the process


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of the script."""

    step: int = 0
    """Training steps completed."""
    allocated: int = 0
    """Bytes allocated now."""
    peak: int = 0
    """Most bytes allocated so far."""
    compiling: bool = False
    """Whether torch.compile is compiling the script's code."""
    trying: str = ""
    """Name of the change being tried, if the run is one of several."""


class _ChildMessage(msgspec.Struct):
    """One line from the child: its progress, or how the script ended."""

    step: int = 0
    allocated: int = 0
    peak: int = 0
    compiling: bool = False
    end: ScriptEnd | None = None
    traced: bool = False
    unsaved: str = ""


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """What a script's process recorded."""

    trace: Trace
    unsaved: OutputError | None
    """Why the trace is not in the file that the caller named; None if it is, or if the caller named none."""


def run_script(
    command: tuple[str, ...],
    options: RunOptions,
    ghost: GhostSettings | None,
    output: Path | None,
    on_progress: Callable[[Progress], None],
) -> RecordedRun:
    """Run a script in a process of its own and return its trace, even if it cannot be saved.

    Args:
        command: the script (or module) and its arguments: its ``sys.argv``.
        options: how to run it.
        ghost: what ``ghost_settings(options)`` returned; None runs on this machine's GPU.
        output: where to keep the trace; None keeps no file.
        on_progress: called about ten times a second, also without progress.

    Raises:
        TargetError: the script never used the GPU, its process died, or torch here has no kernels for
            the requested device.
    """
    with tempfile.TemporaryDirectory(prefix="memfit-") as folder:
        fallback = Path(folder) / "run.memfit"
        path = fallback if output is None else output
        reader, writer = os.pipe()
        try:
            with _script_handles_interrupts():
                settings = ChildSettings(options, ghost, str(path.absolute()), str(fallback), writer)
                last = _run_process(command, settings, Path(folder), reader, on_progress)
                _check_end(command[0], last)
        finally:
            os.close(reader)
        if last.unsaved:
            return RecordedRun(read_trace(fallback), OutputError(last.unsaved))
        return RecordedRun(read_trace(path), None)


def script_command(
    script: str | Path, arguments: Sequence[str], options: RunOptions, output: Path | None
) -> tuple[str, ...]:
    """Return the script's ``sys.argv``, checked before anything is built or run.

    Raises:
        UsageError: there is no such script, the trace cannot be written to ``output``, or ``steps`` is out
            of range.
        FileFormatError: the script cannot be read.
        TargetError: the script is not valid Python.
    """
    if options.steps is not None and options.steps < 1:
        raise UsageError(f"steps must be at least 1, not {options.steps}.")
    command = (str(script), *arguments)
    if not options.module:
        check_script(Path(command[0]))
    check_outputs({"output": output}, {} if options.module else {"the script": Path(command[0])})
    return command


def _check_end(script: str, last: _ChildMessage) -> None:
    """Raise unless the script's process wrote a trace."""
    if last.end is None:
        raise AssertionError  # _run_process raises in that case
    if last.end.reason == "refused":
        raise _REFUSALS.get(last.end.exit_code, TargetError)(last.end.exception)
    if not last.traced and last.end.reason == "interrupted":
        raise KeyboardInterrupt
    if not last.traced:
        raise TargetError(_never_used(script, last.end))


def _run_process(
    command: tuple[str, ...],
    settings: ChildSettings,
    folder: Path,
    reader: int,
    on_progress: Callable[[Progress], None],
) -> _ChildMessage:
    """Run the script's process to its end, and return its last message; its settings lie in the folder."""
    settings_file = folder / "settings.json"
    settings_file.write_text(write_settings(settings), "ascii")
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    process = subprocess.Popen(
        [sys.executable, *flags, "-c", python_code("memfit.run.child"), str(settings_file), *command],
        pass_fds=(settings.progress,),
    )
    os.close(settings.progress)
    last = _ChildMessage()
    try:
        for message in _messages(reader, process):
            last = message or last
            on_progress(Progress(last.step, last.allocated, last.peak, compiling=last.compiling))
            if last.end is not None:
                break
        status = process.wait()
    except BaseException:
        process.kill()
        process.wait()
        raise
    if last.end is None and status in (-signal.SIGINT, INTERRUPTED):
        raise KeyboardInterrupt
    if last.end is None:
        raise TargetError(_died(status, on_ghost=settings.ghost is not None))
    return last


def _messages(reader: int, process: subprocess.Popen[bytes]) -> Iterator[_ChildMessage | None]:
    """Yield the child's messages, and None after each interval without one, until the child ends."""
    decoder = msgspec.json.Decoder(_ChildMessage)
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        while True:
            # End of file is not enough: processes that the script started may hold the pipe open.
            alive = process.poll() is None
            if not selector.select(POLL_INTERVAL if alive else 0):
                if not alive:
                    return
                yield None
                continue
            chunk = os.read(reader, 65536)
            if not chunk:
                return
            *complete, rest = (rest + chunk).split(b"\n")
            for text in complete:
                yield decoder.decode(text)


@contextmanager
def _script_handles_interrupts() -> Iterator[None]:
    """Leave the first Ctrl-C to the script, which shares the terminal; this process then reports on the run.

    A signal to this process alone (a scheduler's SIGTERM) ends the script as well.
    """
    presses = 0

    def ignore_first(_number: int, _frame: FrameType | None) -> None:
        nonlocal presses
        presses += 1
        if presses > 1:
            raise KeyboardInterrupt

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    handlers = {signal.SIGINT: ignore_first, signal.SIGTERM: end, signal.SIGHUP: end}
    try:
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    except ValueError:  # not the main thread, where Python allows no signal handlers
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _never_used(name: str, end: ScriptEnd) -> str:
    if end.reason == "exception":
        return f"{name} failed before it used the GPU: {end.exception}"
    if end.exit_code:
        return f"{name} ended with exit code {end.exit_code} before it used the GPU."
    return (
        f"{name} finished without using the GPU, so there is nothing to measure. "
        "Check whether the script runs on the CPU by default. If it trains in subprocesses, memfit cannot "
        "measure them yet."
    )


def _died(status: int, *, on_ghost: bool) -> str:
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"
    gap = (
        " If the process crashed inside a CUDA library call, the ghost does not support that call (memfit "
        "doctor --gaps lists the unsupported calls that are known)."
    )
    return (
        f"The script's process {how} before it returned a result. If there is a Python traceback above, it "
        f"names the line that was running.{gap if on_ghost else ''}"
    )
