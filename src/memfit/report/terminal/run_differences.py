"""What changed from one run to another, or since a baseline, on the terminal."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memfit.analysis.fold_module_paths import fold_module_paths
from memfit.records import CheckedFigure, CheckVerdict, GroupBy, MemoryCheck, RunDifference
from memfit.report.escape_control_characters import escaped
from memfit.report.places_in_words import location_in_words
from memfit.report.terminal.explanation import breakdown_row_name
from memfit.report.terminal.layout import plain_table, subject_in_words
from memfit.units import format_gib

_ROWS = 20


def print_run_difference(found: RunDifference, console: Console) -> None:
    """Print what changed, in bytes; the rows sum to what is allocated."""
    width = max(map(len, found.names))
    for name, place in zip(found.names, found.places, strict=True):
        console.print(f"{name:<{width}}  {found.at} in: {location_in_words(place)}")
    console.print()
    table = plain_table("rrrw", *found.names, "change", f"by {found.by}")
    changed = [row for row in found.rows if row.before != row.after]
    for row in changed[:_ROWS]:
        change = f"{row.after - row.before:+,}"
        table.add_row(
            f"{row.before:,}", f"{row.after:,}", change, Text(breakdown_row_name(row.name, found.by))
        )
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


def print_memory_check(check: MemoryCheck, console: Console) -> None:
    """Print the verdict, the peaks, and what grew or fell by more than the tolerance."""
    run = check.run
    console.print(Text(_verdict(check), style="bold"))
    console.print(Text(subject_in_words(run.command, run.gpu, versions=run.versions), style="dim"))
    if check.peaks:
        console.print()
        console.print(_table(check.peaks, "peak"))
    for what, figures in (("Grew", check.grew), ("Fell", check.fell)):
        parts_changed = [one for one in figures if one not in check.peaks]
        if parts_changed:
            console.print(f"\n{what} by more than {_percent(check.tolerance)}, at the peak:")
            console.print(_table(_folded(parts_changed), "module · term"))
    for line in _remarks(check):
        console.print(line)


def _verdict(check: MemoryCheck) -> str:
    limit = _percent(check.tolerance)
    needs, memory = format_gib(check.needs.bytes), format_gib(check.run.memory)
    if check.verdict is CheckVerdict.NO_FIT:
        return f"DOES NOT FIT   needs {needs} ({check.needs.provenance}) of {memory}"
    if check.verdict in (CheckVerdict.WRITTEN, CheckVerdict.FITS):
        what = "FITS" if check.verdict is CheckVerdict.FITS else "BASELINE"
        return f"{what}   needs {needs} ({check.needs.provenance}) of {memory}"
    if check.verdict is CheckVerdict.SAME:
        return f"MEMORY AS IN THE BASELINE   nothing changed by more than {limit}"
    if check.verdict is CheckVerdict.GREW:
        return f"MEMORY GREW   by more than {limit}: {_named(check.grew)}"
    return f"MEMORY FELL   by more than {limit}: {_named(check.fell)}"


def _named(figures: Sequence[CheckedFigure]) -> str:
    """Name the module that changed most; without one, the first figure."""
    one = next((each for each in figures if each.module is not None), figures[0])
    return f"{_name(one)} {one.change:+,} bytes"


def _table(figures: Sequence[CheckedFigure], heading: str) -> Table:
    table = plain_table("rrrrww", "baseline", "now", "change", "", "", heading)
    for one in figures[:_ROWS]:
        share = "new" if not one.before else f"{one.change / one.before:+.2%}"
        change = f"{one.change:+,}" if one.change else "0"
        table.add_row(
            f"{one.before:,}", f"{one.after:,}", change, share, Text(one.provenance, "dim"), Text(_name(one))
        )
    if others := figures[_ROWS:]:
        change = f"{sum(one.change for one in others):+,}"
        table.add_row("", "", change, "", "", f"{len(others)} more: --json -")
    return table


def _name(one: CheckedFigure) -> str:
    return (
        one.name if one.module is None else f"{breakdown_row_name(one.module, GroupBy.MODULE)} · {one.name}"
    )


def _folded(figures: Sequence[CheckedFigure]) -> list[CheckedFigure]:
    """Join modules that changed alike into one row, with the sums of their bytes."""
    alike: dict[tuple[object, ...], list[CheckedFigure]] = {}
    for one in figures:
        alike.setdefault((one.module is None, one.name, one.before, one.after), []).append(one)
    rows: list[CheckedFigure] = []
    for group in alike.values():
        names = fold_module_paths([one.module or "" for one in group])
        for name in dict.fromkeys(names):
            same = [one for one, folded in zip(group, names, strict=True) if folded == name]
            module = None if group[0].module is None else name
            before, after = sum(one.before for one in same), sum(one.after for one in same)
            rows.append(replace(same[0], module=module, before=before, after=after))
    return rows


def _remarks(check: MemoryCheck) -> Iterator[str]:
    yield ""
    yield from map(escaped, check.differences)
    if check.verdict is CheckVerdict.GREW:
        yield "If the growth is intended, run the same command with --update, and commit the new baseline."
    if check.verdict is CheckVerdict.FELL:
        yield "To keep it that low, run the same command with --update, and commit the new baseline."


def _percent(share: float) -> str:
    return f"{100 * share:g} %"
