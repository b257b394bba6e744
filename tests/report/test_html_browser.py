"""The page in a real browser: it shows what Python computed, by mouse and by keyboard, and loads nothing."""

import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from memfit.allocator.timeline import timeline
from memfit.analysis.attribution import attribute
from memfit.analysis.breakdown import held as held_at
from memfit.analysis.held import By
from memfit.analysis.nearby import below_peak
from memfit.api import explain
from memfit.records import Action, DeviceUse, Figure, Label, Phase, Provenance, Tensor
from memfit.report.html.payload import payload
from pages import (
    BACKWARD,
    FIRST,
    FRAMES,
    GIB,
    LABELS,
    MIB,
    OPTIMIZER,
    SETUP,
    evil,
    report,
    run,
    sums,
    unpacked,
)
from traces import BASE, Event, freed, trace_of

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install memfit[browser]"
)
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here (on Debian: apt-get install chromium)"
)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def show(browser, tmp_path):
    """Open a page as a file, and see afterwards that nothing was asked for and nothing complained."""
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
    assert not [one for one in complaints if "willReadFrequently" not in one]  # these tests read pixels


def shown(page):
    """Return the bytes by layer that the panel shows, its totals, and what table and icicle add up to."""
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


def computed(trace, event):
    line = timeline(trace)
    rows = held_at(trace, line, attribute(trace, line), event).rows[By.CATEGORY]
    return SimpleNamespace(
        layers={row.name: row.bytes for row in rows if row.bytes},
        allocated=int(line.allocated[event]),
        reserved=int(line.reserved[event]),
    )


def check(page, trace, text):
    """See that everything on the page that is about the moment says what Python says."""
    now = shown(page)
    event = int(unpacked(text).columns["moment.event"][now.moment])
    python = computed(trace, event)
    assert now.layers == python.layers
    assert now.allocated == now.table == now.icicle == python.allocated
    assert now.reserved == python.reserved
    assert now.cached == python.reserved - python.allocated
    return now


def click_at(page, share):
    """Click into the timeline, so far from its left end."""
    box = page.locator("#timeline").bounding_box()
    page.mouse.click(box["x"] + 58 + share * (box["width"] - 66), box["y"] + 200)


def test_it_opens_at_the_peak_and_every_click_is_exact(show):
    trace = run()
    text = report(trace)
    page = show(text)
    first = check(page, trace, text)
    assert first.allocated == timeline(trace).allocated.max()
    assert page.inner_text("#h-moment").lower() == "at the peak"
    seen = []
    for share in (0.02, 0.3, 0.42, 0.98):
        before = page.inner_html("#table"), page.inner_html("#icicle"), page.inner_text("#place")
        click_at(page, share)
        now = check(page, trace, text)
        seen.append(now.moment)
        after = page.inner_html("#table"), page.inner_html("#icicle"), page.inner_text("#place")
        assert all(old != new for old, new in zip(before, after, strict=True)), share
    assert seen == sorted(set(seen))


def test_the_moments_to_look_at_are_a_click_or_a_key_away(show):
    """The peak, what is just below it, and the most of each other phase: each has a button and a mark."""
    sizes = ((FIRST, 100), (BACKWARD, 97), (BACKWARD, 60), (OPTIMIZER, 30))
    history = [Event(Action.SEGMENT_ALLOC, BASE, 200 * MIB, label=SETUP)]
    for label, size in sizes:
        history.append(Event(Action.ALLOC, BASE, size * MIB, 0, label))
        history += freed(BASE, size * MIB, label=label)
    trace = trace_of(history, labels=LABELS, frames=FRAMES, stacks=((0,), (1, 0)))
    text = report(trace)
    page = show(text)
    buttons = page.locator("#moments button")
    assert buttons.all_inner_texts() == [
        "Peak 100.00 MiB forward · step 1",
        "\N{MINUS SIGN}3.0 % backward · step 1",
        "\N{MINUS SIGN}70.0 % optimizer · step 1",
    ]
    chart = page.locator("#flags").bounding_box()
    marks = page.locator("#flags .near").evaluate_all(
        "all => all.map(mark => mark.getBoundingClientRect().x)"
    )
    for place, (size, event) in enumerate(((100, 1), (97, 4), (30, 10))):
        buttons.nth(place).click()
        assert check(page, trace, text).allocated == size * MIB
        assert page.locator("#moments [aria-pressed=true]").all_inner_texts() == [
            buttons.nth(place).inner_text()
        ]
        if place:
            moments = unpacked(text).columns["moment.event"].tolist()
            share = (moments.index(event) + 0.5) / len(moments)
            assert abs(marks[place - 1] - chart["x"] - share * chart["width"]) < 1
    buttons.nth(1).focus()
    page.keyboard.press("Enter")
    assert check(page, trace, text).allocated == 97 * MIB
    assert below_peak(trace, timeline(trace))[0].event == 4


