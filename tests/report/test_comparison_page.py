"""The page of a comparison: its chart, its table, and that nothing in it runs or is loaded."""

import re

import pytest

from memfit.records import (
    ComparedRun,
    Equality,
    Figure,
    PeakRange,
    Provenance,
    StrategyComparison,
)
from memfit.report.html.comparison_page import comparison_report_html
from support.html_reports import EVIL, GIB, Elements


def row(name, gibibytes, time):
    size = gibibytes * GIB
    peak = PeakRange.exactly(size, size, size + 1)
    needs = Figure(size + 1, Provenance.ASSUMED)
    return ComparedRun(
        name, (), (), peak=peak, needs=needs, verdict="fits", time=time, equality=Equality.OTHER
    )


@pytest.fixture
def page(answer):
    runs = (
        row("as written", 8, 1.0),
        row("bf16", 4, 0.5),
        row("offload", 2, None),
        ComparedRun("2 slices", (), reason=f"Net {EVIL} meets. More."),
    )
    found = StrategyComparison(
        *(answer.device, 1, 1, runs, ("/home/ada/train.py",), {"torch": "2.14.1"}), rule="roofline"
    )
    return comparison_report_html(found)


def test_every_row_has_its_figures_and_a_bar_in_proportion(page):
    rows = re.findall(r'<tr id="plan-(\d)">(.*?)</tr>', page)
    assert [number for number, _ in rows] == ["0", "1", "2", "3"]
    for (_, text), size, time in zip(rows, (8, 4, 2), ("1.00x", "0.50x", "\N{EN DASH}"), strict=False):
        assert f'data-bytes="{size * GIB + 1}">{size}.00 GiB <span class="provenance">assumed</span>' in text
        assert f'data-bytes="{size * GIB}">' in text
        assert f'<rect width="{20 * size}.0"' in text
        assert f"<td>{time}</td><td>other numerics</td><td>fits</td>" in text
    assert rows[3][1].endswith("not possible</td>")


def test_points_are_the_rows_whose_time_is_known(page):
    assert re.findall(r'href="#plan-(\d)"><circle class="(\w+)"', page) == [("1", "tried"), ("0", "written")]
    assert ">0 as written</text>" in page


def test_the_page_needs_no_script_and_shows_texts_as_texts(page):
    assert not [tag for tag, _ in Elements(page).found if tag in ("script", "link", "img", "iframe")]
    assert "Not possible: 2 slices: Net " in page
    assert EVIL not in page
    assert "roofline" in page
    assert "~/train.py" in page
