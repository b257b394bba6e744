"""The page of a plan: the chart of its search, every plan that ran, and what to change. It needs no script.

time │  p          o tried   p used by people
│     o       ● chosen  ┊ the budget
│  ┊     ●
│  ┊          w as written
└──────────── memory
"""

from collections.abc import Iterator, Sequence
from html import escape
from math import ceil, floor, log10
from pathlib import Path
from string import Template

from memfit.records import Provenance, ScriptPlan
from memfit.records.command_as_typed import command_as_typed
from memfit.report.html.page_text_table import PageTextTable, content_security_policy, read_page_asset
from memfit.report.terminal.plan_chart import DrawnPlan, PlanKind, plans_in_drawing_order, plans_to_draw
from memfit.report.terminal.script_plan import plan_changes_in_words, plan_detail_lines, plan_verdict
from memfit.units import format_gib, unit_for_table


def plan_report_html(result: ScriptPlan, file: Path | None = None) -> str:
    """Return the page of a plan as one HTML file that works offline, in the light or dark of the system.

    Args:
        result: what was found.
        file: where the plan is written, if it is.

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


_WIDTH, _HEIGHT = 960, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 24, 34, 50
_TICKS = 6
_ROOM = 0.06
"""Share of an axis beside the outermost points."""
_APART = 15
"""Pixels between two numbers of points, at least: others are left out."""

_NAMED = (PlanKind.WRITTEN, PlanKind.TOO_SLOW, PlanKind.CHOSEN)
"""Points whose number is followed by what they are."""
_LATE = 0.8
"""Share of the width from which words stand before their point."""


class _Axis:
    """Places values on a line of pixels.

    Args:
        values: to be shown.
        least: range of values at least.
        start: pixel of the smallest.
        end: pixel of the largest.
    """

    def __init__(self, values: Sequence[float], least: float, start: float, end: float) -> None:
        extent = max(max(values) - min(values), least)
        self.low, self.high = min(values) - _ROOM * extent, min(values) + (1 + _ROOM) * extent
        self._start, self._end = start, end

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        share = (value - self.low) / (self.high - self.low)
        return self._start + share * (self._end - self._start)

    def ticks(self) -> list[float]:
        """Return round values to be named."""
        rough = (self.high - self.low) / _TICKS
        power = 10.0 ** floor(log10(rough))
        step = next(each * power for each in (1, 2, 5, 10) if each * power >= rough)
        first, last = ceil(self.low / step), floor(self.high / step)
        return [round(step * number, 9) for number in range(first, last + 1)]


def plan_chart_svg(result: ScriptPlan) -> str:
    """Return the chart; its points have the numbers of ``plans_to_draw``, counted from 0."""
    plans = plans_to_draw(result)
    unit = unit_for_table(max(result.budget, *(each.run.needs.bytes for each in plans)))
    sizes = [result.budget / unit.bytes, *(each.run.needs.bytes / unit.bytes for each in plans)]
    memory = _Axis(sizes, 0.02 * max(sizes), _LEFT, _WIDTH - _RIGHT)
    time = _Axis([each.run.time for each in plans], 0.02, _HEIGHT - _BOTTOM, _TOP)
    budget, low, top = memory.at(result.budget / unit.bytes), _HEIGHT - _BOTTOM, _TOP - 8
    parts = [
        *_grid(memory, time, unit.name),
        f'<line class="budget" x1="{budget:.1f}" x2="{budget:.1f}" y1="{top}" y2="{low}"/>',
        f'<text class="budget{_before(budget)}" x="{budget:.1f}" y="{top - 6}">',
        f"budget {format_gib(result.budget)}</text>",
        *_points(plans, memory, time, unit.bytes),
    ]
    return (
        f'<svg class="plans" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="Time of a step against '
        f'the memory that it needs; the table has the figures">{"".join(parts)}</svg>'
    )


def _grid(memory: _Axis, time: _Axis, unit: str) -> Iterator[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for value in memory.ticks():
        x = memory.at(value)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 18}">{value:,g}</text>'
    for value in time.ticks():
        y = time.at(value)
        yield f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="times" x="{_LEFT - 8}" y="{y + 4:.1f}">{value:g}x</text>'
    yield f'<text class="axis-name" x="{right}" y="{_HEIGHT - 10}">needs, {unit} of the process →</text>'
    turned = f"rotate(-90 14 {bottom})"
    yield f'<text class="time-name" x="14" y="{bottom}" transform="{turned}">time of a step →</text>'


def _before(x: float) -> str:
    """Return the class of a text that stands before its point, because there is no room after it."""
    return " before" * (x > _LATE * _WIDTH)


def _points(plans: list[DrawnPlan], memory: _Axis, time: _Axis, unit: int) -> Iterator[str]:
    numbers = {id(each): number for number, each in enumerate(plans)}
    spots = [
        (each, memory.at(each.run.needs.bytes / unit), time.at(each.run.time))
        for each in plans_in_drawing_order(plans)
    ]
    named: list[tuple[float, float]] = []
    for each, x, y in reversed(spots):
        if all(abs(x - other) > _APART or abs(y - beside) > _APART for other, beside in named):
            named.append((x, y))
            word = f" {each.kind}" * (each.kind in _NAMED)
            aside = -10 if _before(x) else 10
            yield f'<text class="name{_before(x)}" x="{x + aside:.1f}" y="{y - 7:.1f}">'
            yield f"{numbers[id(each)]}{word}</text>"
    for each, x, y in spots:
        run, number = each.run, numbers[id(each)]
        figures = f"{format_gib(run.needs.bytes)} {run.needs.provenance}, {run.time:.3f}x"
        title = f"{plan_changes_in_words(run)}: {figures}"
        yield (
            f'<a href="#plan-{number}"><circle class="{each.kind.name.lower().replace("_", "-")}" '
            f'cx="{x:.1f}" cy="{y:.1f}" r="{7 if each.kind is PlanKind.CHOSEN else 5}">'
            f"<title>{escape(title)}</title></circle></a>"
        )
