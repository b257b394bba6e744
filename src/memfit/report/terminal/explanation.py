"""What holds the memory, on the terminal: by category, module, line or op, and what each phase changed."""

from collections.abc import Callable
from dataclasses import replace

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memfit.records import (
    Breakdown,
    Explanation,
    Fragmentation,
    GroupBy,
    Hole,
    LiveAllocation,
    PhaseMemoryChange,
    PinningBlock,
    ReservedBytes,
)
from memfit.report.escape_control_characters import escaped
from memfit.report.places_in_words import location_in_words, short_path
from memfit.report.terminal.layout import plain_table
from memfit.report.terminal.notes import note_lines
from memfit.report.terminal.summary import print_summary
from memfit.units import Unit, format_bytes, unit_for_table

_ROWS = 15
_LARGEST = 5
_LONGEST_GROUP = 8
"""Phases of a micro-batch: input, forward, loss, backward, and what is between them."""
_UNNAMED = {GroupBy.MODULE: "(outside modules)", GroupBy.LINE: "(no line)", GroupBy.OP: "(no op)"}


def print_explanation(
    explanation: Explanation, console: Console, *, by: GroupBy | None = None, notes: bool = False
) -> None:
    """Print the summary, or what holds memory if a table or moment was asked for; then each phase's changes.

    Args:
        explanation: what to print.
        console: where to print it.
        by: what the table sums bytes by; None for the categories, at a moment other than the peak.
        notes: whether to list every note.
    """
    summary, held = explanation.summary, explanation.held
    unit = unit_for_table(summary.peak_reserved)
    if by is None and explanation.at == "peak":
        print_summary(summary, console, notes=notes)
        _print_moments_below_peak(explanation, unit, console)
    else:
        _print_breakdown(held, by or GroupBy.CATEGORY, unit, console)
    console.print("\nLargest:")
    for live in held.largest[:_LARGEST]:
        console.print(f"  {_described(live)}")
    _print_phase_changes(explanation.ledger, unit, console)
    if explanation.fragmentation is not None:
        print_fragmentation(explanation.fragmentation, console)
    if notes and (by is not None or explanation.at != "peak"):
        for line in note_lines(summary, full=True, hints=True):
            console.print(line)


def _print_moments_below_peak(explanation: Explanation, unit: Unit, console: Console) -> None:
    """Print the moments just below the peak."""
    if explanation.below_peak:
        console.print("\nJust below the peak:")
    for moment in explanation.below_peak:
        less = 100 * (1 - moment.allocated / explanation.summary.peak_allocated)
        size = f"{unit.format(moment.allocated):>10}"
        console.print(f"  -{less:.1f} %  {size}  {location_in_words(moment.place)}")


def _print_breakdown(held: Breakdown, by: GroupBy, unit: Unit, console: Console) -> None:
    """Print what holds memory at a moment; the rows sum to what is allocated."""
    console.print(f"Allocated, by {by}: {location_in_words(held.place)}")
    table = plain_table("rrrw")
    total = max(held.allocated, 1)
    shown = [row for row in held.rows[by] if not unit.rounds_to_zero(row.bytes)][:_ROWS]
    rest = [row for row in held.rows[by] if row not in shown]
    for row in shown:
        blocks = f"{row.blocks:,} blocks" if row.blocks != 1 else "1 block"
        share = f"{100 * row.bytes / total:.1f} %"
        table.add_row(unit.format(row.bytes), share, blocks, Text(breakdown_row_name(row.name, by)))
    left = sum(row.bytes for row in rest)
    if not unit.rounds_to_zero(left):
        table.add_row(unit.format(left), f"{100 * left / total:.1f} %", "", f"{len(rest)} more: --json -")
    table.add_row(Text(unit.format(held.allocated), style="bold"), "", "", Text("allocated", style="bold"))
    console.print(table)


def breakdown_row_name(name: str, by: GroupBy) -> str:
    """Return the name of a row on the terminal."""
    return escaped((short_path(name) if by is GroupBy.LINE else name) or _UNNAMED.get(by, ""))


def _print_phase_changes(changes: tuple[PhaseMemoryChange, ...], unit: Unit, console: Console) -> None:
    """Print what each phase changed, in blocks; a phase's categories add up to its total."""
    table = plain_table("lrrr", "", "allocated", "change", "at its peak")

    def signed(size: int) -> str:
        return "" if unit.rounds_to_zero(size) else unit.number(size, "+")

    for change, times in fold_repeated_changes(changes):
        above = signed(max(0, change.peak - max(change.after, change.after - change.change)))
        parts = [(name, signed(size)) for name, size in change.by_category if signed(size)]
        if not signed(change.change) and not above and not parts:
            continue
        step = f"step {change.step} " if change.step else ""
        repeated = f" ({times} times)" * (times > 1)
        after = unit.number(change.after)
        table.add_row(f"  {step}{change.phase}{repeated}", after, signed(change.change), above)
        for name, size in parts:
            table.add_row(f"    {name}", "", size, style="dim")
    if table.rows:  # the trace of a post-mortem may hold a failure and no phase
        console.print(f"\nWhat each phase changed, in {unit.name} of blocks:")
        console.print(table)


