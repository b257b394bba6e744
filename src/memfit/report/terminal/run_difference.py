"""The difference between two runs, on the terminal."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memfit.records import RunDifference
from memfit.report.terminal.explanation import row_name
from memfit.report.terminal.summary import in_words

_ROWS = 20


def print_difference(found: RunDifference, console: Console) -> None:
    """Print what changed, in bytes; the rows sum to what is allocated."""
    width = max(map(len, found.names))
    for name, place in zip(found.names, found.places, strict=True):
        console.print(Text(f"{name:<{width}}  {found.at} in: {in_words(place)}"))
    console.print()
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in (*found.names, "change"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(f"by {found.by}")
    changed = [row for row in found.rows if row.before != row.after]
    for row in changed[:_ROWS]:
        change = f"{row.after - row.before:+,}"
        table.add_row(f"{row.before:,}", f"{row.after:,}", change, Text(row_name(row.name, found.by)))
    others = changed[_ROWS:]
    if others:
        more = sum(row.after - row.before for row in others)
        table.add_row("", "", f"{more:+,}", f"{len(others)} more: --json -")
    if same := len(found.rows) - len(changed):
        table.add_row("", "", "", Text(f"{same} unchanged", style="dim"))
    process = (found.reserved[0] + found.outside[0], found.reserved[1] + found.outside[1])
    totals = {"allocated": found.allocated, "reserved at most": found.reserved}
    if any(found.outside):  # unknown for a snapshot
        totals |= {"CUDA context and NCCL": found.outside, "process at most": process}
    for name, (before, after) in totals.items():
        change = f"{after - before:+,}" if after != before else "0"
        table.add_row(f"{before:,}", f"{after:,}", change, Text(name, style="bold"), style="bold")
    console.print(table)
