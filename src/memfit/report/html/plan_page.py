"""Assemble the page of a plan: its chart, every plan that ran, and what to change. It needs no script."""

from html import escape
from pathlib import Path
from string import Template

from memfit.records import Provenance, ScriptPlan
from memfit.records.targets import typed
from memfit.report.drawn_plans import DrawnPlan, PlanKind, drawn_plans
from memfit.report.html.plan_svg import chart
from memfit.report.html.self_contained import asset, policy
from memfit.report.html.texts import PageTexts
from memfit.report.terminal.script_plan import plan_details, plan_name, plan_verdict
from memfit.units import format_gib


def plan_page(result: ScriptPlan, file: Path | None = None) -> str:
    """Return the page of a plan as one HTML file that works offline, in the light or dark of the system.

    Args:
        result: what was found.
        file: where the plan is written, if it is.

    Returns:
        The text of the file.
    """
    words = PageTexts(source=True)
    dark = f"@media screen and (prefers-color-scheme: dark) {{\n{asset('dark.css')}}}\n"
    style = asset("common.css") + dark + asset("plan.css")
    verdict, _, rest = plan_verdict(result).partition("   ")
    kinds = dict.fromkeys(each.kind for each in drawn_plans(result))
    return Template(asset("plan.html")).substitute(
        policy=policy(style),
        style=style,
        script=_text(words, typed(result.command)[0]),
        subject=_text(words, f"{' '.join(typed(result.command))} · {result.device.name}"),
        kind="bad" if result.chosen is None else "unsure" if result.is_tight else "good",
        verdict=escape(verdict.capitalize()),
        rest=escape(rest),
        chart=chart(result),
        legend="".join(f'<span><i class="{_class(kind)}"></i>{kind}</span>' for kind in kinds),
        budget=f"{result.budget:,} B, {format_gib(result.budget)}",
        rows="".join(
            _row(words, number, each, result.budget) for number, each in enumerate(drawn_plans(result))
        ),
        rule=escape(result.rule),
        details="\n".join(_text(words, line) for line in _lines(result, file)),
        versions=_text(words, " · ".join(f"{name} {version}" for name, version in result.versions.items())),
    )


def _lines(result: ScriptPlan, file: Path | None) -> list[str]:
    return "\n".join(plan_details(result, file)).strip().splitlines() or ["Nothing."]


def _class(kind: PlanKind) -> str:
    return kind.name.lower().replace("_", "-")


def _row(words: PageTexts, number: int, plan: DrawnPlan, budget: int) -> str:
    run = plan.run
    needs, allocated = run.needs, run.allocated
    sure = (
        Provenance.SIMULATED if run.change.allocator else Provenance.EXACT
    )  # a replay with the settings, or the run
    title = f' title="{escape(needs.source)}"' if needs.source else ""
    held = "" if allocated is None else f"{allocated:,} B{_provenance(sure)}"
    place = " · ".join(part for part in (run.place.phase, run.place.module) if part)
    return (
        f'<tr id="plan-{number}" class="{_class(plan.kind)}"><td>{number}</td>'
        f'<th scope="row">{_text(words, plan_name(run))}</th><td>{plan.kind}</td>'
        f'<td data-bytes="{needs.bytes}">{format_gib(needs.bytes)}{_provenance(needs.provenance, title)}</td>'
        f"<td>{'fits' if needs.bytes <= budget else f'over by {format_gib(needs.bytes - budget)}'}</td>"
        f"<td>{held}</td><td>{run.time:.3f}x{_provenance(Provenance.ASSUMED)}</td>"
        f'<td>{run.equality}</td><td><span class="long">{_text(words, place)}</span></td></tr>'
    )


def _provenance(provenance: Provenance, title: str = "") -> str:
    return f' <span class="provenance"{title}>{provenance}</span>'


def _text(words: PageTexts, text: str) -> str:
    return escape(words.shown(text))
