"""The page of a plan: its chart, its table, and that nothing in it runs or is loaded."""

import io
import re
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console

from memfit.records import Change, Figure, Phase, PlanRun, Provenance, ScriptLocation, ScriptPlan
from memfit.report.html.page_text_table import content_security_policy
from memfit.report.html.plan_page import plan_chart_svg, plan_report_html
from memfit.report.terminal.plan_chart import PlanKind, plan_chart_lines, plans_to_draw
from memfit.report.terminal.plan_words import plan_changes_in_words
from memfit.report.terminal.script_plan import print_plan
from support.html_reports import EVIL, GIB, Elements

SVG = "{http://www.w3.org/2000/svg}"


def ran(gibibytes, time, module="blocks.1", **settings):
    place = ScriptLocation(1, Phase.BACKWARD, module, "", "", "")
    needs = Figure(round(gibibytes * GIB), Provenance.ASSUMED, "CUDA context: a table")
    return PlanRun(Change(settings), needs, needs, time, place, allocated=round(gibibytes * GIB) - GIB // 2)


@pytest.fixture
def plan(answer):
    regions = {"regions": [{"modules": ["blocks.0", "blocks.1"]}]}
    tight, chosen = (ran(*each, checkpointing=regions) for each in ((3, 1.3), (4, 1.1)))
    return ScriptPlan(
        device=answer.device,
        budget=5 * GIB,
        as_written=ran(8, 1.0),
        chosen=chosen,
        smallest=None,
        bound=1.05,
        rule="roofline of the card",
        tried=(tight, chosen),
        models=("GPT (optimizer: train.py:3)",),
        optimizer=0,
        command=("/home/ada/train.py", "--lr", "1"),
        versions={"torch": "2.14.1"},
        policies=(ran(3.5, 1.25, checkpointing={}), ran(6, 1.15, checkpointing={"every": 2})),
    )


def points(plan):
    """Return the pixels and the kind of each point, by its number."""
    tree = ET.fromstring(plan_chart_svg(plan).replace("<svg", f'<svg xmlns="{SVG[1:-1]}"'))  # noqa: S314
    return {
        int(link.get("href").removeprefix("#plan-")): (
            float(dot.get("cx")),
            float(dot.get("cy")),
            dot.get("class"),
        )
        for link in tree.iter(f"{SVG}a")
        for dot in link
    }


def test_points_stand_where_their_memory_and_time_are(plan):
    drawn = plans_to_draw(plan)
    found = points(plan)
    assert [found[number][2] for number in range(5)] == ["written", "tried", "chosen", "policy", "policy"]
    by_memory = sorted(range(5), key=lambda number: drawn[number].run.needs.bytes)
    assert all(found[less][0] < found[more][0] for less, more in pairwise(by_memory))
    by_time = sorted(range(5), key=lambda number: drawn[number].run.time)
    assert all(found[fast][1] > found[slow][1] for fast, slow in pairwise(by_time))
    # 3, 4 and 8 GiB: distances are to scale.
    assert (found[0][0] - found[1][0]) / (found[2][0] - found[1][0]) == pytest.approx(5, rel=0.01)
    budget = float(re.search(r'<line class="budget" x1="([0-9.]+)"', plan_chart_svg(plan))[1])
    assert (budget - found[2][0]) / (found[2][0] - found[1][0]) == pytest.approx(1, rel=0.01)


def test_what_is_chosen_is_drawn_over_the_rest_and_named(plan):
    text = plan_chart_svg(plan)
    assert text.rindex('class="chosen"') > text.rindex('class="policy"')
    assert ">2 chosen</text>" in text
    assert ">0 as written</text>" in text


def test_every_plan_has_a_row_with_its_figures_and_their_provenance(plan):
    text = plan_report_html(plan)
    rows = re.findall(r'<tr id="plan-(\d)" class="([\w-]+)">(.*?)</tr>', text)
    assert [int(number) for number, _, _ in rows] == [*range(5)]
    for (_, kind, row), drawn in zip(rows, plans_to_draw(plan), strict=True):
        run = drawn.run
        assert kind == {"as written": "written", "used by people": "policy"}.get(drawn.kind, drawn.kind)
        assert f'data-bytes="{run.needs.bytes}"' in row
        assert f'title="{run.needs.source}">assumed</span>' in row
        assert f'{run.allocated:,} B <span class="provenance">exact</span>' in row
        assert f'{run.time:.3f}x <span class="provenance">assumed</span>' in row
        assert (">fits<" in row) == (run.needs.bytes <= plan.budget)
    assert "over by 3.00 GiB" in rows[0][2]
    assert "checkpoint every 2nd block" in rows[4][2]


def test_the_page_says_what_to_change_line_by_line(plan):
    details = re.search(r'<pre class="details">(.*?)</pre>', plan_report_html(plan), re.DOTALL)[1]
    assert "Recomputed in the backward:\n    blocks.0, blocks.1\n" in details
    assert "no plan that memfit weighed takes less than 1.050 (assumed: roofline of the card)" in details
    assert "~/train.py --lr 1" in plan_report_html(plan)


def test_a_tight_plan_is_marked_in_the_headline(plan):
    assert '<h1 class="good"><span class="verdict">Plan found</span>' in plan_report_html(plan)
    tight = plan_report_html(replace(plan, uncertainty=GIB + 1))
    assert '<h1 class="unsure"><span class="verdict">Plan found, tight</span>' in tight
    assert "Tight: it leaves 1.00 GiB" in tight
    assert '<h1 class="good">' in plan_report_html(replace(plan, uncertainty=GIB))


def test_the_page_needs_no_script_and_loads_nothing(plan):
    text = plan_report_html(plan)
    page = Elements(text)
    assert not [tag for tag, _ in page.found if tag in ("script", "link", "img", "iframe")]
    assert not re.search(r"https?://|url\(|@import", text)
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]
    (content,) = (at["content"] for _, at in page.found if at.get("http-equiv") == "Content-Security-Policy")
    assert content == content_security_policy(style)
    assert "script-src 'none'" in content
    assert '@media screen and (prefers-color-scheme: dark) {\n:root[data-theme="dark"]' in style


