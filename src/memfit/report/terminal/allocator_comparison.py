"""A trace replayed under several allocator settings, on the terminal."""

import re
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memfit.records import AllocatorComparison, FailedMalloc, ScriptLocation, SettingOutcome
from memfit.report.escape_control_characters import escaped
from memfit.report.places_in_words import short_path
from memfit.units import format_bytes, format_gib

_BETWEEN_SETTINGS = re.compile(r",(?![^\[]*\])")
_CALLS = {"malloc": "malloc", "free": "free", "map": "map", "unmap": "unmap", "synchronize": "wait"}


def print_allocator_comparison(result: AllocatorComparison, console: Console) -> None:
    """Print one row per setting, where each failure occurs, and the recommended setting."""
    sized = any(row.smallest is not None for row in result.outcomes)
    table = Table(box=None, pad_edge=False)
    table.add_column("PYTORCH_ALLOC_CONF")
    table.add_column("fits")
    for heading in ("allocated", "reserved", *["smallest\nGPU"] * sized, "a step\ncosts"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in result.outcomes:
        table.add_row(*_cells(row, sized=sized))
    console.print(table)
    console.print(
        f"Replayed on a GPU with {format_gib(result.total)}; the CUDA context and other processes already "
        f"use {format_gib(result.taken)} of it. The cost of a step is the time of the allocator's cudaMalloc "
        "and cudaFree calls, mappings and waits in the last complete training step; the time of each call "
        "is assumed."
        + " A ? means that fewer than two training steps completed."
        * any(row.seconds_per_step is None for row in result.outcomes),
        style="dim",
    )
    for row in result.outcomes:
        if (failure := row.replay.failure) is not None and failure.where is not None:
            console.print(_failure(row, failure, failure.where))
    console.print(_advice(result))
    for note in result.notes:
        console.print(f"note ({note.provenance}): {escaped(note.text)}")
    console.print(
        "simulated: the trace's requests, replayed in a model of PyTorch's allocator (docs/allocator.md).",
        style="dim",
    )


def _cells(row: SettingOutcome, *, sized: bool) -> Sequence[Text | str]:
    name = Text(_BETWEEN_SETTINGS.sub(",\n", escaped(row.setting.name)) or "default")
    details = [*["as recorded"] * row.current, *_calls(row)]
    if details:
        name.append("\n  " + ", ".join(details), style="dim")
    fits = Text("yes", style="green") if row.replay.fits else Text("no", style="bold red")
    size = [] if not sized else ["?" if row.smallest is None else format_gib(row.smallest)]
    seconds = "?" if row.seconds_per_step is None else f"{1000 * row.seconds_per_step:.1f} ms"
    return (
        name,
        fits,
        format_gib(row.replay.peak_allocated),
        format_gib(row.replay.peak_reserved),
        *size,
        seconds,
    )


def _calls(row: SettingOutcome) -> list[str]:
    """Return the number of calls in a step, by kind; empty if there are none or they are unknown."""
    calls = row.replay.calls_per_step
    counts = ((getattr(calls, name), word) for name, word in _CALLS.items() if calls is not None)
    return [f"{count} {word}" for count, word in counts if count]


def _failure(row: SettingOutcome, failure: FailedMalloc, place: ScriptLocation) -> str:
    step = f"step {place.step} · " if place.step else ""
    parts = (f"{step}{place.phase}", place.module, place.op, short_path(place.line))
    where = " · ".join(escaped(part) for part in parts if part)
    fraction = row.memory_fraction
    limit = "" if fraction is None else f"; limited to {fraction:g} of the GPU's memory"
    return (
        f"{escaped(row.setting.name) or 'default'}: out of memory in {where} "
        f"({format_bytes(failure.requested)} requested, {format_bytes(failure.free)} free{limit})"
    )


def _advice(result: AllocatorComparison) -> Text:
    best, current = result.recommended, result.current
    if best is None and not current.replay.fits:
        fitting = any(row.replay.fits for row in result.outcomes)
        return Text(
            "The run fits only under settings that cost time: see the table above."
            if fitting
            else "The run does not fit under any of these settings."
        )
    if best is None:
        return Text(
            "None of these settings reserves less memory than the recorded ones without costing time."
        )
    text = Text("Worth setting: " if best.setting.conf else "Worth unsetting: ", style="bold")
    text.append(
        f"PYTORCH_ALLOC_CONF={escaped(best.setting.conf or current.setting.conf)}",
        style="bold green",
    )
    if not current.replay.fits:
        return text.append("  then the run fits" + _at_a_cost(best), style="not bold")
    less = current.replay.peak_reserved - best.replay.peak_reserved
    share = 100 * less / current.replay.peak_reserved
    return text.append(
        f"  reserves {format_gib(less)} less ({share:.0f} %){_at_a_cost(best)}", style="not bold"
    )


def _at_a_cost(best: SettingOutcome) -> str:
    if best.seconds_per_step is None:
        return "; its cost per step is unknown: fewer than two steps completed"
    if not best.seconds_per_step:
        return ", no slower in a steady step"
    return f"; costs {1000 * best.seconds_per_step:.1f} ms a step (assumed)"
