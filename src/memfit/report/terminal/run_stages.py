"""The stages of a run in a summary: what each uses, what it leaves behind, and what was shortened."""

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from memfit.records import DryRun, ScriptLocation, Shortened, Stage, StageUse
from memfit.report.escape import escaped
from memfit.report.short_path import short_path
from memfit.units import MIB, format_bytes, unit_for

_LEFT = MIB
"""Bytes left behind from which on they are worth a line: PyTorch rounds up small tensors."""


def stage_table(result: DryRun) -> Table:
    """Return a row for each stage, the worst one in bold."""
    unit = unit_for(result.peak_reserved)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("stage")
    for name in ("times", "allocated", "process"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("most allocated in")
    for use in result.stages:
        place = _place(use.stage, use.place) if use.place is not None else "no more than before"
        place = "ran out of memory: " * use.ran_out + place
        table.add_row(
            use.name,
            f"{use.times}",
            unit.format(use.allocated),
            unit.format(use.process.bytes),
            place,
            style="bold" if use is result.worst_stage else "",
        )
    return table


def _place(stage: Stage, place: ScriptLocation) -> str:
    """Return where most was allocated; outside of training steps, phases of steps say nothing."""
    phase = place.phase if stage in (Stage.TRAINING, Stage.EVALUATION) else ""
    function = f" in {escaped(place.function)}" if place.function and not place.module else ""
    parts = [phase, escaped(place.module), f"{escaped(short_path(place.line))}{function}"]
    return " · ".join(part for part in parts if part)


def stage_lines(result: DryRun) -> Iterator[Text]:
    """Yield what stages leave behind, and what was shortened."""
    for use in result.stages:
        if use.leaves >= _LEFT:
            yield Text(_leaves(use), style="yellow")
    if result.shortened:
        listed = "; ".join(map(_shortened, result.shortened))
        yield Text(f"Shortened: {listed}.", style="dim")


def _leaves(use: StageUse) -> str:
    where = f", most of it allocated in {escaped(short_path(use.leaves_line))}" * bool(use.leaves_line)
    return f"The {use.stage} leaves {format_bytes(use.leaves)} behind that training then runs beside{where}."


def _shortened(each: Shortened) -> str:
    of = f"{each.of:,}" if each.of is not None else "an unknown number of"
    return f"{each.to:,} of {of} batches ({escaped(short_path(each.where)) or 'a loader of a library'})"
