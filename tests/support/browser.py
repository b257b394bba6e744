"""Open reports in a real browser, click in them, and read what they show."""

import os
import shutil
from types import SimpleNamespace

import pytest

from memfit.allocator.timeline import memory_timeline
from memfit.analysis.attribution import attribute_allocations
from memfit.analysis.breakdown import breakdown_at
from memfit.records import GroupBy
from support.html_reports import unpacked

LEFT, RIGHT, TOP = 58, 8, 22  # pixels around the timeline's chart


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install memfit[browser]"
    )
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium here (on Debian: apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def show(browser, tmp_path):
    """Open a page as a file, and check afterwards that it requested nothing and logged no error."""
    contexts, requests, complaints = [], [], []

    def opened(text, width=1280, height=900, **options):
        path = tmp_path / f"report {len(contexts)}.html"
        path.write_text(text)
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]", timeout=20_000)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert len(requests) == len(contexts), requests  # the files themselves
    assert not [text for text in complaints if "willReadFrequently" not in text]  # these tests read pixels


def shown(page):
    """Return the panel's bytes per layer and its totals, and the sums of the table and the icicle."""
    rows = page.eval_on_selector_all(
        "#sums tr", "rows => rows.map(row => [row.dataset.row, Number(row.dataset.bytes)])"
    )
    panel = dict(rows)
    totals = {name: panel.pop(name) for name in ("allocated", "cached", "reserved")}
    count = page.locator("#count").evaluate("element => ({...element.dataset})")
    return SimpleNamespace(
        layers={name: size for name, size in panel.items() if size},
        **totals,
        table=sum(int(count[name]) for name in ("requested", "rounding", "together")),
        rows=int(count["rows"]),
        icicle=int(page.locator("#icicle button").first.get_attribute("data-bytes")),
        moment=int(page.locator("#timeline").get_attribute("aria-valuenow")),
    )


def check(page, trace, text):
    """Check that all figures the page shows for the current moment equal those that Python computes."""
    now = shown(page)
    event = int(unpacked(text).columns["moment.event"][now.moment])
    line = memory_timeline(trace)
    rows = breakdown_at(trace, line, attribute_allocations(trace, line), event).rows[GroupBy.CATEGORY]
    assert now.layers == {row.name: row.bytes for row in rows if row.bytes}
    assert now.allocated == now.table == now.icicle == line.allocated[event]
    assert now.reserved == line.reserved[event]
    assert now.cached == line.reserved[event] - line.allocated[event]
    return now


def chart(page):
    """Return the left edge and width of the timeline's chart, and the canvas's top edge, in pixels."""
    box = page.locator("#timeline").bounding_box()
    return box["x"] + LEFT, box["width"] - LEFT - RIGHT, box["y"]


def click_at(page, share):
    """Click in the timeline, at a share of its width from the left."""
    left, width, top = chart(page)
    page.mouse.click(left + share * width, top + 200)


def painted(page, name, colour, at, step, count):
    """Count the pixels of a colour among ``count`` samples of a canvas, from ``at`` in steps of ``step``."""
    return page.evaluate(
        """([name, [red, green, blue], [x, y], [dx, dy], count]) => {
          const canvas = document.querySelector(name);
          const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
          let found = 0;
          for (let i = 0; i < count; i++) {
            const at = 4 * ((y + i * dy) * canvas.width + x + i * dx);
            if (data[at] === red && data[at + 1] === green && data[at + 2] === blue) found++;
          }
          return found;
        }""",
        [name, colour, at, step, count],
    )
