"""What changed between two runs, on a terminal and as JSON."""

import json
from dataclasses import dataclass

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from memfit.records import GroupBy, RowChange, RunDifference, ScriptLocation
from memfit.report.printable import Printed
from memfit.report.schema.dry_run_schema import SCHEMA
from memfit.report.terminal.explanation import named
from memfit.report.terminal.summary import in_words

_ROWS = 20


@dataclass(frozen=True, slots=True, repr=False)
class Differing(Printed, RunDifference):
    """What changed, and prints itself."""

    def show(self, console: Console) -> None:
        """Print what changed."""
        print_difference(self, console)


def print_difference(found: RunDifference, console: Console) -> None:
    """Print what changed, in bytes; rows sum to what is allocated."""
    for name, place in zip(("before", "after "), found.places, strict=True):
        console.print(Text(f"{name}  {found.at} in: {in_words(place)}"))
    console.print()
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("before", "after", "change"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(f"by {found.by}")
    changed = [row for row in found.rows if row.before != row.after]
    for row in changed[:_ROWS]:
        change = f"{row.after - row.before:+,}"
        table.add_row(f"{row.before:,}", f"{row.after:,}", change, Text(named(row.name, found.by)))
    others = changed[_ROWS:]
    if others:
        more = sum(row.after - row.before for row in others)
        table.add_row("", "", f"{more:+,}", f"{len(others)} more: --json -")
    if same := len(found.rows) - len(changed):
        table.add_row("", "", "", Text(f"{same} unchanged", style="dim"))
    for name, (before, after) in (("allocated", found.allocated), ("reserved at most", found.reserved)):
        change = f"{after - before:+,}" if after != before else "0"
        table.add_row(f"{before:,}", f"{after:,}", change, Text(name, style="bold"), style="bold")
    console.print(table)


class Differs(msgspec.Struct, frozen=True):
    """The public JSON of ``memfit diff``; docs/diff.schema.json is made from it.

    What ``schema.py`` promises of a dry run's holds of it, too. Fields are those of ``RunDifference``.
    """

    schema: int
    at: str
    by: GroupBy
    places: tuple[ScriptLocation, ScriptLocation]
    allocated: tuple[int, int]
    reserved: tuple[int, int]
    rows: tuple[RowChange, ...]


def to_json(found: RunDifference) -> bytes:
    """Encode a difference: one line of ASCII, whatever names are."""
    public = Differs(SCHEMA, *(getattr(found, name) for name in Differs.__struct_fields__[1:]))
    return json.dumps(msgspec.to_builtins(public), separators=(",", ":")).encode("ascii")
