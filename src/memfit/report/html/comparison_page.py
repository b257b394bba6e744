"""The page of a comparison: the chart of its rows, the table, and what to write. It needs no script."""

from html import escape
from string import Template

from memfit.records import ComparedRun, Figure, Provenance, StrategyComparison
from memfit.records.command_as_typed import command_as_typed
from memfit.report.html.page_text_table import PageTextTable, content_security_policy, read_page_asset
from memfit.report.html.time_memory_chart import ChartPoint, time_memory_chart_svg
from memfit.report.terminal.strategy_comparison import (
    EXPLANATION,
    comparison_remarks,
    instructions_of_comparison,
    step_time_in_words,
    what_rows_cover,
)
from memfit.units import format_gib

_BAR = 160  # width of the longest bar in SVG units
_FAR = 3
"""How many times what the largest row needs the GPU's memory may be to be in the chart."""


def comparison_report_html(result: StrategyComparison) -> str:
    """Return the page as one HTML file that works offline, in the light or dark of the system."""
    words = PageTextTable(source=True)
    dark = f"@media screen and (prefers-color-scheme: dark) {{\n{read_page_asset('dark.css')}}}\n"
    style = read_page_asset("common.css") + dark + read_page_asset("plan.css")
    most = max(run.peak.process.most for run in result.runs if run.peak is not None)
    lines = "\n".join(instructions_of_comparison(result)).strip().splitlines()
    return Template(read_page_asset("comparison.html")).substitute(
        policy=content_security_policy(style),
        style=style,
        script=words.html(command_as_typed(result.command)[0]),
        subject=words.html(f"{' '.join(command_as_typed(result.command))} · {result.device.name}"),
        covers=escape(what_rows_cover(result)),
        chart=_chart(result),
        rows="".join(_row(words, number, run, most) for number, run in enumerate(result.runs)),
        explanation=words.html(" ".join((*comparison_remarks(result), EXPLANATION))),
        details="\n".join(map(words.html, lines)),
        versions=words.html(" · ".join(f"{name} {version}" for name, version in result.versions.items())),
    )


def _chart(result: StrategyComparison) -> str:
    """Draw the rows whose memory and time are known."""
    points = [
        ChartPoint(number, "tried", run.name, run.needs, run.time)
        if number
        else ChartPoint(number, "written", run.name, run.needs, run.time, run.name)
        for number, run in enumerate(result.runs)
        if run.needs is not None and run.time is not None
    ]
    if not points:
        return '<p class="hint">No time is known.</p>'
    total, most = result.device.total.bytes, max(each.needs.bytes for each in points)
    limit = (f"{result.device.name}:", total) if total <= _FAR * most else None
    return time_memory_chart_svg(points[::-1], limit)


def _row(words: PageTextTable, number: int, run: ComparedRun, most: int) -> str:
    name = f'<tr id="plan-{number}"><td>{number}</td><th scope="row">{words.html(run.name)}</th>'
    if run.peak is None:
        return f"{name}<td>&ndash;</td><td>not possible</td></tr>"
    peak = run.peak
    width = _BAR * peak.process.most / most
    process = Figure(peak.process.most, Provenance.ASSUMED)
    cells = (process, Figure(peak.allocated.most, run.provenance), Figure(peak.reserved.most, run.provenance))
    first, *others = (
        f'<td data-bytes="{each.bytes}">{format_gib(each.bytes)} '
        f'<span class="provenance">{each.provenance}</span></td>'
        for each in cells
    )
    time = step_time_in_words(run)
    return (
        f'{name}{first}<td><svg class="bar" width="{_BAR}" height="10" role="presentation">'
        f'<rect width="{width:.1f}" height="10"/></svg></td>{"".join(others)}<td>{time}</td>'
        f"<td>{run.equality}</td><td>{run.verdict}</td></tr>"
    )
