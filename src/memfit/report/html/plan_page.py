"""The page of a plan: the chart of its search, every plan that ran, and what to change. It needs no script.

time │  p          o tried   p used by people
│     o       ● chosen  ┊ the budget
│  ┊     ●
│  ┊          w as written
└──────────── memory
"""

from html import escape
from pathlib import Path
from string import Template

from memfit.records import Provenance, ScriptPlan
from memfit.records.command_as_typed import command_as_typed
from memfit.report.html.page_text_table import PageTextTable, content_security_policy, read_page_asset
from memfit.report.html.time_memory_chart import ChartPoint, time_memory_chart_svg
from memfit.report.terminal.plan_chart import DrawnPlan, PlanKind, plans_in_drawing_order, plans_to_draw
from memfit.report.terminal.plan_words import plan_changes_in_words
from memfit.report.terminal.script_plan import plan_detail_lines, plan_verdict
from memfit.units import format_gib


def plan_report_html(result: ScriptPlan, file: Path | None = None) -> str:
    """Return the page of a plan as one HTML file that works offline, in the light or dark of the system.

    Returns:
        The text of the file.
    """
    words = PageTextTable(source=True)
    dark = f"@media screen and (prefers-color-scheme: dark) {{\n{read_page_asset('dark.css')}}}\n"
    style = read_page_asset("common.css") + dark + read_page_asset("plan.css")
    verdict = plan_verdict(result)
    kinds = dict.fromkeys(each.kind for each in plans_to_draw(result))
    return Template(read_page_asset("plan.html")).substitute(
        policy=content_security_policy(style),
        style=style,
        script=words.html(command_as_typed(result.command)[0]),
        subject=words.html(f"{' '.join(command_as_typed(result.command))} · {result.device.name}"),
        kind="bad" if result.chosen is None else "unsure" if result.is_tight else "good",
        verdict=escape(verdict.word.capitalize()),
        rest=escape(" ".join(verdict.figures)),
        chart=plan_chart_svg(result),
        legend="".join(f'<span><i class="{_class(kind)}"></i>{kind}</span>' for kind in kinds),
        budget=f"{result.budget:,} B, {format_gib(result.budget)}",
        rows="".join(
            _row(words, number, each, result.budget) for number, each in enumerate(plans_to_draw(result))
        ),
        rule=escape(result.rule),
        details="\n".join(words.html(line) for line in _lines(result, file)),
        versions=words.html(" · ".join(f"{name} {version}" for name, version in result.versions.items())),
    )


def _lines(result: ScriptPlan, file: Path | None) -> list[str]:
    return "\n".join(plan_detail_lines(result, file)).strip().splitlines() or ["Nothing."]


def _class(kind: PlanKind) -> str:
    return kind.name.lower().replace("_", "-")


def _row(words: PageTextTable, number: int, plan: DrawnPlan, budget: int) -> str:
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
        f'<th scope="row">{words.html(plan_changes_in_words(run))}</th><td>{plan.kind}</td>'
        f'<td data-bytes="{needs.bytes}">{format_gib(needs.bytes)}{_provenance(needs.provenance, title)}</td>'
        f"<td>{'fits' if needs.bytes <= budget else f'over by {format_gib(needs.bytes - budget)}'}</td>"
        f"<td>{held}</td><td>{run.time:.3f}x{_provenance(Provenance.ASSUMED)}</td>"
        f'<td>{run.equality}</td><td><span class="long">{words.html(place)}</span></td></tr>'
    )


def _provenance(provenance: Provenance, title: str = "") -> str:
    return f' <span class="provenance"{title}>{provenance}</span>'


_NAMED = (PlanKind.WRITTEN, PlanKind.TOO_SLOW, PlanKind.CHOSEN)
"""Points whose number is followed by what they are."""


def plan_chart_svg(result: ScriptPlan) -> str:
    """Return the chart; its points have the numbers of ``plans_to_draw``, counted from 0."""
    plans = plans_to_draw(result)
    numbers = {id(each): number for number, each in enumerate(plans)}
    points = [
        ChartPoint(
            numbers[id(each)],
            _class(each.kind),
            plan_changes_in_words(each.run),
            each.run.needs,
            each.run.time,
            each.kind if each.kind in _NAMED else "",
        )
        for each in plans_in_drawing_order(plans)
    ]
    return time_memory_chart_svg(points, ("budget", result.budget))
