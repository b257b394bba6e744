"""The page in a real browser shows what Python computed, by mouse and by keyboard, and loads nothing."""

import numpy as np
import pytest

from memfit.allocator.timeline import memory_timeline
from memfit.api.traces import explain
from memfit.report.html.page_payload import page_payload
from support.browser import check, click_at, shown
from support.html_reports import evil, report, run, sums, unpacked
from support.traces import trace_of


def test_the_page_opens_at_the_peak_and_every_moment_is_exact(show):
    trace = run()
    text = report(trace)
    page = show(text)
    first = check(page, trace, text)
    assert first.allocated == memory_timeline(trace).allocated.max()
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


def test_a_page_with_combined_blocks_has_exact_sums(show, monkeypatch):
    trace = run(steps=6)
    monkeypatch.setitem(page_payload.__kwdefaults__, "most", 5)
    text = report(trace)
    page = show(text)
    assert "drawn together: 33 of 38" in page.inner_text("#thinned")
    check(page, trace, text)
    click_at(page, 0.4)
    check(page, trace, text)
    assert "drawn together" in page.inner_text("#count")
    page.focus("#timeline")
    page.keyboard.press("Home")
    for _ in range(40):  # at each of these, a combined block appears or disappears
        now = shown(page)
        assert now.allocated == now.table == now.icicle == sum(now.layers.values())
        page.keyboard.press("ArrowRight")


def test_hostile_names_are_text(show):
    trace = evil()
    page = show(report(trace))
    page.on("dialog", lambda dialog: pytest.fail("a name ran"))
    assert page.locator("img").count() == 0
    assert page.locator("header").bounding_box()["height"] < 450  # long text scrolls
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
        assert outline != "none", what  # the focus is visible
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
        page.keyboard.press(f"Control+{key}")  # the browser prints: the chosen moment stays
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
    assert page.locator("#icicle button[aria-level='2']").count() == 1  # only that box
    page.focus("#map")
    page.keyboard.press("ArrowRight")
    assert "MiB" in page.inner_text("#block")
    page.focus("#table")
    page.keyboard.press("End")
    assert page.locator("#table .row[aria-selected=true]").count() == 1
    assert page.locator("#details dt").count() > 4
    page.focus("#timeline")
    page.keyboard.press("Home")  # before the tensor exists
    assert page.locator("#details dt").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_every_window_size_and_colour_scheme_works(show, scheme, width):
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
    # A category has the same colour everywhere.
    for place in ("#sums", "#icicle", "#table"):
        kind = page.locator(f"{place} [data-layer=activations]").first
        assert kind.evaluate("kind => getComputedStyle(kind).backgroundColor") == "rgb(0, 158, 115)"
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") != paper


def test_print_is_light_and_has_the_table(show):
    page = show(report(run()), color_scheme="dark")
    page.emulate_media(media="print")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator("#table .row").count() == shown(page).rows
    assert not page.is_visible("#search")
    assert page.is_visible(".paper")
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") != "rgb(255, 255, 255)"


def test_a_page_that_cannot_be_drawn_shows_why(show):
    page = show(report(trace_of([])))
    assert "No allocation was recorded" in page.inner_text("#problem")
    assert not page.is_visible("#main")


def test_the_summary_is_shown_without_javascript(browser, tmp_path):
    path = tmp_path / "r.html"
    path.write_text(report(run()))
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(path.as_uri())
    assert "needs JavaScript" in page.inner_text("body") or "need JavaScript" in page.inner_text("body")
    assert "Fits" in page.inner_text("h1")
    context.close()


def test_the_page_draws_inside_a_notebook(browser, tmp_path):
    """The output of a cell is a frame in another page, and may only run scripts."""
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
    assert shown(frame).allocated == memory_timeline(run()).allocated.max()
    box = frame.locator("#timeline").bounding_box()
    page.mouse.click(box["x"] + 58 + 0.3 * (box["width"] - 66), box["y"] + 200)
    check(frame, run(), report(run()))
    assert frame.inner_text("#h-moment").lower() == "at this moment"
    assert frame.evaluate("self.origin") == "null"  # the frame cannot reach the notebook
    assert page.title() == "notebook"
    assert [url for url in requests if url != cell.as_uri() and not url.startswith("about:")] == []
    assert complaints == []
    context.close()


def test_the_policy_blocks_injected_content(browser, tmp_path):
    """A script and an image inserted into the file have no effect."""
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
    assert sum("Content Security Policy" in message for message in refused) == 2
    assert [url for url in sent if not url.startswith("file:")] == []
    context.close()


def test_the_models_sums_equal_those_of_the_columns(show):
    """The model's running sums equal sums computed from scratch."""
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
