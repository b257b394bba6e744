"""What the commands print, and where: results on standard output, progress on standard error."""

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from memfit.atomic_files import write_output_file
from memfit.cli.options import json_output_file
from memfit.errors import MemfitError, OutputError, TargetError
from memfit.report.escape_control_characters import escaped
from memfit.termination_signals import INTERRUPTED

if TYPE_CHECKING:
    from rich.console import Console

    from memfit.api.run_on_ghost import FinishedRun
    from memfit.records import DryRun, ScriptPlan
    from memfit.run.parent import ScriptProgress

Output = tuple[Path | None, Callable[[Path], object]]
"""A file, and what writes it; None for an option that was not given."""

RERUNS = (
    "memfit: running the script again, without terminal input and with its output hidden, to find what "
    "it needs or what lowers that. Each run writes the script's output files again."
)


FORKED = (
    "memfit: going on from a copy of the script's process, made just before it trained, without terminal "
    "input and with its output hidden. What such a run writes to files that were open by then is dropped."
)


def write_result(result: object, json: str | None, *files: Output, **shown: object) -> None:
    """Print a result, as text or as JSON, and then write its files: a full disk must not cost the answer.

    Args:
        result: what a function of ``api`` returned.
        json: where JSON goes; ``-`` prints it in place of the text, and None writes none.
        files: further files to write.
        shown: options of what prints the result.

    Raises:
        OutputError: standard output or a file could not be written; everything else was.
        BrokenPipeError: the reader of standard output has gone; the files were written.
        KeyboardInterrupt: the user interrupted the writing; its message says so.
    """
    from memfit.report.public_json import result_to_json
    from memfit.report.result_printers import print_result

    def write_output() -> None:
        with console_on_stdout() as console:
            if json == "-":
                console.file.write(result_to_json(result).decode() + "\n")
            else:
                print_result(result, console, **shown)

    def write_json(path: Path) -> None:
        write_output_file(path, result_to_json(result) + b"\n")

    outputs = ((json_output_file(json), write_json), *files)
    jobs: list[Callable[[], object]] = [write_output]
    jobs += [partial(write, path) for path, write in outputs if path is not None]
    try:
        failures = [error for job in jobs if (error := _failure(job)) is not None]
    except KeyboardInterrupt:
        raise KeyboardInterrupt("not all files were written") from None
    errors = [error for error in failures if isinstance(error, MemfitError)]
    if errors:
        raise OutputError("\n".join(map(str, errors)))
    if failures:
        raise failures[0]


def _failure(job: Callable[[], object]) -> MemfitError | BrokenPipeError | None:
    try:
        job()
    except (MemfitError, BrokenPipeError) as error:
        return error
    return None


def write_plan(
    plan: "ScriptPlan", json: str | None, output: Path | None = None, html: Path | None = None
) -> None:
    """Print a plan and write it to files; ``json`` as for ``write_result``."""
    from memfit.report.public_json import result_to_json

    def write_file(path: Path) -> None:
        if plan.chosen is None:
            why = "none was found in time" if plan.out_of_time else "no plan fits"
            print(f"memfit: {path} was not written, because {why}.", file=sys.stderr)
            return
        write_output_file(path, result_to_json(plan) + b"\n")
        ranks = f"--nproc {plan.nproc} " * (plan.nproc > 1) + f"--nnodes {plan.nnodes} " * (plan.nnodes > 1)
        ranks += "--all-ranks " * (plan.world_size > 1)
        command = f"memfit dry-run {ranks}--plan {shlex.quote(str(path))} SCRIPT"
        print(escaped(f"Plan: {path}  ({command})"), file=sys.stderr)

    def write_page(path: Path) -> None:
        from memfit.report.html.plan_page import plan_report_html

        write_output_file(path, plan_report_html(plan, output).encode(errors="replace"))

    write_result(plan, json, (output, write_file), (html, write_page), file=output)


class PlanSoFar:
    """The fastest plan that a search has found so far, in the file of ``-o``.

    Args:
        output: the file; None for none.
    """

    def __init__(self, output: Path | None) -> None:
        self._output = output
        self._time: float | None = None

    def keep(self, plan: "ScriptPlan") -> None:
        """Write a plan in place of the one before. Should that fail, the last attempt reports it."""
        from memfit.report.public_json import result_to_json

        if plan.chosen is None:
            return
        self._time = plan.chosen.time
        if self._output is not None:
            with suppress(MemfitError):
                write_output_file(self._output, result_to_json(plan) + b"\n")

    @contextmanager
    def named_on_ctrl_c(self) -> Iterator[None]:
        """Have Ctrl-C in the block say what has been found, and where it is."""
        try:
            yield
        except KeyboardInterrupt:
            if self._time is None:
                raise
            what = f"the fastest plan so far takes {self._time:.2f} times the time"
            where = "not written, without -o" if self._output is None else f"in {self._output}"
            raise KeyboardInterrupt(f"{what}: {where}") from None


