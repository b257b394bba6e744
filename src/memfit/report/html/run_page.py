"""Assemble the report: one HTML file that loads nothing and cannot access the network."""

from dataclasses import replace
from string import Template

from memfit.analysis.reserved_ranges import reserves_in_segments
from memfit.records import Attribution, DryRun, Timeline, Trace
from memfit.report.html import static_page_parts
from memfit.report.html.page_payload import page_payload
from memfit.report.html.page_text_table import PageTextTable, content_security_policy, read_page_asset
from memfit.report.html.step_section import step_section_html

_STYLES = ("common.css", "dark.css", "page.css")
_SCRIPTS = (
    "payload.js", "page_data.js", "format.js", "canvas_helpers.js", "virtual_list.js", "timeline.js",
    "moment.js", "icicle.js", "segments.js", "live_tensors.js", "page.js",
)  # fmt: skip
"""In order of dependency; joined into one script with its own scope."""


def run_report_html(
    trace: Trace, line: Timeline, attribution: Attribution, summary: DryRun, *, source: bool = True
) -> str:
    """Return the report of a run as one HTML file that works offline, opened at the peak.

    Returns:
        The text of the file. It depends only on the input and the working folder, which shortens paths.

    Raises:
        FileFormatError: the trace has addresses or sizes beyond what any device has.
    """
    words = PageTextTable(source=source)
    if not source:
        summary = _without_source(summary)
    found = page_payload(trace, line, attribution, summary, words)
    missing = {"no-source": not source, "no-segments": not reserves_in_segments(trace)}
    style = "".join(map(read_page_asset, _STYLES)) + static_page_parts.layer_colours_css(found.facts)
    script = "(() => {\n'use strict';\n" + "\n".join(map(read_page_asset, _SCRIPTS)) + "})();\n"
    return Template(read_page_asset("page.html")).substitute(
        static_page_parts.verdict_html_parts(summary, words)
        | static_page_parts.combined_blocks_html(found.facts),
        missing=" ".join(name for name, is_so in missing.items() if is_so),
        policy=content_security_policy(style, script),
        style=style,
        code=script,
        ladder=static_page_parts.allocated_to_capacity_html(summary),
        ranks=static_page_parts.rank_table_html(summary, words),
        stages=static_page_parts.stage_table_html(summary, words),
        longest=static_page_parts.longest_batches_html(summary, words),
        advice=static_page_parts.advice_html(summary, words),
        terms=static_page_parts.peak_terms_html(summary),
        step=step_section_html(trace, summary, words),
        notes=static_page_parts.notes_html(summary, words),
        versions=static_page_parts.versions_html(summary, words),
        sums=static_page_parts.layer_sums_html(found.facts),
        shortcuts=static_page_parts.moment_buttons_html(found, words),
        last=max(0, found.facts.moments - 1),
        data=found.text,
    )


def _without_source(summary: DryRun) -> DryRun:
    """Clear the fields that hold file names; ``PageTextTable`` removes file names within texts."""
    failure = summary.out_of_memory
    return replace(
        summary,
        command=(),
        peak_place=replace(summary.peak_place, line=""),
        out_of_memory=failure and replace(failure, place=replace(failure.place, line="")),
        growth=replace(summary.growth, line=""),
        ranks=tuple(replace(role, place=replace(role.place, line="")) for role in summary.ranks),
        stages=tuple(
            replace(use, place=use.place and replace(use.place, line=""), leaves_line="")
            for use in summary.stages
        ),
        shortened=tuple(each if each.is_option else replace(each, where="") for each in summary.shortened),
        longest=tuple(
            replace(found, scan=replace(found.scan, where="the script")) for found in summary.longest
        ),
        end=replace(summary.end, where="", stand_ins=()),
        notes=tuple(replace(note, where="") for note in summary.notes),
    )