def test_a_stretch_of_the_timeline_is_dragged_open(show):
    page = show(report(run(steps=20)))
    box = page.locator("#timeline").bounding_box()
    at = [box["x"] + 58 + share * (box["width"] - 66) for share in (0.2, 0.4)]
    page.mouse.move(at[0], box["y"] + 200)
    page.mouse.down()
    page.mouse.move(at[1], box["y"] + 200)
    assert page.is_visible("#flags .veil")
    page.mouse.up()
    assert not page.is_visible("#flags .veil")
    moments = page.locator("#timeline").get_attribute("aria-valuemax")
    page.mouse.click(
        at[0] - 0.2 * (box["width"] - 66), box["y"] + 200
    )  # its left end is the place dragged from
    assert shown(page).moment == pytest.approx(0.2 * int(moments), abs=2)
    page.click("#whole")
    click_at(page, 0.999)
    assert shown(page).moment == int(moments)


def test_a_block_is_shown_in_all_views(show):
    """Chosen in the map it is in the table, chosen there it is in the map; its life is in the timeline."""
    page = show(report(many(3_000)))
    page.focus("#table")
    page.keyboard.press("End")
    name = page.locator("#details dd").nth(1).inner_text()
    assert name == f"{BASE + 2_999 * MIB // 2:#x}"
    assert page.locator("#map .segment[aria-selected=true]").count() == 1
    assert "512.00 KiB" in page.inner_text("#block")
    life = page.locator("#flags .life").bounding_box()
    chart = page.locator("#flags").bounding_box()
    assert life["x"] + life["width"] == pytest.approx(
        chart["x"] + chart["width"], abs=4
    )  # the last that was made
    assert life["width"] < 5
    canvas = page.locator("#map canvas").first.bounding_box()
    page.mouse.click(canvas["x"] + canvas["width"] * 100.5 / 4096, canvas["y"] + 5)
    assert page.locator("#details dd").nth(1).inner_text() == f"{BASE + 100 * MIB // 2:#x}"
    chosen = page.locator("#table .row[aria-selected=true]")
    assert chosen.get_attribute("aria-rowindex") == "102"
    table, row = page.locator("#table").bounding_box(), chosen.bounding_box()
    assert table["y"] + 26 <= row["y"]
    assert row["y"] + row["height"] <= table["y"] + table["height"]


def test_what_is_drawn_is_to_scale(show):
    """Activations hold 32 MiB at the peak: of the chart's height, and of their segment's length."""
    page = show(report(run()))
    green = """([name, x, y, dx, dy, count]) => {
      const canvas = document.querySelector(name);
      const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
      let found = 0;
      for (let i = 0; i < count; i++) {
        const at = 4 * ((y + i * dy) * canvas.width + x + i * dx);
        if (pixels.data[at] === 0 && pixels.data[at + 1] === 158 && pixels.data[at + 2] === 115) found++;
      }
      return found;
    }"""
    width = page.locator("#timeline").bounding_box()["width"] - 66
    moment, moments = shown(page).moment, len(unpacked(report(run())).columns["moment.event"])
    beside = round(58 + width * (moment + 0.75) / moments)  # the flag is in the middle
    tall = page.evaluate(green, ["#timeline", beside, 22, 0, 1, 330])
    assert abs(tall - 330 * 32 / (1.06 * 202)) <= 2  # its first and its last pixel are blended
    width = page.locator("#map canvas").bounding_box()["width"] - 6
    long = page.evaluate(green, ["#map canvas", 0, 5, 1, 0, round(width)])
    assert abs(long - width * 32 / 200) <= 6  # a line ends each of the four blocks


def test_a_thinned_page_says_so_and_sums_are_exact(show, monkeypatch):
    trace = run(steps=6)
    monkeypatch.setitem(payload.__kwdefaults__, "most", 5)
    text = report(trace)
    page = show(text)
    assert "drawn together: 33 of 38" in page.inner_text("#thinned")
    check(page, trace, text)
    click_at(page, 0.4)
    check(page, trace, text)
    assert "drawn together" in page.inner_text("#count")


