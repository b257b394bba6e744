"""What the page says about its charts: failed allocations, equal segments, legends, headings, the theme."""

import pytest

from memfit.records import Action, Category, DeviceUse, EventLabel, Figure, Phase, Provenance, ScriptEnd
from support.browser import TOP, chart, shown
from support.html_reports import Elements, report, run
from support.traces import BASE, Event, trace_of

MIB, GIB = 1 << 20, 1 << 30
HEIGHT = 330  # pixels of the timeline's chart
EXACT = Provenance.EXACT


def failing(requested=300 * MIB, then=(), **fields):
    """Return a run that has reserved 800 of 1000 MiB, and fails to get more."""
    history = [
        *(Event(Action.SEGMENT_ALLOC, BASE + i * GIB, 400 * MIB) for i in range(2)),
        Event(Action.ALLOC, BASE, 400 * MIB, label=0, category=Category.ACTIVATION),
        Event(Action.OOM, 200 * MIB, requested, label=0),
        *then,
    ]
    device = DeviceUse("small", Figure(1000 * MIB, EXACT), Figure(0, EXACT), 0)
    return trace_of(
        history,
        device=device,
        end=ScriptEnd("out of memory", 1),
        labels=(EventLabel(Phase.FORWARD, "head", "", -1),),
        **fields,
    )


def scale(page, amount, most, share=1.13):
    """Return where the timeline shows an amount, in pixels from the canvas's top edge."""
    return TOP + HEIGHT * (1 - amount / (share * most))


def test_a_failed_allocation_is_a_block_through_the_limit(show):
    page = show(report(failing()))
    left, width, top = chart(page)
    block = page.locator("#flags .failure").bounding_box()
    assert block["y"] - top == pytest.approx(scale(page, 1100 * MIB, 1100 * MIB), abs=1.5)
    assert block["y"] + block["height"] - top == pytest.approx(scale(page, 800 * MIB, 1100 * MIB), abs=1.5)
    limit = top + scale(page, 1000 * MIB, 1100 * MIB)
    assert block["y"] < limit < block["y"] + block["height"]
    assert block["x"] + block["width"] == pytest.approx(left + width, abs=1.5)  # its moment is the last
    words = "out of memory: needs 300.00 MiB, 200.00 MiB available"
    assert page.inner_text("#flags .failure") == words
    assert "repeating-linear-gradient" in page.locator("#flags .failure").evaluate(
        "block => getComputedStyle(block).backgroundImage"
    )
    page.mouse.move(block["x"] + 5, block["y"] + 5)
    assert page.inner_text("#tip").splitlines() == [
        words,
        "step 1 · forward · head",
        "314,572,800 B needed, 209,715,200 B available",
    ]
    page.mouse.move(block["x"] - 30, block["y"] + 5)
    assert "out of memory" not in page.inner_text("#tip")
    page.focus("#timeline")
    page.keyboard.press("End")
    assert page.get_attribute("#timeline", "aria-valuetext").endswith(words)
    page.keyboard.press("Home")
    assert "out of memory" not in page.get_attribute("#timeline", "aria-valuetext")


def test_a_failed_allocation_that_is_far_larger_is_cut(show):
    page = show(report(failing(requested=900 * GIB)))
    block, (_, _, top) = page.locator("#flags .failure").bounding_box(), chart(page)
    assert block["y"] == pytest.approx(top, abs=1.5)
    assert block["height"] > 100
    assert "needs 900.00 GiB" in page.inner_text("#flags .failure")


def test_of_several_failures_the_last_is_labelled_and_hidden_ones_do_not_count(show):
    more = [Event(Action.ALLOC, BASE + GIB + i * MIB, MIB, label=0) for i in range(60)]
    page = show(report(failing(then=[*more, Event(Action.OOM, 200 * MIB, 250 * MIB, label=0)])))
    assert page.locator("#flags .failure").all_inner_texts() == [
        "",
        "out of memory: needs 250.00 MiB, 200.00 MiB available",
    ]
    page.focus("#timeline")
    page.keyboard.press("Home")
    for _ in range(4):
        page.keyboard.press("+")
    assert [one.is_visible() for one in page.locator("#flags .failure").all()] == [True, False]