def test_hostile_names_are_text(plan):
    evil = ran(4, 1.1, EVIL, checkpointing={"regions": [{"modules": [EVIL]}]})
    text = plan_report_html(
        replace(plan, command=(EVIL,), tried=(evil,), chosen=evil, models=(EVIL,), versions={EVIL: EVIL})
    )
    harmless = [tag for tag, _ in Elements(plan_report_html(plan)).found]
    assert {tag for tag, _ in Elements(text).found} <= set(harmless)
    assert not {"\x1b", "\u202e", "\u2066", "\x00"} & set(text)


def test_a_plan_that_is_too_slow_is_marked(plan):
    slow = replace(plan, chosen=None, too_slow=plan.chosen, max_slowdown=1.05)
    text = plan_report_html(slow)
    assert '<h1 class="bad"><span class="verdict">No plan fits</span>' in text
    assert points(slow)[2][2] == "too-slow"
    assert ">2 too slow</text>" in text
    marks = "".join(line.partition("│")[2] for line in plan_chart_lines(slow))
    assert (marks.count("x"), marks.count("*")) == (1, 0)


def test_a_script_that_fits_alone_is_one_point(plan):
    fits = replace(plan, budget=8 * GIB, chosen=plan.as_written, tried=(), policies=())
    assert [kind for _, _, kind in points(fits).values()] == ["written"]
    assert '<pre class="details">Nothing.</pre>' in plan_report_html(fits)
    assert ">fits</td>" in plan_report_html(fits)  # to the byte


def test_a_plan_whose_time_is_unknown_is_not_drawn(plan):
    unknown = replace(plan, policies=(ran(3, float("inf"), checkpointing={}), *plan.policies[1:]))
    assert [each.kind for each in plans_to_draw(unknown)].count(PlanKind.POLICY) == 1
    assert "a checkpoint every 2nd block: 6.00 GiB, 1.150x" in list(plan_chart_lines(unknown))
    assert "inf" not in plan_chart_svg(unknown)


def test_numbers_that_would_overlap_are_left_out(plan):
    beside = replace(plan.chosen.needs, bytes=plan.chosen.needs.bytes + (1 << 20))
    near = replace(plan, tried=(*plan.tried, replace(plan.chosen, needs=beside, time=1.1001)))
    assert len(re.findall(r'<text class="name', plan_chart_svg(near))) == len(points(near)) - 1


@pytest.mark.parametrize(
    ("region", "text"),
    [
        ({"modules": [""], "recompute": "tensors"}, "the whole model  tensor by tensor"),
        (
            {"modules": ["up"], "save_ops": ["aten.mm.default:0"], "split_at": ["up.1"]},
            "up  keeping aten.mm.default:0  in parts that begin at up.1",
        ),
        (
            {"modules": ["up"], "save_ops": [*(f"aten.mm.default:{each}" for each in range(6)), "aten.relu"]},
            "up  keeping 7 results: 6 of aten.mm.default, 1 of aten.relu",
        ),
    ],
)
def test_regions_are_named_with_what_they_keep_on_one_line(plan, region, text):
    chosen = replace(plan.chosen, change=Change({"checkpointing": {"regions": [region]}}))
    assert f"    {text}\n" in plan_report_html(replace(plan, chosen=chosen))


def test_rows_that_would_read_alike_name_modules_and_kept_results(plan):
    paths = ("blocks.0.mlp", "blocks.1.mlp", "blocks.10", "")
    ways = [{"modules": [path], "save_ops": ["aten.mm"]} for path in paths[:2]], [{"modules": paths}]
    one, two = (replace(plan.chosen, change=Change({"checkpointing": {"regions": way}})) for way in ways)
    table = io.StringIO()
    print_plan(replace(plan, tried=(one, one, two)), Console(file=table, width=200))
    rows = [line.split("  ")[0] for line in table.getvalue().splitlines()]
    assert rows.count("2 in part (2 blocks.*.mlp, 2 results kept)") == 2
    assert "4 modules recomputed" in rows
    assert plan_changes_in_words(two, names_modules=True).endswith("(2 blocks.*.mlp, 1 blocks.*, 1 model)")


def test_what_a_run_allocates_with_other_settings_is_simulated(plan):
    run = replace(plan.tried[0], change=Change(allocator="expandable_segments:True"))
    page = plan_report_html(replace(plan, tried=(run, *plan.tried[1:])))
    assert page.count('B <span class="provenance">simulated</span>') == 1