def test_hostile_names_are_text(show):
    trace = evil()
    page = show(report(trace))
    page.on("dialog", lambda dialog: pytest.fail("a name ran"))
    assert page.locator("img").count() == 0
    assert page.locator("header").bounding_box()["height"] < 450  # what is long scrolls
    for name in ("line", "op", "module"):
        page.click(f"[data-by={name}]")
    page.fill("#search", "evil")
    page.focus("#table")
    page.keyboard.press("ArrowDown")
    details = page.inner_text("#details")
    assert "\\u202eevil" in details
    assert "caf\\udce9.py" in details
    assert "x" * 10_000 in details  # in full
    assert max(map(len, page.locator("#table .cell").all_inner_texts())) < 200
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_the_keyboard_reaches_everything(show):
    trace = run()
    text = report(trace)
    page = show(text)
    reached = []
    for _ in range(60):
        page.keyboard.press("Tab")
        what = page.evaluate("(document.activeElement.id || document.activeElement.textContent).trim()")
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        if what in reached:
            break
        assert outline != "none", what  # where the focus is can be seen
        reached.append(what)
    for needed in (
        "theme",
        "Peak 40.00 MiB backward · step 1",
        "whole",
        "timeline",
        "module",
        "fold",
        "map",
        "search",
        "table",
        "size",
    ):
        assert needed in reached, needed
    page.focus("#timeline")
    at = shown(page).moment
    page.keyboard.press("ArrowLeft")
    assert check(page, trace, text).moment == at - 1
    page.keyboard.press("Home")
    assert check(page, trace, text).moment == 0
    for key in ("p", "P"):
        page.keyboard.press("Home")
        page.keyboard.press(f"Control+{key}")  # the browser's own: paper has the moment that is chosen
        assert shown(page).moment == 0
        page.keyboard.press(key)
        assert check(page, trace, text).moment == at
    slider = page.locator("#timeline")
    assert slider.get_attribute("role") == "slider"
    assert "allocated" in slider.get_attribute("aria-valuetext")
    page.focus("#icicle button[tabindex='0']")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.getAttribute('aria-level')") == "2"
    page.keyboard.press("Enter")
    assert page.locator("#icicle button[aria-level='2']").count() == 1  # it alone
    page.focus("#map")
    page.keyboard.press("ArrowRight")
    assert "MiB" in page.inner_text("#block")
    page.focus("#table")
    page.keyboard.press("End")
    assert page.locator("#table .row[aria-selected=true]").count() == 1
    assert page.locator("#details dt").count() > 4


def test_the_table_sorts_and_searches(show):
    trace = run()
    page = show(report(trace))
    sizes = page.locator("#table .row .size").evaluate_all("cells => cells.map(cell => cell.title)")
    amounts = [int(size.removesuffix(" B").replace(",", "")) for size in sizes]
    assert amounts == sorted(amounts, reverse=True)
    page.click("text=size")
    assert page.locator("#table .row .size").first.get_attribute("title") == f"{min(amounts):,} B"
    page.fill("#search", "weight GRAD")
    assert page.inner_text("#count").startswith("1 found")
    page.fill("#search", "nothing of this name")
    assert page.locator("#table .row").count() == 0


def test_many_rows_are_not_all_in_the_page(show):
    trace = run(steps=1, activations=20)
    rows = shown(show(report(trace), height=700)).rows
    assert rows == 23
    page = show(report(many(3_000)))
    assert shown(page).rows == 3_000
    assert page.locator("#table .row").count() < 60
    page.focus("#table")
    page.keyboard.press("End")
    assert page.locator("#table .row").last.get_attribute("aria-rowindex") == "3001"


