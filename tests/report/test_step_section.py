"""Where the time of a step goes, in the page: a chart of host and streams, and tables."""

import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from memfit.analysis.dry_run_result import dry_run_of_trace
from memfit.records import HostUnits, MachineKind, Operand, Operation, WholeStep
from memfit.report.html.step_section import _COLUMNS, _LEVELS, _bars, _Lane
from memfit.timing.step_time import simulated_step_of_trace
from support.html_reports import BACKWARD, EVIL, FIRST, LABELS, OPTIMIZER, Elements, report, run


def operation(name, size, stream=0, *, waits=False):
    square = Operand((size, size), "float32")
    fields = -1, -1, (), (), (), 0, 0, "float32", False, 0.0, 0
    more = {"operands": (square, square), "results": (square,), "launches": 1}
    return Operation(name, *fields, **more, stream=stream, waits=waits)


PRODUCT, SUM, ASIDE = (
    operation("aten.mm.default", 2048),
    operation("aten.add.Tensor", 4096),
    operation("aten.add.Tensor", 4096, 7),
)


def timed(order=(0, 1, 2, 0), labels=(FIRST, FIRST, BACKWARD, OPTIMIZER), host=None, **fields):
    """Return a run with a step of two products, with a sum between them and one beside them."""
    host = host or HostUnits(operations=10)
    return run(step=WholeStep((PRODUCT, SUM, ASIDE), order, labels, host), **fields)


def section(text):
    return text[text.index('id="s-step"') : text.index("<footer>")]


def test_the_page_has_the_time_its_range_and_what_each_part_rests_on():
    trace = timed()
    time = dry_run_of_trace(trace).step_time
    page = Elements(section(report(trace)))
    assert "A step takes about" in page.text
    assert [kind.name for kind in time.kinds] == ["product", "pointwise"]
    share = time.kinds[0].seconds / sum(kind.seconds for kind in time.kinds)
    assert f"{share:.1%}" in page.text
    assert "fitted to measurements of this card" in page.text
    names = re.findall(r'<th scope="row">(.*?)</th>', section(report(trace)))
    assert names == ["matrix products", "elementwise", "blocks.0-1.fc", "(outside modules)"]
    assert re.findall(r"<span>([\w ]+) <small>", section(report(trace))) == ["host", "stream 0", "stream 7"]


def test_repeated_layers_are_one_row_and_short_ones_are_the_rest():
    modules = [f"blocks.{n}.{part}" for n in range(3) for part in ("fc", "norm")]
    modules += [f"part{letter}" for letter in "abcdefghijklmnop"]
    labels = tuple(replace(LABELS[FIRST], module=module) for module in modules)
    step = WholeStep((PRODUCT,), (0,) * len(labels), tuple(range(len(labels))), HostUnits())
    text = section(report(run(step=step, labels=(*LABELS, *labels)[-len(labels) :])))
    names = re.findall(r'<th scope="row">(.*?)</th>', text)[1:]
    assert names[:2] == ["blocks.0-2.fc", "blocks.0-2.norm"]
    assert len(names) == 13
    assert names[-1] == "the rest"


def test_a_step_without_a_time_says_why_and_a_real_run_says_nothing():
    text = section(report(run()))
    assert "No time of a step: the second training step was not recorded." in text
    assert "<svg" not in text
    device = replace(run().device, machine=MachineKind.CARD)
    assert 'id="s-step"' not in report(run(device=device))


def test_hostile_names_are_text():
    labels = tuple(replace(label, module=f"{EVIL}.fc") for label in LABELS)
    plain, evil = (Elements(section(report(each))) for each in (timed(), replace(timed(), labels=labels)))
    assert {tag for tag, _ in evil.found} == {tag for tag, _ in plain.found}
    assert "</script><script>alert(1)</script>" in evil.text
    assert "\x1b" not in evil.text


def test_many_kernels_make_the_page_no_larger():
    few, many = (timed((0, 1, 2) * n, (FIRST,) * 3 * n) for n in (400, 40_000))
    assert len(section(report(many))) < len(section(report(few))) + 4096 < 100_000


@pytest.mark.parametrize("seed", range(20))
def test_bars_have_the_area_of_the_work(seed):
    """Nothing overlaps; what begins before the step is drawn at its end."""
    random = np.random.default_rng(seed)
    count = random.integers(1, 30)
    gaps, seconds, kinds = random.random(count) ** 4, random.random(count), random.integers(0, 3, count)
    whole = float(gaps.sum() + seconds.sum()) + 1.0
    begin = np.cumsum(gaps) + np.cumsum(seconds) - seconds - 0.3 * whole
    lane = _Lane("stream 0", begin, seconds, [f"kind {kind}" for kind in kinds])
    bars = list(_bars(lane, list(dict.fromkeys(lane.names)), whole))
    assert all(left + width <= right for (left, width, *_), (right, *_) in pairwise(bars))
    area = sum(width * level for _, width, _, level in bars) / (_COLUMNS * _LEVELS)
    # A height is rounded up, where something begins or ends, and where several are in one column.
    assert seconds.sum() / whole - 0.01 <= area <= seconds.sum() / whole + 2 * (count + 1) / _COLUMNS


def test_the_host_is_drawn_from_the_beginning_unless_it_waits():
    free = simulated_step_of_trace(timed(host=HostUnits(operations=1)))
    assert free.timeline.issued[0] < 0  # far ahead of the GPU
    first = re.search(r'aria-label="host.*?d="M(\d+)', section(report(timed(host=HostUnits(operations=1)))))
    assert first[1] == "0"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_chart_shows_what_runs_when(show, scheme):
    trace = timed()
    simulated = simulated_step_of_trace(trace)
    page = show(report(trace), color_scheme=scheme)
    page.locator("#s-step").scroll_into_view_if_needed()
    boxes = [svg.bounding_box() for svg in page.locator("#s-step svg").all()]
    assert len(boxes) == 3

    def what(box, moment):
        """Return the title of what is drawn at the bottom of a row."""
        x = box["x"] + box["width"] * moment / simulated.timeline.seconds
        title = "document.elementFromPoint(x, y).closest('path')?.textContent ?? ''"
        return page.evaluate(f"([x, y]) => {title}", [x, box["y"] + box["height"] - 2])

    starts, queue = simulated.timeline.starts, simulated.queue
    for row, names in (
        (1, {0: "matrix products", 1: "elementwise", 3: "matrix products"}),
        (2, {2: "elementwise"}),
    ):
        for place, name in names.items():
            middle = (starts[place] + queue[place].seconds / 2) % simulated.timeline.seconds
            assert what(boxes[row], middle) == name
    assert what(boxes[2], (starts[2] - queue[2].seconds) % simulated.timeline.seconds) == ""
    colours = {
        svg.evaluate("path => getComputedStyle(path).fill") for svg in page.locator("#s-step path").all()
    }
    assert {"rgb(0, 114, 178)", "rgb(230, 159, 0)"} <= colours
    assert not {"rgb(0, 0, 0)", "none"} & colours


def test_the_tables_fit_a_narrow_window(show):
    page = show(report(timed()), width=360)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
