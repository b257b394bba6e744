"""What holds the memory, on the terminal: by category, module, line or op, and what each phase changed."""

import html
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memfit.records import Breakdown, Explanation, GroupBy, LiveAllocation, PhaseChange
from memfit.report.escape import escaped
from memfit.report.printable import Printable
from memfit.report.short_path import short_path
from memfit.report.terminal.fragmentation import print_fragmentation
from memfit.report.terminal.summary import in_words, print_summary
from memfit.units import format_bytes

_ROWS = 15
_LARGEST = 5
_UNNAMED = {GroupBy.MODULE: "(outside modules)", GroupBy.LINE: "(no line)", GroupBy.OP: "(no op)"}


@dataclass(frozen=True, slots=True, repr=False)
class PrintableExplanation(Printable, Explanation):
    """An explanation that prints itself; as the last line of a notebook cell it shows the HTML report."""

    page: Callable[[], str]
    """Creates the HTML report."""

    def _repr_html_(self) -> str:
        # In an iframe, because the report's styles and security policy apply to a whole page.
        inside = html.escape(self.page(), quote=True)
        return f'<iframe srcdoc="{inside}" sandbox="allow-scripts" width="100%" height="900"></iframe>'

    def show(self, console: Console) -> None:
        """Print the explanation."""
        print_explanation(self, None, console)


def print_explanation(
    explanation: Explanation, by: GroupBy | None, console: Console, *, notes: bool = False
) -> None:
    """Print the summary, what holds memory at the moment requested, and what each phase changed."""
    print_summary(explanation.summary, console, notes=notes)
    print_below_peak(explanation, console)
    if by is not None or explanation.at != "peak":
        print_held(explanation.held, by or GroupBy.CATEGORY, console)
    print_largest(explanation.held, console)
    print_ledger(explanation.ledger, console)
    if explanation.fragmentation is not None:
        print_fragmentation(explanation.fragmentation, console)


def print_below_peak(explanation: Explanation, console: Console) -> None:
    """Print the moments just below the peak."""
    if explanation.below_peak:
        console.print(Text("\nJust below the peak:"))
    for moment in explanation.below_peak:
        less = 100 * (1 - moment.allocated / explanation.summary.peak_allocated)
        size = format_bytes(moment.allocated)
        console.print(Text(f"  -{less:.1f} %  {size:>10}  {in_words(moment.place)}"))


def print_held(held: Breakdown, by: GroupBy, console: Console) -> None:
    """Print what holds memory at a moment; the rows sum to what is allocated."""
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
            f"{row.bytes:,} B", f"{100 * row.bytes / total:.1f} %", blocks, Text(row_name(row.name, by))
        )
    if rest:
        left = sum(row.bytes for row in rest)
        table.add_row(f"{left:,} B", f"{100 * left / total:.1f} %", "", f"{len(rest)} more: --json -")
    table.add_row(Text(f"{held.allocated:,} B", style="bold"), "", "", Text("allocated", style="bold"))
    console.print(table)


def row_name(name: str, by: GroupBy) -> str:
    """Return the name of a row on the terminal."""
    return escaped((short_path(name) if by is GroupBy.LINE else name) or _UNNAMED.get(by, ""))


def print_largest(held: Breakdown, console: Console) -> None:
    """Print the largest allocations."""
    console.print(Text("\nLargest:"))
    for live in held.largest[:_LARGEST]:
        console.print(Text(f"  {_described(live)}"))


def print_ledger(changes: tuple[PhaseChange, ...], console: Console) -> None:
    """Print what each phase changed, in bytes; a phase's categories add up to its total."""
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
    if table.rows:  # the trace of a post-mortem may hold a failure and no phase
        console.print(Text("\nWhat each phase changed, in bytes of blocks:"))
        console.print(table)


def _described(live: LiveAllocation) -> str:
    shape = f"{live.dtype} {list(live.shape)}" if live.shape is not None else ""
    parts = (live.category, live.module, live.op, live.name, shape, short_path(live.line))
    return f"{format_bytes(live.requested):>10}  " + " · ".join(escaped(part) for part in parts if part)