def exit_code_of_run(result: "DryRun", *, fail: bool) -> int:
    """Return the exit code of a run."""
    if "interrupted" in (result.end.reason, result.untried.reason if result.untried else ""):
        return INTERRUPTED
    if result.verdict == "unknown" or result.end.reason == "exception" or result.end.gave_up:
        return TargetError.exit_code
    return 1 if fail and result.verdict != "fits" else 0


@contextmanager
def console_on_stdout() -> Iterator["Console"]:
    """Yield a console that prints on standard output.

    Raises:
        OutputError: standard output cannot be written; its disk may be full.
        BrokenPipeError: the reader of standard output has gone.
    """
    from memfit.report.terminal.whole_words_console import WholeWordsConsole

    class Printer(WholeWordsConsole):
        def on_broken_pipe(self) -> None:
            raise  # noqa: PLE0704 - re-raise the BrokenPipeError that rich is handling

    try:
        # Piped output is not wrapped, so that grep finds whole lines.
        yield Printer(highlight=False, markup=False, emoji=False, soft_wrap=not sys.stdout.isatty())
        sys.stdout.flush()
    except OSError as error:
        # Send the rest nowhere, so that Python does not report the error again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise OutputError(f"Cannot write to standard output: {error.strerror}.") from None


def written_trace_file(output: Path | None, run: "FinishedRun") -> Output:
    """Return the file of a run's trace, which the run has written: it remains to print its path."""
    from memfit.api.run_on_ghost import RANK, trace_file_of_rank

    def report(path: Path) -> None:
        if run.unsaved is not None:
            raise run.unsaved
        ranks = run.result.ranks if RANK in path.name else ()
        own = trace_file_of_rank(path, run.result.rank.rank if run.result.rank is not None else 0)
        text = f"Trace: {own}  (memfit explain {own})"
        if len(ranks) > 1:
            text = f"Traces: {path}  (memfit diff {own} {trace_file_of_rank(path, ranks[-1].rank)})"
        print(escaped(text), file=sys.stderr)

    return output, report


@contextmanager
def show_script_progress(
    steps: int | None, reruns: str = RERUNS
) -> Iterator[Callable[["ScriptProgress"], None]]:
    """Show a script's progress for as long as the block lasts.

    Args:
        steps: training steps after which memfit stops the script; None if it runs to its end.
        reruns: printed before the first run of the whole script with hidden output.
    """
    from memfit.report.terminal.progress_line import move_to_line_start, show_progress_line

    started = time.monotonic()
    announced = set()
    try:
        with show_progress_line() as show:

            def on_progress(progress: "ScriptProgress") -> None:
                if progress.trying and (text := _announcement(progress, reruns)) not in announced:
                    announced.add(text)
                    move_to_line_start(sys.stderr)
                    print(escaped(text), file=sys.stderr, flush=True)
                show(_progress_text(progress, steps, time.monotonic() - started))

            yield on_progress
    finally:
        for stream in (sys.stderr, sys.stdout):
            move_to_line_start(stream)


def text_before_runs(how: str) -> str:
    """Return what is printed before the runs of a command that runs the script several times."""
    return (
        f"memfit: running the script {how}, without terminal input and with its output hidden. Each run "
        "writes the script's output files again."
    )


def _announcement(progress: "ScriptProgress", reruns: str) -> str:
    """Return what is printed before the first run with hidden output of a kind."""
    if progress.forked:
        return FORKED
    why = f" It starts the script anew each time, because {progress.unforked}." if progress.unforked else ""
    return f"{reruns}{why}"


def _progress_text(progress: "ScriptProgress", steps: int | None, elapsed: float) -> str:
    from memfit.units import format_gib

    seconds = f"{elapsed:.0f} s"
    trying = f"{progress.rank} · " if progress.rank else ""
    if progress.ranks_beside:
        ranks = ", ".join(map(str, progress.ranks_beside))
        trying += f"with rank{'s' * (len(progress.ranks_beside) > 1)} {ranks} beside · "
    others = f" and {progress.beside} more" if progress.beside else ""
    trying += f"trying: {progress.trying}{others} · " if progress.trying else ""
    trying += f"fits: {progress.fits:.2f} times the time · " if progress.fits is not None else ""
    if not progress.peak:
        return f"memfit: {trying}{'compiling' if progress.compiling else 'starting'} · {seconds}"
    step = progress.step + 1 if steps is None else f"{min(progress.step + 1, steps)}/{steps}"
    return (
        f"memfit: {trying}step {step} · {'compiling · ' * progress.compiling}"
        f"allocated {format_gib(progress.allocated)} · peak {format_gib(progress.peak)} · {seconds}"
    )
