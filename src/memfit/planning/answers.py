"""What the searches for a plan answer."""

from memfit.analysis.summary import summarize
from memfit.planning.plan_runs import PlannedScript
from memfit.records import PlanRun, ScriptPlan, Trace
from memfit.units import format_gib

IN_MODEL = {"precision", "checkpointing", "compilation"}
"""Settings that ``memfit.apply`` carries out."""
_TOTALS = ("allocated", "cached, not allocated", "reserved", "process")
_MUCH = 0.02
"""Share of a peak from which what holds it is named."""


def unanswered(script: PlannedScript, plain: Trace, budget: int, as_written: PlanRun) -> ScriptPlan:
    """Return the answer of a search that has found nothing yet.

    Args:
        script: the script.
        plain: its run as written.
        budget: bytes of the process.
        as_written: what that run needs.
    """
    return ScriptPlan(
        device=plain.device,
        budget=budget,
        as_written=as_written,
        chosen=None,
        smallest=None,
        bound=0.0,
        rule=script.rule,
        tried=(),
        models=(),
        optimizer=None,
        command=plain.command,
        versions=plain.versions,
        uncertainty=summarize(plain).uncertainty,
    )


def too_small(smallest: PlanRun, ways: str) -> str:
    """Return why no plan fits: what holds the memory at the smallest peak.

    Args:
        smallest: the plan that needs least.
        ways: what memfit does to lower the peak, as a clause.
    """
    place = smallest.place
    where = " of ".join(filter(None, (f"the {place.phase}", place.module)))
    held = sorted(smallest.terms, key=lambda term: -term.figure.bytes)
    named = [
        f"{term.name} {format_gib(term.figure.bytes)}"
        for term in held
        if term.name not in _TOTALS and term.figure.bytes >= _MUCH * smallest.needs.bytes
    ]
    return (
        f"memfit {ways}. None of these plans fits. At the smallest peak, in {where}, there are: "
        f"{', '.join(named)}."
    )
