"""The table of a job's ranks, what each role holds at its peak and where; and peaks that lie in a range."""

from memfit.records import ByteRange, EquivalentRanks, PeakRange, RangeCause
from memfit.report.places_in_words import format_ranks, location_in_cell
from memfit.report.terminal.layout import ReportTable, TableCell, TableRow
from memfit.units import Unit, unit_for_table


def rank_table(roles: tuple[EquivalentRanks, ...]) -> ReportTable:
    """Return a row for each role, the one that needs most first."""
    unit = unit_for_table(roles[0].peak.reserved.most)
    numbers = ("allocated", "reserved", "process")
    rows = []
    for role in roles:
        sizes = (role.peak.allocated, role.peak.reserved, role.peak.process)
        cells = (
            TableCell(format_ranks((role.rank, *role.also))),
            TableCell(role.verdict, warns=role.verdict != "fits"),
            *(TableCell(format_byte_range(size, unit), size.most) for size in sizes),
            TableCell(location_in_cell(role.place)),
        )
        rows.append(TableRow(cells))
    return ReportTable(("ranks", "verdict", *numbers, "peak in"), numbers, rows)


def format_byte_range(size: ByteRange, unit: Unit) -> str:
    """Return bytes on the scale of a table."""
    least, most = unit.format(size.least), unit.format(size.most)
    return most if least == most else f"{least.split()[0]}-{most}"


def peak_range_line(peak: PeakRange) -> str:
    """Return between which figures the peaks lie."""
    unit = unit_for_table(peak.reserved.most)
    allocated, reserved = (format_byte_range(size, unit) for size in (peak.allocated, peak.reserved))
    peaks = f"allocated {allocated}, reserved {reserved}"
    if RangeCause.WORKSPACES not in peak.causes:
        return f"Streams race: {peaks}, as the GPU orders its work."
    races = "the GPU's order of work, and on " * (RangeCause.STREAMS in peak.causes)
    return f"A range: {peaks}, depending on {races}the workspaces that cuDNN uses on the card, or none."
