"""What changed between two runs: who holds what at a moment of each."""

from collections.abc import Sequence
from dataclasses import dataclass

from memfit.allocator.timeline import timeline
from memfit.analysis.attribution import attribute
from memfit.analysis.breakdown import held, moment, parted
from memfit.records import BreakdownRow, GroupBy, Place, Trace


@dataclass(frozen=True, slots=True)
class Changed:
    """Bytes that have something in common, in one run and in the other."""

    name: str
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Difference:
    """Two runs side by side."""

    at: str
    """The moment: ``peak``, a phase, or a training step."""
    by: GroupBy
    places: tuple[Place, Place]
    allocated: tuple[int, int]
    """Bytes at that moment; the rows of each run sum to them."""
    reserved: tuple[int, int]
    """The most that each run reserved."""
    rows: tuple[Changed, ...]
    """Those that changed most first; those that did not, too."""


def difference(before: Trace, after: Trace, at: str = "peak", by: GroupBy = GroupBy.CATEGORY) -> Difference:
    """Compare two runs.

    Args:
        before: one.
        after: the other.
        at: ``peak``, a phase (``backward``), or a training step (``2``): the moment in it that holds most,
            of each.
        by: what rows sum.

    Raises:
        UsageError: a run has no such moment.
        FileFormatError: a history contradicts itself.
    """
    runs = (before, after)
    lines = [timeline(run) for run in runs]
    attributions = [attribute(run, line) for run, line in zip(runs, lines, strict=True)]
    found = [
        held(run, line, own, moment(run, line, at), beside=other.modules)
        for run, line, own, other in zip(runs, lines, attributions, reversed(attributions), strict=True)
    ]
    named, rest = zip(*(parted(one.rows[by]) for one in found), strict=True)
    changed = [*_changed(*named), *_changed(*rest)]
    return Difference(
        at=at,
        by=by,
        places=(found[0].place, found[1].place),
        allocated=(found[0].allocated, found[1].allocated),
        reserved=(int(lines[0].reserved.max()), int(lines[1].reserved.max())),
        rows=tuple(sorted(changed, key=lambda row: -abs(row.after - row.before))),
    )


def _changed(before: Sequence[BreakdownRow], after: Sequence[BreakdownRow]) -> list[Changed]:
    found = [{row.name: row.bytes for row in rows} for rows in (before, after)]
    names = dict.fromkeys([*found[0], *found[1]])
    return [Changed(name, found[0].get(name, 0), found[1].get(name, 0)) for name in names]
