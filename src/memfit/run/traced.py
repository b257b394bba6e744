"""A script's run, and the trace that it leaves."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from memfit.records import Trace
from memfit.run.parent import Progress, run_script
from memfit.run.settings import ChildSettings
from memfit.trace.trace_file import read_trace


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
