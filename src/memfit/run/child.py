"""The process of the script: ``main()`` with ``SETTINGS.json SCRIPT.py ARGS...`` as arguments.

It loads the ghost, unless the script is recorded on a real GPU, runs the user's script as
``python SCRIPT.py`` would, and writes the trace. Nothing here imports torch before the script does, so that
environment variables that the script sets before importing torch take effect.
"""

import atexit
import ctypes
import faulthandler
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from memfit.errors import MemfitError, TargetError
from memfit.ghost.absent_ranks import stand_for_a_rank
from memfit.ghost.patching.after_import import after_import
from memfit.recording.evaluations import Evaluations
from memfit.recording.loader_batch_size import LoaderBatchSizes
from memfit.recording.script_options import ScriptOptions
from memfit.records import ScriptEnd
from memfit.run.backend import Backend, CardBackend, GhostBackend
from memfit.run.child_record import ChildRecord, record_failing_fork
from memfit.run.child_settings import ChildSettings, read_settings
from memfit.run.children import follow_children, read_children
from memfit.run.interruption import release_ctrl_c
from memfit.run.launchers import check_process_groups, free_port
from memfit.run.process_tree import kill_descendants
from memfit.run.script import end_of, print_as_python_does, run_as_main
from memfit.run.unfollowed import record_running

if TYPE_CHECKING:
    from memfit.recording.recorder import Recorder
    from memfit.records import LoaderBatchSize, Trace

PROGRESS_INTERVAL = 0.1  # seconds between two lines of progress
_exit = os._exit  # the script sees another: ScriptProcess._leave
THREAD_TIMEOUT = 5.0  # seconds that the threads of an ended script get to finish
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


class ParentPipe:
    """Sends lines of JSON to the parent: progress, at most ten times a second, and the end."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._last = 0.0
        self._step = 0
        self._compiling = False

    def compiling(self, compiling: bool) -> None:
        """Report whether the script compiles code."""
        self._compiling = compiling
        self._last = 0.0
        self.progress(self._step)

    def progress(self, step: int) -> None:
        """Report the script's progress, unless that was done just now."""
        self._step = step
        now = time.monotonic()
        if now - self._last < PROGRESS_INTERVAL:
            return
        self._last = now
        import torch

        ready = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._write(
            {
                "step": step,
                "allocated": torch.cuda.memory_allocated() if ready else 0,
                "peak": torch.cuda.max_memory_allocated() if ready else 0,
                "compiling": self._compiling,
            }
        )

    def interrupted(self) -> None:
        """Report that Ctrl-C ended the script, before its trace is written."""
        self._write({"interrupted": True})

    def end(self, end: ScriptEnd, *, traced: bool, unsaved: str = "") -> None:
        """Report how the script ended, whether a trace was written, and why it is not in its own file."""
        self._write({"end": end, "traced": traced, "unsaved": unsaved})

    def _write(self, line: dict[str, object]) -> None:
        if self._descriptor is None:
            return
        try:
            os.write(self._descriptor, msgspec.json.encode(line) + b"\n")
        except OSError:
            self._descriptor = None  # the parent has gone


