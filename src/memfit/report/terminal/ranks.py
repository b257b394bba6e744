"""The table of a job's ranks, what each role holds at its peak and where; and peaks that lie in a range."""

from itertools import groupby

from rich.table import Table
from rich.text import Text

from memfit.records import ByteRange, PeakRange, RangeCause, RankRole
from memfit.report.escape import escaped
from memfit.report.short_path import short_path
from memfit.units import Unit, unit_for

RANK_HEADINGS = ("ranks", "verdict", "allocated", "reserved", "process", "peak in")
"""Of the columns."""


def rank_table(roles: tuple[RankRole, ...]) -> Table:
    """Return a row for each role, the one that needs most first."""
    unit = unit_for(roles[0].peak.reserved.most)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for heading in RANK_HEADINGS:
        table.add_column(heading, justify="left" if heading in ("ranks", "verdict", "peak in") else "right")
    for role in roles:
        table.add_row(
            listed((role.rank, *role.also)),
            Text(role.verdict, style="" if role.verdict == "fits" else "bold yellow"),
            *(
                byte_range(size, unit)
                for size in (role.peak.allocated, role.peak.reserved, role.peak.process)
            ),
            rank_place(role),
        )
    return table


def rank_place(role: RankRole) -> str:
    """Return where a role holds most."""
    place = (role.place.phase, escaped(role.place.module), escaped(short_path(role.place.line)))
    return " · ".join(part for part in place if part)


def byte_range(size: ByteRange, unit: Unit) -> str:
    """Return bytes on the scale of a table."""
    least, most = unit.format(size.least), unit.format(size.most)
    return most if least == most else f"{least.split()[0]}-{most}"


def range_line(peak: PeakRange) -> str:
    """Return between which figures the peaks lie."""
    unit = unit_for(peak.reserved.most)
    allocated, reserved = (byte_range(size, unit) for size in (peak.allocated, peak.reserved))
    peaks = f"allocated {allocated}, reserved {reserved}"
    if RangeCause.WORKSPACES not in peak.causes:
        return f"Streams race: {peaks}, as the GPU orders its work."
    races = "the GPU's order of work, and on " * (RangeCause.STREAMS in peak.causes)
    return f"A range: {peaks}, depending on {races}the workspaces that cuDNN uses on the card, or none."


def listed(ranks: tuple[int, ...]) -> str:
    """Return ranks as people write them; runs of neighbours as first and last.

    >>> listed((0, 2, 3, 4, 8))
    '0, 2-4, 8'
    """
    parts = []
    for _, group in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in group]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(parts)
