"""The plans that a chart of a plan's search shows, and what each is."""

from dataclasses import dataclass
from enum import StrEnum
from math import isfinite

from memfit.records import PlanRun, ScriptPlan


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


def drawn_plans(result: ScriptPlan) -> list[DrawnPlan]:
    """Return every plan whose time is known: the script as written, what was tried, and policies."""
    found = [DrawnPlan(PlanKind.WRITTEN, result.as_written)]
    found += [DrawnPlan(_kind(result, run), run) for run in result.tried]
    found += [DrawnPlan(PlanKind.POLICY, run) for run in result.policies]
    return [each for each in found if isfinite(each.run.time)]


def marked_last(plans: list[DrawnPlan]) -> list[DrawnPlan]:
    """Return plans in the order in which they are drawn, so that none hides what the answer is about."""
    return sorted(plans, key=lambda each: each.kind in (PlanKind.TOO_SLOW, PlanKind.CHOSEN))


def _kind(result: ScriptPlan, run: PlanRun) -> PlanKind:
    if run is result.chosen:
        return PlanKind.CHOSEN
    return PlanKind.TOO_SLOW if run is result.too_slow else PlanKind.TRIED
