"""Each view of the page in a real browser: timeline, icicle, segments, tensors."""

import pytest

from memfit.allocator.timeline import memory_timeline
from memfit.analysis.explanation import secondary_peaks
from memfit.records import Action, Category, DeviceUse, EventLabel, Figure, Phase, Provenance, TensorInfo
from support.browser import chart, check, click_at, painted, shown
from support.html_reports import (
    BACKWARD,
    FIRST,
    FRAMES,
    GIB,
    LABELS,
    MIB,
    OPTIMIZER,
    SECOND,
    SETUP,
    report,
    run,
    unpacked,
)
from support.traces import BASE, Event, freed, segment, trace_of

BLUE = (0, 114, 178)  # of parameters
GREEN = (0, 158, 115)  # of activations
VIOLET = (123, 106, 156)  # of blocks that another stream uses, on a light page


def test_shortcuts_have_buttons_flags_and_a_key(show):
    """The peak, the moments just below it, and the peak of each other phase: each has a button and a flag."""
    sizes = ((FIRST, 100), (BACKWARD, 97), (SECOND, 90), (OPTIMIZER, 30))
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
        "\N{MINUS SIGN}10.0 % forward · step 1",
        "\N{MINUS SIGN}70.0 % optimizer · step 1",
    ]
    left, width, _ = chart(page)
    marks = page.locator("#flags .near").evaluate_all(
        "all => all.map(mark => mark.getBoundingClientRect().x)"
    )
    for place, (size, event) in enumerate(((100, 1), (97, 4), (90, 7), (30, 10))):
        buttons.nth(place).click()
        assert check(page, trace, text).allocated == size * MIB
        assert page.locator("#moments [aria-pressed=true]").all_inner_texts() == [
            buttons.nth(place).inner_text()
        ]
        if place:
            moments = unpacked(text).columns["moment.event"].tolist()
            share = (moments.index(event) + 0.5) / len(moments)
            assert abs(marks[place - 1] - left - share * width) < 1
    buttons.nth(1).focus()
    page.keyboard.press("Enter")
    assert check(page, trace, text).allocated == 97 * MIB
    assert [peak.event for peak in secondary_peaks(trace, memory_timeline(trace))] == [4, 7]


def test_dragging_zooms_the_timeline(show):
    page = show(report(run(steps=20)))
    left, width, top = chart(page)
    page.mouse.move(left + 0.2 * width, top + 200)
    page.mouse.down()
    page.mouse.move(left + 0.4 * width, top + 200)
    assert page.is_visible("#flags .veil")
    page.mouse.up()
    assert not page.is_visible("#flags .veil")
    moments = page.locator("#timeline").get_attribute("aria-valuemax")
    click_at(page, 0)  # the left end is the place dragged from
    assert shown(page).moment == pytest.approx(0.2 * int(moments), abs=2)
    page.click("#whole")
    click_at(page, 0.999)
    assert shown(page).moment == int(moments)


def test_a_block_is_shown_in_all_views(show):
    """A block selected in the map is marked in the table and vice versa; the timeline shows its lifetime."""
    page = show(report(many(3_000)))
    page.focus("#table")
    page.keyboard.press("End")
    name = page.locator("#details dd").nth(1).inner_text()
    assert name == f"{BASE + 2_999 * MIB // 2:#x}"
    assert page.locator("#map .segment[aria-selected=true]").count() == 1
    assert "512.00 KiB" in page.inner_text("#block")
    life = page.locator("#flags .life").bounding_box()
    left, width, _ = chart(page)
    assert life["x"] + life["width"] == pytest.approx(left + width, abs=4)  # the last block allocated
    assert life["width"] < 5
    canvas = page.locator("#map canvas").first.bounding_box()
    page.mouse.click(canvas["x"] + (canvas["width"] - 6) * 103.5 / 4096 + 0.5, canvas["y"] + 5)
    assert page.locator("#details dd").nth(1).inner_text() == f"{BASE + 103 * MIB // 2:#x}"
    chosen = page.locator("#table .row[aria-selected=true]")
    assert chosen.get_attribute("aria-rowindex") == "105"
    table, row = page.locator("#table").bounding_box(), chosen.bounding_box()
    assert table["y"] + 26 <= row["y"]
    assert row["y"] + row["height"] <= table["y"] + table["height"]


def test_the_charts_are_drawn_to_scale(show):
    """Activations hold 32 MiB at the peak: a share of the chart's height and of their segment's length."""
    page = show(report(run()))
    _, width, _ = chart(page)
    moment, moments = shown(page).moment, len(unpacked(report(run())).columns["moment.event"])
    beside = round(58 + width * (moment + 0.75) / moments)  # the flag is in the middle
    tall = painted(page, "#timeline", GREEN, (beside, 22), (0, 1), 330)
    assert abs(tall - 330 * 32 / (1.06 * 202)) <= 2  # its first and its last pixel are blended
    width = page.locator("#map canvas").bounding_box()["width"] - 6
    long = painted(page, "#map canvas", GREEN, (0, 5), (1, 0), round(width))
    assert abs(long - width * 32 / 200) <= 8  # a line ends each of the four blocks


