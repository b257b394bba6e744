"""The parent process of a run: start the script's process, follow its progress, and read its trace.

this process                       the script's process (child.py)
------------                       -------------------------------
settings        ──── file ───────> load ghost (or none), run script
progress line   <─── pipe ──────── step, allocated, peak, end
read_trace      <─── file ──────── write_trace

Ctrl-C in a terminal reaches both. The script ends as under python, and its trace up to there is reported; if
it takes longer than a moment to end, this process kills it with all that it started.
"""

import os
import re
import selectors
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from memfit.atomic_files import check_output_paths
from memfit.errors import MemfitError, OutputError, TargetError, UsageError
from memfit.records import ChildProcess, ScriptEnd, Trace
from memfit.records.command_as_typed import command_as_typed
from memfit.run.child_start import (
    ChildSettings,
    GhostSettings,
    ScriptSubprocess,
    StartScript,
    kill_script,
    start_script,
)
from memfit.run.follow_started_processes import UnfollowedProcesses, read_started_processes
from memfit.run.interruption import Interruption, hold_ctrl_c_back, leave_ctrl_c_to_script
from memfit.run.options import RunOptions
from memfit.run.parent_pipe import ChildMessage
from memfit.run.ranks_beside_script import OtherRanks
from memfit.run.ranks_started_by_script import StartedRanks
from memfit.run.run_script_as_python import check_script_path
from memfit.temporary_folders import TemporaryFolder
from memfit.termination_signals import INTERRUPTED
from memfit.trace.trace_file import read_trace

_REFUSALS: dict[int, type[MemfitError]] = {error.exit_code: error for error in (UsageError, TargetError)}
POLL_INTERVAL = 0.1  # seconds between two checks of the process
_ENDING_INTERVAL = 0.01  # after its last message, which it sends milliseconds before it ends
PATIENCE = 0.4
"""Seconds that a script on the ghost gets to end after Ctrl-C. Python acts on it only between two of its own
instructions, and libraries may swallow it."""


@dataclass(frozen=True, slots=True)
class ScriptProgress:
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
    beside: int = 0
    """Runs that are made beside it."""
    forked: bool = False
    """Whether the run goes on from where an earlier run began to train (``standby_fork.py``)."""
    unforked: str = ""
    """Why the run does not, if it could have."""
    rank: str = ""
    """The rank being run, if memfit runs several."""
    ranks_beside: tuple[int, ...] = ()
    """Ranks that run beside it, for what they send or write."""
    fits: float | None = None
    """The time of a step under the fastest plan so far that fits, relative to the script as written; None if
    none does, or none is looked for."""


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
    on_progress: Callable[[ScriptProgress], None],
    patience: float | None = 0.0,
    start: StartScript = start_script,
) -> RecordedRun:
    """Run a script in a process of its own and return its trace, even if it cannot be saved.

    Args:
        command: the script (or module) and its arguments: its ``sys.argv``.
        options: how to run it.
        ghost: what ``ghost_settings(options)`` returned; None runs on this machine's GPU.
        output: where to keep the trace; None keeps no file.
        on_progress: called about ten times a second, also without progress.
        patience: the seconds that the script gets to end after Ctrl-C, for a trace up to there; None for as
            long as it takes.
        start: starts the script's process; ``Standby.fork`` has the script's last part run only.

    Raises:
        KeyboardInterrupt: the user pressed Ctrl-C, and the script did not end by it in time.
        TargetError: the script never used the GPU, its process died, or torch here has no kernels for
            the requested device.
    """
    with TemporaryFolder() as folder:
        fallback = Path(folder) / "run.memfit"
        path = fallback if output is None else output
        pipe = Path(folder) / "progress"
        os.mkfifo(pipe)
        reader = os.open(pipe, os.O_RDWR)  # also to write: so it does not end before this process does
        try:
            with leave_ctrl_c_to_script(patience) as interruption:
                asks = folder if options.rank.world_size > 1 and not options.real_ranks else ""
                settings = ChildSettings(
                    options, ghost, str(path.absolute()), str(fallback), folder, str(pipe), asks
                )
                last = _run_process(command, settings, reader, on_progress, interruption, start)
        finally:
            os.close(reader)
        if interruption.pressed and (last.end is None or last.end.reason != "interrupted"):
            raise KeyboardInterrupt  # the script caught it, or had just ended
        ranks = StartedRanks(Path(folder), options.rank.nproc)
        _check_end(
            command_as_typed(command)[0],
            last,
            read_started_processes(Path(folder)),
            ranks.why_none_ran(options.rank),
        )
        if last.unsaved:
            return RecordedRun(read_trace(fallback), OutputError(last.unsaved))
        return RecordedRun(read_trace(path), None)


