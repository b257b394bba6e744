"""The largest batch with which a script fits, on the terminal: every run that was made, and what to write."""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memfit.records import BatchLimit, BatchRun, MaxBatch, StepTime
from memfit.report.escape_control_characters import escaped
from memfit.report.places_in_words import location_in_cell, short_path
from memfit.report.terminal.layout import plain_table, print_answer_and_subject, subject_in_words
from memfit.report.terminal.step_time import step_time_lines
from memfit.units import format_bytes, format_gib, format_seconds, unit_for_table


def print_max_batch(result: MaxBatch, console: Console) -> None:
    """Print the largest batch size, a row for each run, and what to write."""
    subject = subject_in_words(result.command, result.device.name, versions=result.versions)
    print_answer_and_subject(_verdict(result), console, f"{subject} · budget {format_gib(result.budget)}")
    console.print(_table(result))
    for line in _details(result):
        console.print(line)


def _verdict(result: MaxBatch) -> str:
    budget = format_gib(result.budget)
    if result.largest is None:
        run = next((run for run in result.runs if not run.size % result.multiple), result.runs[0])
        return f"NO BATCH FITS   batch size {run.size} needs {format_gib(run.needs.bytes)} of {budget}"
    needs = next(run.needs.bytes for run in result.runs if run.size == result.largest)
    beyond = _beyond(result, result.largest)
    return f"BATCH SIZE {result.largest}   needs {format_gib(needs)} of {budget}; {beyond}"


def _beyond(result: MaxBatch, largest: int) -> str:
    """Return why the batch is not larger."""
    if result.limit is BatchLimit.MEMORY:
        above = next(run for run in result.runs if run.size > largest and not run.fits)
        return f"{above.size} runs out of memory"
    if result.limit is BatchLimit.DATA:
        return "the script has no more samples for a larger batch"
    if result.limit is BatchLimit.FLAT:
        return "the peak does not depend on the batch size"
    return f"larger ones may fit: memfit stopped after {len(result.runs)} sizes"


def _table(result: MaxBatch) -> Table:
    unit = unit_for_table(max(run.needs.bytes for run in result.runs))
    times = [run.step_time for run in result.runs if run.step_time is not None]
    rate = "tokens" if any(time.tokens for time in times) else "samples"
    timed = ["a step", f"{rate}/s"] if times else []
    kinds = f"rrr{'r' * len(timed)}lw"
    table = plain_table(kinds, "batch size", "needs", "allocated", *timed, "run", "peak in")
    for run in result.runs:
        table.add_row(
            f"{run.size:,}",
            f"{unit.format(run.needs.bytes)} {run.needs.provenance:<9}",
            f"{unit.format(run.allocated.bytes)} {run.allocated.provenance:<9}",
            *_times(run.step_time, rate)[: len(timed)],
            Text(_outcome(result, run), style="" if run.fits else "yellow"),
            location_in_cell(run.place),
        )
    return table


def _times(time: StepTime | None, rate: str) -> tuple[str, str]:
    """Return the seconds of a step and how much it trains on in a second, as far as they are known."""
    if time is None:
        return "", ""
    per_second = time.tokens_per_second if rate == "tokens" else time.samples_per_second
    return format_seconds(time.seconds), f"{per_second:,.0f}" if per_second else ""


def _outcome(result: MaxBatch, run: BatchRun) -> str:
    notes = [*["as written"] * (run.size == result.as_written), *["largest"] * (run.size == result.largest)]
    return ("fits" if run.fits else "runs out") + f" ({', '.join(notes)})" * bool(notes)


def _details(result: MaxBatch) -> Iterator[str]:
    yield ""
    if result.how:
        where = f" in {escaped(short_path(result.where))}" if result.where else ""
        yield f"Write: {escaped(result.how)}{where}"
    elif result.largest is not None:
        yield "The batch size that the script has is the largest."
    if (sample := result.per_sample) is not None:
        yield f"One more sample takes {format_bytes(sample.bytes)} ({sample.provenance}; {sample.source})."
    if result.largest is not None and (run := result.run(result.largest)) is not None:
        yield from step_time_lines(run.step_time, step=f"A step with batch size {run.size}")
    if result.fastest not in (None, result.largest):
        yield (
            f"Of the sizes that were run, {result.fastest} trains on the most samples in a second, clearly "
            f"more than {result.largest}."
        )
    yield from map(escaped, result.remarks)
    yield (
        "Each row is a run of the script on the ghost with the memory of the budget. needs is what the "
        "process takes on the smallest GPU on which it is known to fit, the CUDA context included."
    )
