"""Runs of a plan's search as a chart: time against memory.

1.20x │   a
│        o  ┊
1.00x │           ┊     b          0
└─────────────────────────────
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite

from memfit.records import PlanRun, ScriptPlan
from memfit.units import format_gib


class PlanKind(StrEnum):
    """What a plan is in a search."""

    WRITTEN = "as written"
    TRIED = "tried"
    POLICY = "used by people"
    TOO_SLOW = "too slow"
    CHOSEN = "chosen"


@dataclass(frozen=True, slots=True)
class DrawnPlan:
    """A plan that ran, and what it is."""

    kind: PlanKind
    run: PlanRun


def plans_to_draw(result: ScriptPlan) -> list[DrawnPlan]:
    """Return every plan whose time is known: the script as written, what was tried, and policies."""
    found = [DrawnPlan(PlanKind.WRITTEN, result.as_written)]
    found += [DrawnPlan(_kind(result, run), run) for run in result.tried]
    found += [DrawnPlan(PlanKind.POLICY, run) for run in result.policies]
    return [each for each in found if isfinite(each.run.time)]


def plans_in_drawing_order(plans: list[DrawnPlan]) -> list[DrawnPlan]:
    """Return plans in the order in which they are drawn, so that none hides what the answer is about."""
    return sorted(plans, key=lambda each: each.kind in (PlanKind.TOO_SLOW, PlanKind.CHOSEN))


def _kind(result: ScriptPlan, run: PlanRun) -> PlanKind:
    if run is result.chosen:
        return PlanKind.CHOSEN
    return PlanKind.TOO_SLOW if run is result.too_slow else PlanKind.TRIED


_WIDTH, _HEIGHT = 64, 12
_MARKS = {PlanKind.WRITTEN: "0", PlanKind.TRIED: "o", PlanKind.TOO_SLOW: "x", PlanKind.CHOSEN: "*"}
_LETTERS = "abcdefghij"
_MARGIN = 8


def plan_chart_lines(result: ScriptPlan) -> Iterator[str]:
    """Yield the lines of a chart of everything that ran, and what its letters stand for."""
    letters, plans = iter(_LETTERS), plans_to_draw(result)
    marks = [(_MARKS.get(each.kind) or next(letters), each.run) for each in plans_in_drawing_order(plans)]
    sizes = [*(run.needs.bytes for _, run in marks), result.budget]
    times = [run.time for _, run in marks]
    low, high, slowest, fastest = min(sizes), max(sizes), max(times), min(times)
    canvas = [[" "] * _WIDTH for _ in range(_HEIGHT)]
    budget = _place(result.budget, low, high, _WIDTH)
    for row in canvas:
        row[budget] = "┊"
    for mark, run in marks:
        line = canvas[_HEIGHT - 1 - _place(run.time, fastest, slowest, _HEIGHT)]
        line[_place(run.needs.bytes, low, high, _WIDTH)] = mark
    labels = {0: f"{slowest:.2f}x", _HEIGHT - 1: f"{fastest:.2f}x"}
    for number, row in enumerate(canvas):
        yield f"{labels.get(number, ''):>{_MARGIN}} │{''.join(row).rstrip()}"
    yield f"{'':{_MARGIN}} └{'─' * _WIDTH}"
    left, right = format_gib(low), format_gib(high)
    yield f"{'':{_MARGIN}}  {left}{right:>{_WIDTH - len(left)}}"
    yield f"{'x too slow' if result.too_slow else '* chosen'}   o tried   0 as written   ┊ budget"
    policies = (each.run for each in plans if each.kind is PlanKind.POLICY)
    for letter, run in zip(_LETTERS, policies, strict=False):
        yield f"{letter} {policy_name_of_run(run)}: {format_gib(run.needs.bytes)}, {run.time:.3f}x"


def policy_name_of_run(run: PlanRun) -> str:
    """Return the name of a policy that people use.

    >>> from memfit.records import Change, Figure, Phase, Provenance, ScriptLocation
    >>> place = ScriptLocation(1, Phase.BACKWARD, "", "", "", "")
    >>> one = Figure(1, Provenance.EXACT)
    >>> policy_name_of_run(PlanRun(Change({"checkpointing": {"every": 2}}), one, one, 1.1, place))
    'checkpoint every 2nd block'
    """
    settings = run.change.plan["checkpointing"]
    every = "every 2nd block" if settings.get("every") else "every block"
    return f"checkpoint {every}{', matrix products kept' * ('save_ops' in settings)}"


def _place(value: float, low: float, high: float, cells: int) -> int:
    """Return the cell of a value on an axis from ``low`` to ``high``."""
    return round((value - low) / (high - low) * (cells - 1)) if high > low else 0