class ScriptProcess:
    """One run of a script in this process."""

    def __init__(self, command: tuple[str, ...], settings: ChildSettings, backend: Backend) -> None:
        self._command = command
        self._settings = settings
        self._backend = backend
        self._parent = ParentPipe(settings.progress)
        self._pid = os.getpid()
        self._recorder: Recorder | None = None
        self._last_error: BaseException | None = None
        self._steps_reported = 0
        self._record: ChildRecord | None = None  # of a process beside the script's
        self._options, self._loaders = ScriptOptions(), LoaderBatchSizes()
        self._loader: LoaderBatchSize | None = None  # that of the last training step
        self._evaluations = Evaluations()
        self._leaving: set[int] = set()  # threads that have called os._exit
        self._options.install()
        self._loaders.install()

    def begin(self) -> None:
        """Start recording: torch has just been imported."""
        import torch

        from memfit.recording.recorder import Recorder

        options = self._settings.options
        torch.cuda._lazy_call(self._check_backend)  # type: ignore[no-untyped-call]
        recorder = Recorder(
            self._backend.ghost,
            options.steps,
            labels=options.labels,
            on_change=self._changed,
            end_now=lambda: self.finish(ScriptEnd("steps", 0)),
        )
        recorder.install()
        self._evaluations.install()
        os._exit = self._leave
        if self._settings.ghost is not None:
            folder = Path(self._settings.folder)
            os.register_at_fork(after_in_child=lambda: record_failing_fork(folder))
        self._backend.begin(recorder)
        self._recorder = recorder
        if self._settings.ghost is not None and self._is_the_script():
            after_import("torch.distributed.distributed_c10d", self._prepare_process_groups)
        after_import("torch._dynamo.callback", lambda: follow_compilations(self._parent.compiling))

    def _check_backend(self) -> None:
        """End the run if it cannot be measured on this backend."""
        if reason := self._backend.refusal():
            self._refuse(reason, TargetError.exit_code)
        if not self._is_the_script() and self._settings.ghost is not None:
            context = self._settings.ghost.device.context
            self._record = ChildRecord(Path(self._settings.folder), context)
            self._record.begin()

    def _leave(self, status: int) -> NoReturn:
        """End this process as ``os._exit`` does; the script's, with its trace."""
        if self._is_the_script() and threading.get_ident() not in self._leaving:
            self._leaving.add(threading.get_ident())
            self.finish(ScriptEnd("end", status), run_exit_handlers=False)
        _exit(status)

    def _is_the_script(self) -> bool:
        """Return whether this is the script's process, not a fork of it or one that it started."""
        return os.getpid() == self._pid

    def _prepare_process_groups(self) -> None:
        """Have the script join process groups as its rank, if there are others; refuse groups otherwise."""
        if self._settings.options.rank.world_size > 1:
            stand_for_a_rank(self._refuse_group, self._backend.joined)
        else:
            check_process_groups(self._refuse_group)

    def _refuse_group(self, why: str) -> None:
        """Refuse a process group of several, unless a fork of the script joins it: the others may exist."""
        if self._is_the_script():
            self._refuse(why, TargetError.exit_code)

    def _refuse(self, why: str, exit_code: int) -> NoReturn:
        self._parent.end(ScriptEnd("refused", exit_code, why), traced=False)
        _exit(exit_code)

    def script(self) -> ScriptEnd:
        """Run the script and return how it ended; its traceback goes to standard error."""
        in_threads: list[BaseException] = []
        threading.excepthook = _noting_excepthook(threading.excepthook, in_threads)
        try:
            run_as_main(self._command, module=self._settings.options.module)
        except BaseException as error:  # noqa: BLE001 - a script may end by raising anything
            self._last_error = error  # its frames keep the script's objects alive for the recorder
            end = end_of(error)
            if end.reason in ("end", "exception"):
                print_as_python_does(error)
            if end.reason == "exception" and (hint := self._backend.hint()):
                print(f"memfit: {hint}", file=sys.stderr)
            return end
        _join_threads(None)  # Python waits for them too; one of them may be the training
        if self._enough():
            return ScriptEnd("steps", 0)
        if in_threads:
            self._last_error = in_threads[0]
            return end_of(in_threads[0])
        return ScriptEnd("end", 0)

    def finish(self, end: ScriptEnd, *, run_exit_handlers: bool = True) -> None:
        """Write the trace, let the script's exit handlers run, and exit.

        The interpreter is not finalised: autograd's device thread may still be dropping its last
        Python object, which aborts a process that finalises at that moment.
        """
        if os.getpid() != self._pid:  # a fork of the script ends here
            if self._record is not None:
                self._record.end()
            _exit(end.exit_code)
        _flush()
        if end.reason == "interrupted":
            self._parent.interrupted()
        record_running(self._settings, self._pid)
        try:
            trace = self._trace(end)
            unsaved = self._save(trace) if trace is not None else ""
        except MemfitError as error:
            self._refuse(str(error), error.exit_code)
        self._parent.end(end, traced=trace is not None, unsaved=unsaved)
        if run_exit_handlers:
            _join_threads(THREAD_TIMEOUT)
            atexit._run_exitfuncs()
        _flush()
        if end.reason == "interrupted":
            kill_descendants(self._pid)
        _exit(end.exit_code)

    def _changed(self) -> None:
        if self._recorder is None:
            return
        completed = self._recorder.steps.completed
        if not self._is_the_script():
            if self._enough():
                self.finish(ScriptEnd("steps", 0))  # what started it may take an exception for a failure
            if self._record is not None:
                self._record.update()
            return
        self._parent.progress(completed)
        if completed > self._steps_reported:
            self._steps_reported = completed
            self._loader = self._loaders.last  # not that of an evaluation
            self._backend.stepped()

    def _enough(self) -> bool:
        wanted = self._settings.options.steps
        return self._recorder is not None and wanted is not None and self._recorder.steps.completed >= wanted

    def _uses_cuda(self) -> bool:
        torch = sys.modules.get("torch")
        return torch is not None and torch.cuda.is_initialized()

    def _trace(self, end: ScriptEnd) -> "Trace | None":
        """Return the trace of the script; None if it never used the GPU."""
        if self._recorder is None or not self._uses_cuda():
            return None
        from memfit.versions import versions

        if end.reason == "steps":
            end = replace(end, evaluation=self._evaluations.not_run())
        all_versions = versions() | self._backend.versions()
        trace = self._recorder.finish(
            self._backend.device(), end, self._command, all_versions, index=self._settings.options.rank.device
        )
        children = read_children(Path(self._settings.folder))
        return replace(
            trace, options=self._options.found(), loader=self._loader or self._loaders.last, children=children
        )

    def _save(self, trace: "Trace") -> str:
        """Write a trace to its file or, if that fails, to the temporary folder; return why it failed."""
        from memfit.trace.trace_file import write_trace

        try:
            write_trace(trace, Path(self._settings.output))
        except MemfitError as error:
            write_trace(trace, Path(self._settings.fallback))
            return str(error)
        return ""


