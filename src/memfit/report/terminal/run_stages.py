"""The stages of a run in a summary: what each uses, what it leaves behind, and what was shortened."""

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from memfit.records import DryRun, Shortened, Stage, StageUse
from memfit.report.escape import escaped
from memfit.report.short_path import short_path
from memfit.units import MIB, format_bytes, unit_for

_LEFT = MIB
"""Bytes left behind from which on they are worth a line: PyTorch rounds up small tensors."""


_SHORTENED = "Shortened:"
STAGE_HEADINGS = "stage", "times", "allocated", "process", "most allocated in"


def stage_parts(result: DryRun) -> Iterator[Table | Text]:
    """Yield the table of stages, what is amiss in them, what was shortened, and an empty line."""
    if result.stages:
        yield _table(result)
        yield from _lines(result)
        yield Text()


def _table(result: DryRun) -> Table:
    """Return a row for each stage, the worst one in bold."""
    unit = unit_for(result.peak_reserved)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    first, *numbers, last = STAGE_HEADINGS
    table.add_column(first)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(last)
    for use in result.stages:
        table.add_row(
            use.name,
            f"{use.times}",
            unit.format(use.allocated),
            unit.format(use.process.bytes),
            escaped(stage_place(use)),
            style="bold" if use is result.worst_stage else "",
        )
    return table


def stage_place(use: StageUse) -> str:
    """Return where a stage allocated most. Outside of training steps, phases of steps say nothing."""
    place = use.place
    if place is None:
        return "no more than before"
    phase = place.phase if use.stage in (Stage.TRAINING, Stage.EVALUATION) else ""
    function = f" in {place.function}" if place.function and not place.module else ""
    parts = [phase, place.module, f"{short_path(place.line)}{function}"]
    return "ran out of memory: " * use.ran_out + " · ".join(part for part in parts if part)


def _lines(result: DryRun) -> Iterator[Text]:
    """Yield what is amiss in stages, and what was shortened."""
    for text in stage_remarks(result):
        shortens = text.startswith(_SHORTENED)
        yield Text(escaped(text), style="dim" if shortens else "yellow")


def stage_remarks(result: DryRun) -> Iterator[str]:
    """Yield what is amiss in stages, and what was shortened; file names are as in the trace."""
    for use in result.stages:
        if use.gradients:
            yield (
                f"The {use.name} records gradients, and so keeps activations: run it under torch.no_grad()."
            )
        if use.leaves >= _LEFT:
            yield _leaves(use)
    if result.lacks_steps:
        yield "No training step was completed: the optimizer steps after more batches. Pass more --batches."
    if result.leaks_in_short_passes and not result.ran_out:
        left = (result.device.total.bytes - result.peak_process.bytes) // result.growth.bytes_per_step
        yield (
            "Memory grows from step to step, and the script makes more steps than were run. Estimated from "
            f"these, memory runs out about {max(0, left):,} steps later."
        )
    resumed = {use.stage for use in result.stages if use.resumed}
    if resumed and Stage.TRAINING not in resumed:
        yield (
            "The resumed run trained nothing, so its training is unknown: have it train on, for example for "
            "more epochs."
        )
    if result.shortened and result.end.reason == "exception":
        yield (
            "Passes over loaders are shorter in this run. If the script counts batches in another way, pass "
            "more --batches, or --to-end instead of --whole."
        )
    if result.shortened:
        yield f"{_SHORTENED} {'; '.join(map(_shortened, result.shortened))}."


def _leaves(use: StageUse) -> str:
    where = f", most of it allocated in {short_path(use.leaves_line)}" * bool(use.leaves_line)
    return f"The {use.stage} leaves {format_bytes(use.leaves)} behind that training then runs beside{where}."


def _shortened(each: Shortened) -> str:
    if each.is_option:
        of = f"{each.of:,}" if each.of is not None else "no limit"
        return f"{each.where} {each.to:,} of {of}"
    of = f"{each.of:,}" if each.of is not None else "an unknown number of"
    return f"{each.to:,} of {of} batches ({short_path(each.where) or 'a loader of a library'})"
