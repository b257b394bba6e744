"""Reserved memory that no tensor requested, on the terminal."""

from collections.abc import Callable
from dataclasses import replace

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memfit.records import Fragmentation, Hole, PinningBlock, ReservedBytes
from memfit.report.terminal.summary import in_words
from memfit.units import format_bytes, unit_for

_ROWS: dict[str, Callable[[ReservedBytes], int]] = {
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
        console.print(Text(f"Fragmentation: not available. {found.not_applicable}"))
        return
    console.print(_table(found))
    holes: dict[Hole, list[str]] = {}
    for moment in found.moments:
        for hole in moment.holes[:_SHOWN]:
            holes.setdefault(hole, []).append(moment.name)
    if holes:
        console.print(Text("Largest holes, and the blocks beside them:"))
    for hole, names in holes.items():
        for line in _hole(hole, names):
            console.print(line)
    if any(hole.expandable for hole in holes):
        console.print(Text(_EXPANDABLE, style="dim"))


def _table(found: Fragmentation) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="")
    unit = unit_for(max(moment.all.reserved for moment in found.moments))
    table.add_column(f"Fragmentation, {unit.name} ({found.provenance})", no_wrap=True)
    for moment in found.moments:
        table.add_column(moment.name, justify="right", no_wrap=True)
    places = [moment.place for moment in found.moments]
    table.add_row("", *(Text(f"step {place.step}" if place.step else "", style="dim") for place in places))
    table.add_row("", *(Text(place.phase, style="dim") for place in places))
    for name, of in _ROWS.items():
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
    born = "allocated before the allocator history" if pin.born is None else in_words(pin.born)
    return Text(f"    {side} {format_bytes(pin.size):>9}  {what}{born}; {_end(pin)}")


def _end(pin: PinningBlock) -> str:
    if pin.state == "active_awaiting_free":
        return "freed, but another stream still uses it"
    if pin.freed is None:
        return "held to the end"
    return f"freed in {in_words(replace(pin.freed, op='', line=''))}"
