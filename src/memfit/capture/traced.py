"""A script's run, once or again with a change, and the trace that it leaves."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from memfit.capture.run import Progress, run_script
from memfit.capture.settings import ChildSettings
from memfit.capture.tracefile import read_trace
from memfit.errors import TargetError
from memfit.records import Trace


def traced(
    command: tuple[str, ...],
    settings: ChildSettings,
    output: Path | None,
    on_progress: Callable[[Progress], None],
) -> Trace:
    """Run a script, and keep its trace at ``output`` or nowhere.

    Raises:
        MemfitError: as ``run_script``.
    """
    with tempfile.TemporaryDirectory(prefix="memfit-") as folder:
        path = output if output is not None else Path(folder) / "run.memfit"
        run_script(command, replace(settings, output=str(path.absolute())), on_progress)
        return read_trace(path)


def tried(
    command: tuple[str, ...], settings: ChildSettings, on_progress: Callable[[Progress], None]
) -> Trace | None:
    """Run a script of which nobody knows whether it will work; None if it does not come to its end.

    Raises:
        KeyboardInterrupt: somebody has had enough.
    """
    try:
        trace = traced(command, settings, None, on_progress)
    except TargetError:
        return None
    if trace.end.reason == "interrupted":
        raise KeyboardInterrupt
    return trace if trace.end.reason in ("steps", "end") and not trace.end.exit_code else None
