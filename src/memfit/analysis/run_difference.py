"""Two runs compared: what holds the memory at a moment of each."""

from collections.abc import Sequence

from memfit.allocator.timeline import memory_timeline
from memfit.analysis.attribution import attribute
from memfit.analysis.breakdown import breakdown_at, peak_event, split_named_rows
from memfit.records import BreakdownRow, GroupBy, RowChange, RunDifference, Trace


def compare_runs(
    before: Trace, after: Trace, at: str = "peak", by: GroupBy = GroupBy.CATEGORY
) -> RunDifference:
    """Compare two runs.

    Args:
        before: the first run.
        after: the second run.
        at: ``peak``, a phase (``backward``), or a training step (``2``): the moment of each run that holds
            most in it.
        by: how to group the bytes into rows.

    Raises:
        UsageError: a run has no such moment.
        FileFormatError: a history contradicts itself.
    """
    runs = (before, after)
    lines = [memory_timeline(run) for run in runs]
    attributions = [attribute(run, line) for run, line in zip(runs, lines, strict=True)]
    found = [
        breakdown_at(run, line, own, peak_event(run, line, at), beside=other.modules)
        for run, line, own, other in zip(runs, lines, attributions, reversed(attributions), strict=True)
    ]
    named, rest = zip(*(split_named_rows(one.rows[by]) for one in found), strict=True)
    changed = [*_changed(*named), *_changed(*rest)]
    return RunDifference(
        at=at,
        by=by,
        places=(found[0].place, found[1].place),
        allocated=(found[0].allocated, found[1].allocated),
        reserved=(int(lines[0].reserved.max()), int(lines[1].reserved.max())),
        outside=(before.device.outside.bytes, after.device.outside.bytes),
        rows=tuple(sorted(changed, key=lambda row: -abs(row.after - row.before))),
        names=_names(before, after),
    )


def _names(before: Trace, after: Trace) -> tuple[str, str]:
    """Return what to call two runs: two ranks of a job of one size differ by their ranks, not by time."""
    one, other = before.rank, after.rank
    if one is None or other is None or one.rank == other.rank or one.world_size != other.world_size:
        return "before", "after"
    return f"rank {one.rank}", f"rank {other.rank}"


def _changed(before: Sequence[BreakdownRow], after: Sequence[BreakdownRow]) -> list[RowChange]:
    found = [{row.name: row.bytes for row in rows} for rows in (before, after)]
    names = dict.fromkeys([*found[0], *found[1]])
    return [RowChange(name, found[0].get(name, 0), found[1].get(name, 0)) for name in names]