def follow_compilations(report: Callable[[bool], None]) -> None:
    """Call ``report`` with True when torch.compile begins to compile, and with False when it ends."""
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(lambda _: report(True))
    callback_handler.register_end_callback(lambda _: report(False))


def main() -> None:
    """Run the script on the command line."""
    _, path, *command = sys.argv
    settings = read_settings(Path(path).read_text("ascii"))
    _end_with_parent(settings.progress)
    faulthandler.enable()
    if settings.options.stdout_to_stderr:
        os.dup2(2, 1)
    try:
        backend = CardBackend() if settings.ghost is None else GhostBackend(settings.ghost, settings.options)
    except MemfitError as error:
        ParentPipe(settings.progress).end(ScriptEnd("refused", error.exit_code, str(error)), traced=False)
        _exit(error.exit_code)
    if settings.options.rank.world_size > 1:
        os.environ.update(settings.options.rank.variables(free_port()))
    process = ScriptProcess(tuple(command), settings, backend)
    after_import("torch", process.begin)
    if settings.ghost is not None:
        follow_children(settings)
    release_ctrl_c()
    process.finish(process.script())


def _end_with_parent(progress: int) -> None:
    """Have the kernel kill this process when its parent ends, however that ends; leave if it has ended.

    Strictly, when the thread that started this process ends; that thread waits for this process.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = select.poll()
    parent.register(progress, select.POLLERR)  # the parent alone holds the end that reads
    if parent.poll(0):
        _exit(TargetError.exit_code)


def _join_threads(timeout: float | None) -> None:
    """Wait for the threads that Python waits for, at most ``timeout`` seconds in total."""
    until = None if timeout is None else time.monotonic() + timeout
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))


def _noting_excepthook(
    original: Callable[[threading.ExceptHookArgs], object], noted: list[BaseException]
) -> Callable[[threading.ExceptHookArgs], object]:
    """Return a hook that notes the exceptions which end threads, and is silent where memfit ends them."""

    def hook(arguments: threading.ExceptHookArgs) -> object:
        if arguments.exc_type.__name__ == "EnoughStepsReached":
            return None
        if arguments.exc_value is not None:
            noted.append(arguments.exc_value)
        return original(arguments)

    return hook


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # closed, or without a reader: Python itself exits silently then