def fold_repeated_changes(changes: tuple[PhaseMemoryChange, ...]) -> list[tuple[PhaseMemoryChange, int]]:
    """Return each change with the number of times that it occurs in a row, alone or in turn with others.

    The micro-batches of a step repeat forward and backward; those that change the same are folded.
    """
    found: list[tuple[PhaseMemoryChange, int]] = []
    position = 0
    while position < len(changes):
        length, times = _repetition(changes[position:])
        found += [(change, times) for change in changes[position : position + length]]
        position += length * times
    return found


def _repetition(changes: tuple[PhaseMemoryChange, ...]) -> tuple[int, int]:
    """Return how many changes the shortest group at the start has that repeats, and how often it occurs."""
    for length in range(1, min(_LONGEST_GROUP, len(changes) // 2) + 1):
        times = 1
        while changes[length * times : length * (times + 1)] == changes[:length]:
            times += 1
        if times > 1:
            return length, times
    return 1, 1


def _described(live: LiveAllocation) -> str:
    shape = f"{live.dtype} {list(live.shape)}" if live.shape is not None else ""
    parts = (live.category, live.module, live.op, live.name, shape, short_path(live.line))
    return f"{format_bytes(live.requested):>10}  " + " · ".join(escaped(part) for part in parts if part)


_USES: dict[str, Callable[[ReservedBytes], int]] = {
    "  requested": lambda split: split.requested,
    "  rounding": lambda split: split.rounding,
    "  unsplit remainders": lambda split: split.unsplit,
    "── allocated": lambda split: split.allocated,
    "  awaiting other streams": lambda split: split.awaiting_free,
    "  holes in used segments": lambda split: split.holes,
    "  segments wholly free": lambda split: split.cached,
    "── reserved": lambda split: split.reserved,
}
_EXPANDABLE = (
    "In expandable segments, empty_cache releases only whole handles within a hole. A handle has 2 MiB in "
    "the small pool, and large_segment_size in the large pool (20 MiB by default)."
)
_SHOWN = 3
"""Holes printed per moment."""


def print_fragmentation(found: Fragmentation, console: Console) -> None:
    """Print what reserved memory was used for at each moment, and which blocks keep the largest holes."""
    console.print()
    if found.not_applicable:
        console.print(f"Fragmentation: not available. {found.not_applicable}")
        return
    console.print(_table(found))
    holes: dict[Hole, list[str]] = {}
    for moment in found.moments:
        for hole in moment.holes[:_SHOWN]:
            holes.setdefault(hole, []).append(moment.name)
    if holes:
        console.print("Largest holes, and the blocks beside them:")
    for hole, names in holes.items():
        for line in _hole(hole, names):
            console.print(line)
    if any(hole.expandable for hole in holes):
        console.print(Text(_EXPANDABLE, style="dim"))


def _table(found: Fragmentation) -> Table:
    unit = unit_for_table(max(moment.all.reserved for moment in found.moments))
    title, names = f"Fragmentation, {unit.name} ({found.provenance})", [each.name for each in found.moments]
    table = plain_table("l" + "r" * len(names), title, *names, header_style="")
    places = [moment.place for moment in found.moments]
    table.add_row("", *(Text(f"step {place.step}" if place.step else "", style="dim") for place in places))
    table.add_row("", *(Text(place.phase, style="dim") for place in places))
    for name, of in _USES.items():
        is_total = name.startswith("──")
        sizes = [of(moment.all) for moment in found.moments]
        if is_total or not all(map(unit.rounds_to_zero, sizes)):
            table.add_row(Text(name, style="bold" if is_total else ""), *map(unit.number, sizes))
    for name, splits in (
        ("   not requested", [moment.all for moment in found.moments]),
        ("   in the small pool", [moment.small for moment in found.moments]),
        ("   in the large pool", [moment.large for moment in found.moments]),
    ):
        table.add_row(name, *map(_wasted, splits))
    return table


def _wasted(split: ReservedBytes) -> str:
    return f"{100 * (1 - split.requested / split.reserved):.1f} %" if split.reserved else "-"


def _hole(hole: Hole, names: list[str]) -> list[Text]:
    blocks = "1 block" if hole.blocks == 1 else f"{hole.blocks} blocks"
    head = Text(f"  {format_bytes(hole.size)} in a {hole.kind} segment of {format_bytes(hole.segment_size)}")
    head.append(f" at {hole.segment:#x}, kept in use by {blocks} ({format_bytes(hole.in_use)})")
    head.append(f"  ({', '.join(names)})", style="dim")
    return [head, *(_pin(pin, hole) for pin in hole.pins)]


def _pin(pin: PinningBlock, hole: Hole) -> Text:
    side = "before" if pin.address < hole.address else "after "
    what = "" if pin.category == "rest" else f"{pin.category.replace('_', ' ')} · "
    born = "allocated before the allocator history" if pin.born is None else location_in_words(pin.born)
    return Text(f"    {side} {format_bytes(pin.size):>9}  {what}{born}; {_end(pin)}")


def _end(pin: PinningBlock) -> str:
    if pin.state == "active_awaiting_free":
        return "freed, but another stream still uses it"
    if pin.freed is None:
        return "held to the end"
    return f"freed in {location_in_words(replace(pin.freed, op='', line=''))}"