def test_the_table_sorts_and_searches(show):
    trace = run()
    page = show(report(trace))
    sizes = page.locator("#table .row .size").evaluate_all("cells => cells.map(cell => cell.title)")
    amounts = [int(size.removesuffix(" B").replace(",", "")) for size in sizes]
    assert amounts == sorted(amounts, reverse=True)
    page.click("text=size")
    assert page.locator("#table .row .size").first.get_attribute("title") == f"{min(amounts):,} B"
    page.click("text=name")
    page.click("text=size")  # the largest first again
    assert page.locator("#table .row .size").first.get_attribute("title") == f"{max(amounts):,} B"
    assert page.locator("[aria-sort]").all_inner_texts() == ["size"]
    page.keyboard.press("ArrowDown")  # on a heading: moves no row
    assert page.locator("#table [aria-selected=true]").count() == 0
    page.fill("#search", "weight GRAD")
    assert page.inner_text("#count").startswith("1 found")
    page.fill("#search", "nothing of this name")
    assert page.locator("#table .row").count() == 0


def test_only_rows_in_view_are_in_the_page(show):
    trace = run(steps=1, activations=20)
    rows = shown(show(report(trace), height=700)).rows
    assert rows == 23
    page = show(report(many(3_000)))
    assert shown(page).rows == 3_000
    assert page.locator("#table .row").count() < 60
    page.focus("#table")
    page.keyboard.press("End")
    last = page.locator("#table .row").last
    assert last.get_attribute("aria-rowindex") == "3001"
    table, row = page.locator("#table").bounding_box(), last.bounding_box()
    assert row["y"] + row["height"] <= table["y"] + table["height"]
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.locator("#table .row").count() == 40


