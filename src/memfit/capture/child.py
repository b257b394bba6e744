"""The process on the ghost: ``python -m memfit.capture.child '<settings as JSON>' SCRIPT.py ARGS...``.

It loads the ghost, runs the user's script as ``python SCRIPT.py`` would, and writes the trace. Until
the script itself imports torch nothing here does, so that a script which sets environment variables
first finds them honoured.
"""

import atexit
import builtins
import faulthandler
import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import platform
import runpy
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from memfit import __version__
from memfit.capture.settings import ChildSettings
from memfit.devices import find_device, refusal
from memfit.ghost.load import Ghost, load
from memfit.records import Provenance, ScriptEnd

if TYPE_CHECKING:
    from memfit.capture.recorder import Recorder
    from memfit.ghost.values import Values

PROGRESS_INTERVAL = 0.1  # seconds between two lines of progress


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function once a module has been imported, and leaves the import itself alone."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name = name
        self._action = action

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module as everyone else would, and hang the action on its loader."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_then_act(module: types.ModuleType) -> None:
                execute(module)
                self._action()

            spec.loader.exec_module = execute_then_act  # type: ignore[method-assign]
        return spec


class Report:
    """Lines of JSON to the parent, over a pipe: progress at most ten times a second, and the end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._last = 0.0

    def progress(self, step: int) -> None:
        """Tell how far the script is, unless that was done just now."""
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
            }
        )

    def end(self, end: ScriptEnd, *, traced: bool) -> None:
        """Tell how the script ended, and whether there is a trace."""
        self._write({"end": end, "traced": traced})

    def _write(self, line: dict[str, object]) -> None:
        if self._descriptor < 0:
            return
        try:
            os.write(self._descriptor, msgspec.json.encode(line) + b"\n")
        except OSError:
            self._descriptor = -1  # nobody is listening any more


class Run:
    """One run of a script in this process."""

    def __init__(self, command: tuple[str, ...], settings: ChildSettings, ghost: Ghost) -> None:
        self._command = command
        self._settings = settings
        self._ghost = ghost
        self._report = Report(settings.progress)
        self._process = os.getpid()
        self._recorder: Recorder | None = None
        self._values: Values | None = None
        self._last: BaseException | None = None

    def begin(self) -> None:
        """Start watching: torch has just been imported."""
        import torch

        from memfit.capture.recorder import Recorder
        from memfit.ghost import values

        settings = self._settings
        built_for = (torch._C._cuda_getArchFlags() or "").split()
        if refused := refusal(find_device(settings.device.name), built_for, torch.__version__):
            self._report.end(ScriptEnd("refused", 3, refused), traced=False)
            os._exit(3)
        recorder = Recorder(
            self._ghost,
            settings.steps,
            labels=settings.labels,
            on_change=self._changed,
            end_now=lambda: self.finish(ScriptEnd("steps", 0)),
        )
        recorder.install()
        choices = values.ValueChoices.parse(settings.values)
        self._values = values.install(self._ghost, choices, recorder.note, fallback_where=recorder.place)
        if settings.host_memory:
            from memfit.ghost import host

            host.install()
        self._recorder = recorder

    def script(self) -> ScriptEnd:
        """Run the script, and say how it ended; its own traceback goes to standard error."""
        threading.excepthook = _quiet_excepthook(threading.excepthook)
        try:
            _run(self._command, module=self._settings.module)
        except BaseException as error:  # noqa: BLE001 - whatever a script can raise is an end of it
            self._last = error  # its frames keep the script's objects alive until they were asked
            return self._ended_by(error)
        return ScriptEnd("steps" if self._enough() else "end", 0)

    def finish(self, end: ScriptEnd) -> None:
        """Write the trace, let the script's exit handlers run, and leave.

        The interpreter is not finalised: autograd's device thread may still be dropping its last
        Python object, which aborts a process that finalises at that moment.
        """
        if os.getpid() != self._process:
            os._exit(end.exit_code)  # the script forked, and this is the fork's end
        _flush()
        traced = self._write_trace(end)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        self._report.end(end, traced=traced)
        _flush()
        os._exit(end.exit_code)

    def _changed(self) -> None:
        if self._recorder is not None:
            self._report.progress(self._recorder.steps.completed)

    def _enough(self) -> bool:
        return self._recorder is not None and self._recorder.steps.completed >= self._settings.steps

    def _ended_by(self, error: BaseException) -> ScriptEnd:
        if isinstance(error, SystemExit):
            return ScriptEnd("end", _exit_code(error))
        if isinstance(error, KeyboardInterrupt):
            return ScriptEnd("interrupted", 130)
        if any(type(link).__name__ == "EnoughStepsReached" for link in _chain(error)):
            return ScriptEnd("steps", 0)
        summary = traceback.format_exception_only(error)[-1].strip()
        where = _innermost_user_line(error)
        if type(error).__name__ == "OutOfMemoryError" and type(error).__module__.startswith("torch"):
            return ScriptEnd("out of memory", 1, summary, where)
        _print_as_python_does(error)
        if self._values is not None and (hint := self._values.hint()):
            print(f"memfit: {hint}", file=sys.stderr)
        return ScriptEnd("exception", 1, summary, where)

    def _write_trace(self, end: ScriptEnd) -> bool:
        import_done = sys.modules.get("torch")
        if self._recorder is None or import_done is None or not import_done.cuda.is_initialized():
            return False
        from memfit.capture.tracefile import write_trace

        if self._settings.devices > 1:
            seen = f"The script saw {self._settings.devices} GPUs (CUDA_VISIBLE_DEVICES)"
            self._recorder.note(Provenance.EXACT, f"{seen}; these figures are the first one's.")
        gaps = {gap.name for gap in self._settings.build.gaps}
        for name in self._ghost.gaps_reached():
            self._recorder.note(
                Provenance.ASSUMED,
                f"The run reached {name}, a known gap: the ghost refused it; figures after that may be wrong."
                if name in gaps
                else f"The ghost assumed an answer ({name}): what it adds on a card counts as 0 bytes.",
            )
        trace = self._recorder.finish(self._settings.device, end, self._command, _versions())
        write_trace(trace, Path(self._settings.output))
        return True


def main() -> None:
    """Run the script on the command line."""
    _, text, *command = sys.argv
    settings = msgspec.json.decode(text, type=ChildSettings, dec_hook=lambda kind, value: kind(value))
    faulthandler.enable()
    if settings.stdout_to_stderr:
        os.dup2(2, 1)
    ghost = load(settings.build)
    ghost.configure(
        settings.ghost_device,
        count=settings.devices,
        in_use=settings.device.context.bytes + settings.device.in_use,
    )
    run = Run(tuple(command), settings, ghost)
    sys.meta_path.insert(0, AfterImport("torch", run.begin))
    run.finish(run.script())


def _run(command: tuple[str, ...], *, module: bool) -> None:
    """Run a script or a module as the interpreter's own command line would."""
    target = command[0]
    sys.argv[:] = command
    if module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(target).resolve().parent)
    if Path(target).is_dir():
        sys.path[0] = target
        runpy.run_path(target, run_name="__main__")
        return
    with io.open_code(target) as file:
        # PyTorch cannot name a file in its history whose name is not UTF-8.
        code = compile(file.read(), target.encode(errors="backslashreplace").decode(), "exec")
    main_module = types.ModuleType("__main__")
    main_module.__dict__.update(
        __file__=target,
        __builtins__=builtins,
        __loader__=importlib.machinery.SourceFileLoader("__main__", target),
        __cached__=None,
    )
    sys.modules["__main__"] = main_module
    exec(code, main_module.__dict__)  # noqa: S102 - running the user's script is the point


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code
    print(stop.code, file=sys.stderr)
    return 1


def _chain(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    return chain


def _innermost_user_line(error: BaseException) -> str:
    from memfit.ghost.where import is_user_file

    lines = [
        f"{frame.filename}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if is_user_file(frame.filename)
    ]
    return lines[-1] if lines else ""


def _print_as_python_does(error: BaseException) -> None:
    """Print a traceback that begins in the script, without the frames of this file."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def _quiet_excepthook(
    original: Callable[[threading.ExceptHookArgs], object],
) -> Callable[[threading.ExceptHookArgs], object]:
    def hook(arguments: threading.ExceptHookArgs) -> object:
        if arguments.exc_type.__name__ == "EnoughStepsReached":
            return None
        return original(arguments)

    return hook


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # closed, or nobody reads it: Python itself ends silently then


def _versions() -> dict[str, str]:
    import torch

    return {
        "memfit": __version__,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "",
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    main()
