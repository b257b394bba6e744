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

    from memfit.analysis.explanation import Explanation
    from memfit.analysis.run_difference import Difference
    from memfit.packing.best_packing import Packing
    from memfit.packing.run_packing import Packed
    from memfit.records import DryRun
    from memfit.run.parent import Progress


AGAIN = "memfit: to try advice the script runs again, silently, without input; it writes its files again."


def write(result: "DryRun", json: str | None) -> None:
    """Print a summary, and write it as JSON if asked to; ``-`` is standard output, and no summary."""
    from memfit.report.schema.dry_run_schema import to_json, to_public
    from memfit.report.terminal.summary import print_summary

    if not _written(to_json(to_public(result)), json):
        print_summary(result, stdout())


def write_explanation(found: "Explanation", json: str | None, by: str | None) -> None:
    """Print an explanation, and write it as JSON if asked to; ``-`` is standard output, and nothing else.

    Args:
        found: what to print.
        json: where JSON goes; None for nowhere.
        by: what bytes are summed by in a table of their own.
    """
    from memfit.records import GroupBy
    from memfit.report.schema.dry_run_schema import explained, to_json
    from memfit.report.terminal.explanation import print_explanation

    if not _written(to_json(explained(found)), json):
        print_explanation(found, None if by is None else GroupBy(by), stdout())


def write_difference(found: "Difference", json: str | None) -> None:
    """Print a difference, and write it as JSON if asked to; ``-`` is standard output, and nothing else."""
    from memfit.report.terminal.run_difference import print_difference, to_json

    if not _written(to_json(found), json):
        print_difference(found, stdout())


def write_packing(found: "Packing | Packed", capacity: int | None, json: str | None) -> None:
    """Print a packing, and write it as JSON if asked to; ``-`` is standard output, and nothing else."""
    from memfit.report.schema.pack_schema import to_json
    from memfit.report.terminal.packing import print_packing

    if not _written(to_json(found, capacity), json):
        print_packing(found, capacity, stdout())


def _written(content: bytes, json: str | None) -> bool:
    """Write JSON to where it is wanted; say whether that is standard output, so that nothing else goes there.

    Before anything is printed: whoever reads that may stop at any line.
    """
    from memfit import api

    if json == "-":
        sys.stdout.write(content.decode() + "\n")
    elif json is not None:
        api.write_bytes(Path(json), content + b"\n")
    return json == "-"


def exit_code(result: "DryRun", *, fail: bool) -> int:
    """Return the exit code of a run."""
    if "interrupted" in (result.end.reason, result.untried.reason if result.untried else ""):
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
    from memfit.report.escape import inert

    print(inert(f"Trace: {output}  (memfit explain {output})"), file=sys.stderr)


@contextmanager
def progress(steps: int | None) -> "Iterator[Callable[[Progress], None]]":
    """Show how far a script is for as long as the block lasts."""
    from memfit.report.terminal.progress_line import progress_line

    begun = time.monotonic()
    told = False
    with progress_line() as show:

        def tell(progress: "Progress") -> None:
            nonlocal told
            if progress.trying and not told:
                told = True
                print(AGAIN, file=sys.stderr, flush=True)
            show(_state(progress, steps, begun))

        yield tell


def _state(progress: "Progress", steps: int | None, since: float) -> str:
    from memfit.units import format_gib

    seconds = f"{time.monotonic() - since:.0f} s"
    trying = f"trying: {progress.trying} · " if progress.trying else ""
    if not progress.peak:
        return f"memfit: {trying}starting · {seconds}"
    step = progress.step + 1 if steps is None else f"{min(progress.step + 1, steps)}/{steps}"
    return (
        f"memfit: {trying}step {step} · "
        f"allocated {format_gib(progress.allocated)} · peak {format_gib(progress.peak)} · {seconds}"
    )