def many(count):
    history = [Event(Action.SEGMENT_ALLOC, BASE, 2 * GIB)]
    history += [Event(Action.ALLOC, BASE + i * 2 * MIB // 4, MIB // 2) for i in range(count)]
    return trace_of(history)


def test_repeated_layers_are_folded(show):
    """Layers with the same parts are folded; members of a sequence, which may differ, are not."""
    sequence = [EventLabel(Phase.FORWARD, f"model.head.{i}", "", -1) for i in (0, 2)]
    owners = tuple(TensorInfo(f"model.layers.{i}.mlp", "weight", "float32", (1,)) for i in (0, 2))
    page = show(report(run(labels=(LABELS[0], *sequence, *LABELS[3:]), tensors=owners)))
    boxes = page.locator("#icicle button")
    titles = boxes.evaluate_all("boxes => boxes.map(box => box.title.split(':')[0])")
    assert {"model · layers.0,2 · mlp", "model · head · 0", "model · head · 2"} <= set(titles)
    page.uncheck("#fold")
    titles = boxes.evaluate_all("boxes => boxes.map(box => box.title.split(':')[0])")
    assert {"model · layers · 0 · mlp", "model · layers · 2 · mlp"} <= set(titles)


def test_the_device_limit_is_drawn_if_it_is_close(show):
    exact = Figure(512 * MIB, Provenance.EXACT)
    device = DeviceUse("small", exact, Figure(250 * MIB, Provenance.ASSUMED), 0)
    page = show(report(run(device=device)))
    bad = page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--bad')").strip()
    red = tuple(int(bad[i : i + 2], 16) for i in (1, 3, 5))
    assert painted(page, "#timeline", red, (0, 0), (1, 0), 300_000) > 200
    page = show(report(run()))  # 80 GiB are far off the scale
    assert painted(page, "#timeline", red, (0, 0), (1, 0), 300_000) == 0


def test_a_pixel_column_shows_its_highest_moment(show):
    trace = run(steps=200)
    text = report(trace)
    page = show(text)
    _, width, _ = chart(page)
    moments = unpacked(text).columns["moment.event"]
    level = memory_timeline(trace).allocated[moments]
    assert len(moments) > 3 * width
    for column in (40, 401, 700):
        click_at(page, (column + 0.5) / width)
        at = shown(page).moment
        first, after = column * len(moments) // width, (column + 1) * len(moments) / width
        assert first <= at < after
        assert level[at] == level[int(first) : int(-(-after // 1))].max()


def test_the_tooltip_describes_what_is_under_the_pointer(show):
    page = show(report(run()))
    left, width, top = chart(page)
    moments = int(page.locator("#timeline").get_attribute("aria-valuemax")) + 1
    at = left + width * (shown(page).moment + 0.5) / moments
    page.mouse.move(at, top + 22 + 330 - 330 * 30 / (1.06 * 202))  # at 30 of 40 MiB: in the activations
    lines = page.inner_text("#tip").splitlines()
    assert lines[:2] == [
        "40.00 MiB allocated, 202.00 MiB reserved",
        "step 1 · backward · blocks.1.fc · AddmmBackward0",
    ]
    assert lines[2] == "activations 32.00 MiB"
    assert sorted(lines[3:]) == ["16.00 MiB", "16.00 MiB", "blocks.0.fc", "blocks.1.fc"]
    page.mouse.move(at, top + 40)  # above all layers
    assert len(page.inner_text("#tip").splitlines()) == 2
    page.mouse.move(5, 5)
    assert not page.is_visible("#tip")
    row = page.locator("#map .segment").first
    row.hover(position={"x": 104 + 5, "y": 7})
    assert page.inner_text("#tip") == "4.00 MiB · parameters · weight · blocks.0.fc"
    row.hover(position={"x": row.bounding_box()["width"] - 5, "y": 7})
    assert page.inner_text("#tip") == "hole"


def test_the_segment_map_shows_every_segment(show):
    """Adjacent segments stay two; rounding and blocks awaiting another stream differ from tensors."""
    block = 20 * MIB - 600 * 1024  # the rest of the segment is not worth splitting off
    half = BASE + 20 * MIB, 10 * MIB
    history = [
        Event(Action.SEGMENT_ALLOC, BASE, 20 * MIB),
        Event(Action.SEGMENT_ALLOC, BASE + 20 * MIB, 20 * MIB),
        Event(Action.SEGMENT_ALLOC, BASE + GIB, 20 * MIB),
        Event(Action.ALLOC, BASE, block, category=Category.PARAMETER),
        Event(Action.ALLOC, *half, category=Category.PARAMETER),
        Event(Action.FREE_REQUESTED, *half),
        Event(Action.ALLOC, BASE + 30 * MIB, 4 * MIB, category=Category.PARAMETER),
        Event(Action.FREE_COMPLETED, *half),
    ]
    page = show(report(trace_of(history)))
    page.focus("#timeline")
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    rows = page.locator("#map .segment")
    assert rows.locator("[role=gridcell]").evaluate_all("all => all.map(cell => cell.ariaLabel)") == [
        "1 block",
        "2 blocks",
        "0 blocks",
    ]
    assert page.inner_text("#reserved") == (
        "3 segments · 60.00 MiB reserved · 36.00 MiB cached, of which 20.00 MiB in 1 wholly free segment"
    )
    width = round(page.locator("#map").evaluate("map => map.clientWidth") - 104 - 6)
    blue = [painted(page, "#map canvas", BLUE, (0, y), (1, 0), width) for y in (7, 22, 37)]
    assert blue == pytest.approx([width * block / (20 * MIB), width / 5, 0], abs=3)
    assert painted(page, "#map canvas", VIOLET, (0, 22), (1, 0), width) == pytest.approx(width / 2, abs=3)
    page.keyboard.press("ArrowRight")
    assert painted(page, "#map canvas", VIOLET, (0, 22), (1, 0), width) == 0


def test_adjacent_mapped_ranges_are_one_segment(show):
    history = [Event(Action.SEGMENT_MAP, BASE + start * MIB, 20 * MIB) for start in (0, 20)]
    history.append(Event(Action.ALLOC, BASE, 30 * MIB))
    whole = segment(BASE, 40 * MIB, expandable=True)
    page = show(report(trace_of(history, [whole], settings={"expandable_segments": "True", "conf": ""})))
    assert page.locator("#map .segment").all_inner_texts() == ["40.00 MiB"]


def test_a_box_is_as_wide_as_its_bytes_and_can_be_zoomed(show):
    labels = (
        LABELS[0],
        *(EventLabel(Phase.FORWARD, name, "", -1) for name in ("first", "second")),
        *LABELS[3:],
    )
    page = show(report(run(labels=labels, activations=20)), width=400)
    boxes = page.locator("#icicle button")
    widths = "boxes => boxes.map(box => [Number(box.dataset.bytes), box.getBoundingClientRect().width])"
    (whole, wide), *parts = boxes.evaluate_all(widths)
    assert len(parts) > 5
    assert min(parts)[1] < 10
    for amount, width in parts:
        assert width == pytest.approx(wide * amount / whole, abs=0.1)
    level = page.locator("#icicle [aria-level='2']")
    assert level.count() == 3
    boxes.first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Alt+ArrowDown")  # a shortcut of the browser
    assert page.evaluate("document.activeElement.getAttribute('aria-level')") == "2"
    page.keyboard.press("Enter")
    assert level.count() == 1
    assert level.bounding_box()["width"] == pytest.approx(wide, abs=1)
    boxes.first.click()
    assert level.count() == 3
