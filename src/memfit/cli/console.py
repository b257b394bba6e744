"""What the commands print, and where: results on standard output, progress on standard error."""

import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from memfit.errors import INTERRUPTED, TargetError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from memfit.packing.best_packing import Packing
    from memfit.packing.run_packing import RunPacking
    from memfit.records import AllocatorComparison, DryRun, Explanation, RunDifference
    from memfit.run.parent import Progress


RERUNS = (
    "memfit: memfit runs the script again, without terminal input and with its output hidden, to find what "
    "it needs or what lowers that. Each run writes the script's output files again."
)


def write_result(result: "DryRun", json: str | None) -> None:
    """Print a run's summary, and write it as JSON if requested; with ``-``, print JSON only."""
    from memfit.report.schema.dry_run_schema import to_json
    from memfit.report.terminal.summary import print_summary

    if not _write_json(to_json(result), json):
        print_summary(result, stdout())


def write_explanation(explanation: "Explanation", json: str | None, by: str | None) -> None:
    """Print an explanation, and write it as JSON if requested; with ``-``, print JSON only.

    Args:
        explanation: what to print.
        json: where JSON goes; None for nowhere.
        by: what the table sums bytes by; None for the default tables.
    """
    from memfit.records import GroupBy
    from memfit.report.schema.explain_schema import to_json
    from memfit.report.terminal.explanation import print_explanation

    if not _write_json(to_json(explanation), json):
        print_explanation(explanation, None if by is None else GroupBy(by), stdout())


def write_difference(difference: "RunDifference", json: str | None) -> None:
    """Print a difference, and write it as JSON if requested; with ``-``, print JSON only."""
    from memfit.report.schema.diff_schema import to_json
    from memfit.report.terminal.run_difference import print_difference

    if not _write_json(to_json(difference), json):
        print_difference(difference, stdout())


def write_comparison(comparison: "AllocatorComparison", json: str | None) -> None:
    """Print allocator settings compared, and write them as JSON if requested; with ``-``, print JSON only."""
    from memfit.report.schema.replay_schema import to_json
    from memfit.report.terminal.allocator_comparison import print_comparison

    if not _write_json(to_json(comparison), json):
        print_comparison(comparison, stdout())


def write_packing(packing: "Packing | RunPacking", capacity: int | None, json: str | None) -> None:
    """Print a packing, and write it as JSON if requested; with ``-``, print JSON only."""
    from memfit.report.schema.pack_schema import to_json
    from memfit.report.terminal.packing import print_packing

    if not _write_json(to_json(packing, capacity), json):
        print_packing(packing, capacity, stdout())


def _write_json(content: bytes, json: str | None) -> bool:
    """Write JSON where it was requested; return whether that was standard output.

    Before anything else is printed: a reader of standard output may close it at any line.
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
        return INTERRUPTED
    if result.end.reason == "exception" or result.end.gave_up:
        return TargetError.exit_code
    return 1 if fail and result.verdict != "fits" else 0


def stdout() -> "Console":
    """Return a console that prints on standard output."""
    from rich.console import Console

    class Printer(Console):
        def on_broken_pipe(self) -> None:
            raise  # noqa: PLE0704 - re-raise the BrokenPipeError that rich is handling: main() handles it

    # Piped output is not wrapped, so that grep finds whole lines.
    return Printer(highlight=False, markup=False, emoji=False, soft_wrap=not sys.stdout.isatty())


def print_trace_path(output: Path) -> None:
    """Print where the trace was saved."""
    from memfit.report.escape import escaped

    print(escaped(f"Trace: {output}  (memfit explain {output})"), file=sys.stderr)


@contextmanager
def progress(steps: int | None) -> "Iterator[Callable[[Progress], None]]":
    """Show a script's progress for as long as the block lasts.

    Args:
        steps: training steps after which memfit stops the script; None if it runs to its end.
    """
    from memfit.report.terminal.progress_line import progress_line

    started = time.monotonic()
    has_announced_reruns = False
    with progress_line() as show:

        def on_progress(progress: "Progress") -> None:
            nonlocal has_announced_reruns
            if progress.trying and not has_announced_reruns:
                has_announced_reruns = True
                print(RERUNS, file=sys.stderr, flush=True)
            show(_progress_text(progress, steps, time.monotonic() - started))

        yield on_progress


def _progress_text(progress: "Progress", steps: int | None, elapsed: float) -> str:
    from memfit.units import format_gib

    seconds = f"{elapsed:.0f} s"
    trying = f"trying: {progress.trying} · " if progress.trying else ""
    if not progress.peak:
        return f"memfit: {trying}starting · {seconds}"
    step = progress.step + 1 if steps is None else f"{min(progress.step + 1, steps)}/{steps}"
    return (
        f"memfit: {trying}step {step} · "
        f"allocated {format_gib(progress.allocated)} · peak {format_gib(progress.peak)} · {seconds}"
    )