def checked_script_argv(
    script: str | Path, arguments: Sequence[str], options: RunOptions, output: Path | None
) -> tuple[str, ...]:
    """Return the script's ``sys.argv``, checked before anything is built or run.

    Raises:
        UsageError: there is no such script, its arguments are one text, the trace cannot be written to
            ``output``, or ``steps`` is out of range.
        FileFormatError: the script cannot be read.
        TargetError: the script is not valid Python.
    """
    if options.steps is not None and options.steps < 1:
        raise UsageError(f"steps must be at least 1, not {options.steps}.")
    if isinstance(arguments, str):
        raise UsageError(f"The script's arguments are a list of words: {shlex.split(arguments)}.")
    command = (str(script), *arguments)
    if not options.module:
        check_script_path(Path(command[0]))
    check_output_paths({"output": output}, {} if options.module else {"the script": Path(command[0])})
    return command


def _check_end(script: str, last: ChildMessage, children: tuple[ChildProcess, ...], none_ran: str) -> None:
    """Raise unless the script's process wrote a trace; ``none_ran`` as of ``StartedRanks.why_none_ran``."""
    if last.end is None:
        raise AssertionError  # _run_process raises in that case
    if last.end.reason == "refused":
        raise _REFUSALS.get(last.end.exit_code, TargetError)(last.end.exception)
    if not last.traced and last.end.reason == "interrupted":
        raise KeyboardInterrupt
    if not last.traced:
        raise TargetError(none_ran or _never_used(script, last.end, children))


def _run_process(
    command: tuple[str, ...],
    settings: ChildSettings,
    reader: int,
    on_progress: Callable[[ScriptProgress], None],
    interruption: Interruption,
    start: StartScript,
) -> ChildMessage:
    """Run the script's process to its end, and return its last message."""
    with hold_ctrl_c_back():
        process = start(command, settings)
    last, unfollowed = ChildMessage(), UnfollowedProcesses(process.pid, settings)
    until = None
    others = OtherRanks(command, settings)
    try:
        for message in _messages(reader, process):
            if last.patience is None:
                last = message or last
            elif until is None:
                until = time.monotonic() + last.patience
            unfollowed.look()
            beside = others.look()
            now = ScriptProgress(last.step, last.allocated, last.peak, last.compiling, ranks_beside=beside)
            on_progress(now)
            if interruption.exhausted(writing=last.interrupted and last.end is None):
                break
            if until is not None and time.monotonic() >= until:
                break
        else:
            process.wait()
    finally:
        others.close()
        kill_script(process)
    if last.end is not None:
        return last
    if interruption.pressed or process.returncode in (-signal.SIGINT, INTERRUPTED):
        raise KeyboardInterrupt
    raise TargetError(_died(process.wait(), on_ghost=settings.ghost is not None))


def _messages(reader: int, process: ScriptSubprocess) -> Iterator[ChildMessage | None]:
    """Yield the child's messages, and None after each interval without one, until the child ends."""
    decoder = msgspec.json.Decoder(ChildMessage)
    rest = b""
    interval = POLL_INTERVAL
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        while True:
            alive = process.poll() is None
            if not selector.select(interval if alive else 0):
                if not alive:
                    return
                yield None
                continue
            *complete, rest = (rest + os.read(reader, 65536)).split(b"\n")
            for text in complete:
                message = decoder.decode(text)
                interval = POLL_INTERVAL if message.end is None else _ENDING_INTERVAL
                yield message


def _never_used(name: str, end: ScriptEnd, children: tuple[ChildProcess, ...]) -> str:
    if children:
        started = ", ".join(child.name for child in children)
        did = "did" if any(child.peak for child in children) else "loaded PyTorch and may have"
        return (
            f"{name} did not use the GPU itself, but a process that it started {did}: {started}. "
            "Run memfit dry-run on the script that trains; if these processes are the ranks of one job, pass "
            "their number as --nproc."
        )
    if end.reason == "exception":
        launch = f" If torchrun starts it, write memfit dry-run torchrun {name}" * _lacks_rank(end.exception)
        return f"{name} failed before it used the GPU: {end.exception}{launch}"
    if end.exit_code:
        why = f": {end.exception}" if end.exception else "."
        return f"{name} ended with exit code {end.exit_code} before it used the GPU{why}"
    return (
        f"{name} finished without using the GPU, so there is nothing to measure. "
        "Check whether the script runs on the CPU by default."
    )


def _lacks_rank(exception: str) -> bool:
    """Return whether a script missed a variable that torchrun sets."""
    return bool(re.search(r"\b(LOCAL_)?(RANK|WORLD_SIZE)\b", exception))


def _died(status: int, *, on_ghost: bool) -> str:
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"
    if status == -signal.SIGKILL:
        how += ", as happens when this machine runs out of memory,"
    gap = (
        " If the process crashed inside a CUDA library call, the ghost does not support that call (memfit "
        "doctor --gaps lists the unsupported calls that are known)."
    )
    return (
        f"The script's process {how} before it returned a result. If there is a Python traceback above, it "
        f"names the line that was running.{gap if on_ghost else ''}"
    )