def many(count):
    history = [Event(Action.SEGMENT_ALLOC, BASE, 2 * GIB)]
    history += [Event(Action.ALLOC, BASE + i * 2 * MIB // 4, MIB // 2) for i in range(count)]
    return trace_of(history)


def test_layers_that_repeat_are_folded(show):
    """Layers with the same parts are; those of a sequence, which may be of any kind, are not."""
    sequence = [Label(Phase.FORWARD, f"model.head.{i}", "", -1) for i in (0, 2)]
    owners = tuple(Tensor(f"model.layers.{i}.mlp", "weight", "float32", (1,)) for i in (0, 2))
    page = show(report(run(labels=(LABELS[0], *sequence, *LABELS[3:]), tensors=owners)))
    boxes = page.locator("#icicle button")
    said = boxes.evaluate_all("boxes => boxes.map(box => box.title.split(':')[0])")
    assert {"model · layers.0,2 · mlp", "model · head · 0", "model · head · 2"} <= set(said)
    page.uncheck("#fold")
    said = boxes.evaluate_all("boxes => boxes.map(box => box.title.split(':')[0])")
    assert {"model · layers · 0 · mlp", "model · layers · 2 · mlp"} <= set(said)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_any_window_and_either_scheme(show, scheme, width):
    page = show(report(run()), width=width, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    paper = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
    # The charts are drawn: more than one colour in each.
    for name in ("#timeline", "#map canvas"):
        colours = page.evaluate(
            "name => { const c = document.querySelector(name); const d = c.getContext('2d')"
            ".getImageData(0, 0, c.width, c.height).data; const found = new Set();"
            " for (let i = 0; i < d.length; i += 4) found.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]);"
            " return found.size }",
            name,
        )
        assert colours > 5
    # What stands for a kind has its colour, wherever it is.
    for place in ("#sums", "#icicle", "#table"):
        kind = page.locator(f"{place} [data-layer=activations]").first
        assert kind.evaluate("kind => getComputedStyle(kind).backgroundColor") == "rgb(0, 158, 115)"
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") != paper


def test_paper_is_light_and_has_the_table(show):
    page = show(report(run()), color_scheme="dark")
    page.emulate_media(media="print")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator("#table .row").count() == shown(page).rows
    assert not page.is_visible("#search")
    assert page.is_visible(".paper")
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") != "rgb(255, 255, 255)"


def test_the_room_on_the_device_is_drawn_where_it_matters(show):
    exact = Figure(512 * MIB, Provenance.EXACT)
    device = DeviceUse("small", exact, Figure(250 * MIB, Provenance.ASSUMED), 0)
    page = show(report(run(device=device)))
    bad = page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--bad')").strip()
    red = tuple(int(bad[i : i + 2], 16) for i in (1, 3, 5))

    def drawn():
        return page.evaluate(
            "([r, g, b]) => { const c = document.getElementById('timeline'); const d = c.getContext('2d')"
            ".getImageData(0, 0, c.width, c.height).data; let n = 0; for (let i = 0; i < d.length; i += 4)"
            " if (d[i] === r && d[i + 1] === g && d[i + 2] === b) n++; return n }",
            red,
        )

    assert drawn() > 200
    page = show(report(run()))  # 80 GiB are far off the scale
    assert drawn() == 0


def test_what_cannot_be_drawn_is_said(show):
    page = show(report(trace_of([])))
    assert "No allocation was recorded" in page.inner_text("#problem")
    assert not page.is_visible("#main")


def test_without_script_the_answer_is_there(browser, tmp_path):
    path = tmp_path / "r.html"
    path.write_text(report(run()))
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(path.as_uri())
    assert "needs JavaScript" in page.inner_text("body") or "need JavaScript" in page.inner_text("body")
    assert "Fits" in page.inner_text("h1")
    context.close()


def test_it_draws_inside_a_notebook(browser, tmp_path):
    """A cell's output: a frame that may run its script and nothing else, in a page that others wrote."""
    cell = tmp_path / "notebook.html"
    cell.write_text(f"<!doctype html><title>notebook</title>{explain(run())._repr_html_()}")
    context = browser.new_context(viewport={"width": 1000, "height": 950})
    page = context.new_page()
    complaints, requests = [], []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(cell.as_uri())
    (frame,) = page.main_frame.child_frames
    frame.wait_for_selector("html[data-ready]")
    assert shown(frame).allocated == timeline(run()).allocated.max()
    box = frame.locator("#timeline").bounding_box()
    page.mouse.click(box["x"] + 58 + 0.3 * (box["width"] - 66), box["y"] + 200)
    check(frame, run(), report(run()))
    assert frame.inner_text("#h-moment").lower() == "at this moment"
    assert frame.evaluate("self.origin") == "null"  # what is the notebook's is out of its reach
    assert page.title() == "notebook"
    assert [url for url in requests if url != cell.as_uri() and not url.startswith("about:")] == []
    assert complaints == []
    context.close()


def test_the_policy_holds(browser, tmp_path):
    """A script and an image that were put into the file have no effect."""
    path = tmp_path / "r.html"
    injected = "<script>document.title = 'run'</script><img src='http://127.0.0.1:9/x.png'>"
    path.write_text(report(run()).replace("</main>", f"</main>{injected}"))
    context = browser.new_context()
    page = context.new_page()
    refused = []
    page.on("console", lambda message: refused.append(message.text))
    sent = []
    page.on("requestfinished", lambda request: sent.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready]")
    assert page.title() != "run"
    assert sum("Content Security Policy" in one for one in refused) == 2
    assert [url for url in sent if not url.startswith("file:")] == []
    context.close()


def test_sums_are_those_of_the_columns(show):
    """The model's own walk and checkpoints agree with sums made from scratch, far from any checkpoint."""
    trace = run(steps=200)
    text = report(trace)
    held = unpacked(text)
    page = show(text)
    last = len(held.columns["moment.event"]) - 1
    for moment in np.linspace(0, last, 5).astype(int):
        click_at(page, (moment + 0.5) / (last + 1))
        now = shown(page)
        assert now.layers == sums(held, now.moment)
        assert now.table == now.icicle == now.allocated == sum(now.layers.values())
