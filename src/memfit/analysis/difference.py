"""What changed between two runs: who holds what at a moment of each."""

from dataclasses import dataclass

from memfit.analysis.explanation import Explanation
from memfit.analysis.held import By
from memfit.records import Place


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
    by: By
    places: tuple[Place, Place]
    allocated: tuple[int, int]
    """Bytes at that moment; the rows of each run sum to them."""
    reserved: tuple[int, int]
    """The most that each run reserved."""
    rows: tuple[Changed, ...]
    """Those that changed most first; those that did not, too."""


def difference(before: Explanation, after: Explanation, by: By) -> Difference:
    """Compare two runs, at the moment that both were explained at."""
    found = [{row.name: row.bytes for row in run.held.rows[by]} for run in (before, after)]
    names = dict.fromkeys([*found[0], *found[1]])
    rows = [Changed(name, found[0].get(name, 0), found[1].get(name, 0)) for name in names]
    return Difference(
        at=before.at,
        by=by,
        places=(before.held.place, after.held.place),
        allocated=(before.held.allocated, after.held.allocated),
        reserved=(before.summary.peak_reserved, after.summary.peak_reserved),
        rows=tuple(sorted(rows, key=lambda row: -abs(row.after - row.before))),
    )
