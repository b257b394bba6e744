"""Who holds the memory, on a terminal: by category, module, line or op, and what each phase changed."""

import html
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memfit.records import Breakdown, Explanation, GroupBy, LiveAllocation, PhaseChange
from memfit.report.escape import inert
from memfit.report.printable import Printed
from memfit.report.terminal.fragmentation import print_fragmentation
from memfit.report.terminal.summary import in_words, print_summary, short_path
from memfit.units import format_bytes

_ROWS = 15
_LARGEST = 5
_NOBODY = {GroupBy.MODULE: "(outside modules)", GroupBy.LINE: "(no line)", GroupBy.OP: "(no op)"}


@dataclass(frozen=True, slots=True, repr=False)
class Explained(Printed, Explanation):
    """An explanation that prints itself; as the last line of a notebook's cell it is the HTML report."""

    page: Callable[[], str]
    """Makes the report."""

    def _repr_html_(self) -> str:
        # In a frame of its own: the report's style and policy are for a whole page.
        inside = html.escape(self.page(), quote=True)
        return f'<iframe srcdoc="{inside}" sandbox="allow-scripts" width="100%" height="900"></iframe>'

    def show(self, console: Console) -> None:
        """Print all of it."""
        print_explanation(self, None, console)


def print_explanation(found: Explanation, by: GroupBy | None, console: Console) -> None:
    """Print the summary, who holds what at the moment asked for, and what each phase changed."""
    print_summary(found.summary, console)
    print_below_peak(found, console)
    if by is not None or found.at != "peak":
        print_held(found.held, by or GroupBy.CATEGORY, console)
    print_largest(found.held, console)
    print_ledger(found.ledger, console)
    if found.fragmentation is not None:
        print_fragmentation(found.fragmentation, console)


def print_below_peak(found: Explanation, console: Console) -> None:
    """Print the moments just below the peak."""
    if found.below_peak:
        console.print(Text("\nJust below the peak:"))
    for moment in found.below_peak:
        less = 100 * (1 - moment.allocated / found.summary.peak_allocated)
        size = format_bytes(moment.allocated)
        console.print(Text(f"  -{less:.1f} %  {size:>10}  {in_words(moment.place)}"))


def print_held(held: Breakdown, by: GroupBy, console: Console) -> None:
    """Print who holds what at a moment; rows sum to what is allocated."""
    console.print()
    console.print(Text(f"Allocated, by {by}: {in_words(held.place)}"))
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for _ in range(3):
        table.add_column(justify="right", no_wrap=True)
    table.add_column()
    total = max(held.allocated, 1)
    shown, rest = held.rows[by][:_ROWS], held.rows[by][_ROWS:]
    for row in shown:
        blocks = f"{row.blocks:,} blocks" if row.blocks != 1 else "1 block"
        table.add_row(
            f"{row.bytes:,} B", f"{100 * row.bytes / total:.1f} %", blocks, Text(named(row.name, by))
        )
    if rest:
        left = sum(row.bytes for row in rest)
        table.add_row(f"{left:,} B", f"{100 * left / total:.1f} %", "", f"{len(rest)} more: --json -")
    table.add_row(Text(f"{held.allocated:,} B", style="bold"), "", "", Text("allocated", style="bold"))
    console.print(table)


def named(name: str, by: GroupBy) -> str:
    """Return what a row is called on a terminal."""
    return inert((short_path(name) if by is GroupBy.LINE else name) or _NOBODY.get(by, ""))


def print_largest(held: Breakdown, console: Console) -> None:
    """Print the largest allocations."""
    console.print(Text("\nLargest:"))
    for live in held.largest[:_LARGEST]:
        console.print(Text(f"  {_described(live)}"))


def print_ledger(changes: tuple[PhaseChange, ...], console: Console) -> None:
    """Print what each phase changed, in bytes; its categories' changes add up to its own."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("", no_wrap=True)
    for name in ("allocated", "change", "at its peak"):
        table.add_column(name, justify="right", no_wrap=True)
    for change in changes:
        if not change.change and change.peak == change.after and not change.by_category:
            continue
        above = change.peak - max(change.after, change.after - change.change)
        step = f"step {change.step} " if change.step else ""
        table.add_row(
            f"  {step}{change.phase}",
            f"{change.after:,}",
            f"{change.change:+,}" if change.change else "",
            f"{above:+,}" if above > 0 else "",
        )
        for name, size in change.by_category:
            table.add_row(f"    {name}", "", f"{size:+,}", style="dim")
    if table.rows:  # of a failure alone, as a watch writes it, there is no phase
        console.print(Text("\nWhat each phase changed, in bytes of blocks:"))
        console.print(table)


def _described(live: LiveAllocation) -> str:
    shape = f"{live.dtype} {list(live.shape)}" if live.shape is not None else ""
    parts = (live.category, live.module, live.op, live.name, shape, short_path(live.line))
    return f"{format_bytes(live.requested):>10}  " + " · ".join(inert(part) for part in parts if part)