def equal_segments(count=96):
    """Return a run with equal segments, and one of the same size whose block is smaller."""
    made = [(BASE + i * GIB, 72 * MIB) for i in range(count)] + [(BASE + count * GIB, 70 * MIB)]
    history = [Event(Action.SEGMENT_ALLOC, address, 72 * MIB) for address, _ in made]
    history += [Event(Action.ALLOC, *one, category=Category.ACTIVATION) for one in made]
    return trace_of(history)


def test_equal_segments_share_a_row(show):
    page = show(report(equal_segments()))
    rows = page.locator("#map .segment")
    assert rows.all_inner_texts() == ["72.00 MiB \N{MULTIPLICATION SIGN} 96", "72.00 MiB"]
    assert rows.first.locator("[role=gridcell]").get_attribute("aria-label") == (
        "1 block in each of 96 equal segments"
    )
    assert page.inner_text("#reserved").startswith("97 segments · 6.82 GiB reserved")
    assert page.get_attribute("#map", "aria-rowcount") == "3"
    rows.first.hover(position={"x": 200, "y": 7})
    assert page.inner_text("#tip") == "the first of 96 equal segments: 72.00 MiB · activations"


def test_each_block_of_equal_segments_can_be_reached(show):
    page = show(report(equal_segments(3)))
    page.focus("#map")
    page.keyboard.press("ArrowDown")
    address = page.locator("#details dd").nth(1)
    for segment in (0, 1, 2, 2):
        assert address.inner_text() == f"{BASE + segment * GIB:#x}"
        assert page.locator("#map [aria-selected=true]").inner_text() == "72.00 MiB \N{MULTIPLICATION SIGN} 3"
        page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert address.inner_text() == f"{BASE + 3 * GIB:#x}"
    page.keyboard.press("ArrowUp")
    assert address.inner_text() == f"{BASE:#x}"


def test_the_charts_have_legends_and_an_axis_title(show):
    page = show(report(run()))
    assert page.locator("#phases span").all_inner_texts() == ["setup", "forward", "backward", "optimizer"]
    colours = page.locator("#phases i").evaluate_all(
        "all => all.map(one => getComputedStyle(one).backgroundColor)"
    )
    assert len({*colours}) == 4
    assert "allocator events, not time" in page.inner_text(".axis")
    assert page.locator(".scale + .legend span").all_inner_texts() == [
        "allocated",
        "cached, not allocated",
        "CUDA context",
    ]
    bar = page.locator(".scale rect").evaluate_all(
        "all => all.filter(one => one.getBoundingClientRect().width).map(one => getComputedStyle(one).fill)"
    )
    keys = page.locator(".scale + .legend i").evaluate_all(
        "all => all.map(one => getComputedStyle(one).backgroundColor)"
    )
    assert keys == bar


def test_the_capacity_is_in_the_legend_only_if_it_is_exceeded():
    tiny = DeviceUse("tiny", Figure(16 * MIB, EXACT), Figure(MIB, EXACT), 2 * MIB)
    assert "in use by otherscapacity" in Elements(report(run(device=tiny))).text
    assert 'class="is-capacity"' not in report(run())


def test_headings_are_in_plain_words():
    text = report(run())
    for heading in ("Memory over the run", "By module, line or op", "Allocator segments", "Live tensors"):
        assert f">{heading}</h2>" in text


def test_the_theme_is_a_button_that_says_what_it_does(show):
    page = show(report(run()), color_scheme="light")
    button = page.get_by_role("button", name="Dark theme")
    assert button.evaluate("one => getComputedStyle(one).borderTopWidth") == "1px"
    button.press("Enter")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.get_by_role("button", name="Light theme").press("Enter")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    (before,) = [
        attributes for _, attributes in Elements(report(run())).found if attributes.get("id") == "theme"
    ]
    assert "hidden" in before  # without JavaScript it could do nothing
    assert shown(page).rows
