"""What the command line prints, and where: results to standard output, progress to standard error."""

import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from memfit.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from memfit.capture.run import Progress
    from memfit.explain.reserved import Fragmentation
    from memfit.records import DryRun


def write(result: "DryRun", json: str | None, found: "Fragmentation | None" = None) -> None:
    """Print a summary, and write it as JSON if asked to; ``-`` is standard output, and no summary."""
    from memfit import api
    from memfit.report.fragmentation import print_fragmentation
    from memfit.report.schema import to_json
    from memfit.report.terminal import print_summary

    written = to_json(result, found)
    if json == "-":
        sys.stdout.write(written.decode() + "\n")
        return
    if json is not None:
        api.write_bytes(Path(json), written + b"\n")
    print_summary(result, stdout())  # last: whoever reads it may stop at any line
    if found is not None:
        print_fragmentation(found, stdout())


def exit_code(result: "DryRun", *, fail: bool) -> int:
    """Return the exit code of a run."""
    if result.end.reason == "interrupted":
        return 130
    if result.end.reason == "exception" or (result.end.reason == "end" and result.end.exit_code):
        return TargetError.exit_code
    return 1 if fail and result.verdict != "fits" else 0


def stdout() -> "Console":
    """Return standard output, to print on."""
    from rich.console import Console

    class Printer(Console):
        def on_broken_pipe(self) -> None:
            raise  # noqa: PLE0704 - the BrokenPipeError that rich is handling: main answers for it

    # What is piped is not wrapped: somebody may search it.
    return Printer(highlight=False, markup=False, emoji=False, soft_wrap=not sys.stdout.isatty())


def name_trace(output: Path) -> None:
    """Say where the trace was kept."""
    from memfit.report.inert import inert

    print(inert(f"Trace: {output}  (memfit explain {output})"), file=sys.stderr)


@contextmanager
def progress(steps: int | None) -> "Iterator[Callable[[Progress], None]]":
    """Show how far a script is for as long as the block lasts."""
    from memfit.report.progress import progress_line

    begun = time.monotonic()
    with progress_line() as show:
        yield lambda progress: show(_state(progress, steps, begun))


def _state(progress: "Progress", steps: int | None, since: float) -> str:
    from memfit.units import format_gib

    seconds = f"{time.monotonic() - since:.0f} s"
    if not progress.peak:
        return f"memfit: starting · {seconds}"
    step = progress.step + 1 if steps is None else f"{min(progress.step + 1, steps)}/{steps}"
    return (
        f"memfit: step {step} · "
        f"allocated {format_gib(progress.allocated)} · peak {format_gib(progress.peak)} · {seconds}"
    )
