"""Lifetimes from requests: one group per stream and pool, rounded sizes, and one step in circular time."""

import numpy as np

from memfit.allocator.requests import AllocatorRequests, RequestKind
from memfit.packing.allocation_lifetimes import buffers_of_repeating_step, buffers_of_requests, last_full_step
from memfit.packing.buffer_lifetimes import Buffers, lifetime_sections


def requests_of(*rows, pools=((0, 0),)):
    found = AllocatorRequests(pools=pools)
    for event, (kind, block, size, *where) in enumerate(rows):
        found.add(kind, 10 * event, block, size, *where)
    return found


def columns(buffers):
    return list(
        zip(buffers.names, buffers.lower.tolist(), buffers.upper.tolist(), buffers.size.tolist(), strict=True)
    )


def test_the_example_of_the_module_docstring():
    found = buffers_of_requests(
        requests_of(
            (RequestKind.MALLOC, 0, 1),
            (RequestKind.MALLOC, 1, 512),
            (RequestKind.MALLOC, 2, 513),
            (RequestKind.FREE, 0, 0),
            (RequestKind.FREE_LATER, 1, 0),
            (RequestKind.GONE_ON, 1, 0),
            (RequestKind.STEP, -1, 0),
        )
    )
    assert list(found) == [(0, 0)]
    assert columns(found[0, 0]) == [("0", 0, 3, 512), ("10", 1, 5, 512), ("20", 2, 7, 1024)]


def test_each_stream_and_pool_is_a_group():
    found = buffers_of_requests(
        requests_of(
            (RequestKind.MALLOC, 0, 512),
            (RequestKind.MALLOC, 1, 512, 1),
            (RequestKind.MALLOC, 2, 512, 1, 1),
            (RequestKind.FREE, 1, 0),
            (RequestKind.MALLOC, 3, 512),
            pools=((0, 0), (1, 0)),
        )
    )
    assert {group: len(buffers) for group, buffers in found.items()} == {(0, 0): 2, (1, 0): 1, (1, 1): 1}
    assert columns(found[1, 0]) == [("10", 1, 3, 512)]


def test_a_failed_malloc_is_not_a_buffer():
    found = buffers_of_requests(requests_of((RequestKind.FAILED, -1, 512), (RequestKind.MALLOC, 0, 512)))
    assert columns(found[0, 0]) == [("10", 1, 2, 512)]


def test_without_requests_there_are_no_buffers():
    assert buffers_of_requests(requests_of((RequestKind.STEP, -1, 0))) == {}


def test_the_last_full_step_is_found():
    step = (RequestKind.STEP, -1, 0)
    assert last_full_step(requests_of((RequestKind.MALLOC, 0, 512), step)) is None
    assert last_full_step(
        requests_of(step, (RequestKind.MALLOC, 0, 512), step, (RequestKind.FREE, 0, 0))
    ) == (
        2,
        0,
        2,
    )


def test_one_step_as_drawn_in_its_docstring():
    """Step 3 is [100, 200); buffers of only step 2 or 4 are not part of it."""
    rows = {
        "weight": (0, 300),
        "gradient of step 2": (60, 110),
        "gradient of step 3": (160, 210),
        "activation": (120, 150),
        "loss of step 2": (40, 145),
        "loss of step 3": (140, 245),
        "of step 2": (70, 100),
        "of step 4": (200, 220),
        "kept from step 1": (5, 130),
        "kept from step 3": (170, 290),
    }
    sizes = {"gradient": 2, "loss": 3, "kept": 5}
    size = [next((s for start, s in sizes.items() if name.startswith(start)), 1) for name in rows]
    lower, upper = np.array(list(rows.values())).T
    found = buffers_of_repeating_step(Buffers(lower, upper, np.array(size), tuple(rows)), 100, 200)
    lives = dict(zip(found.names, zip(found.lower.tolist(), found.upper.tolist(), strict=True), strict=True))
    assert lives == {
        "weight": (0, 100),
        "gradient of step 3": (60, 110),  # wraps around to 10 of the next step
        "activation": (20, 50),
        "loss of step 2": (0, 100),
        "loss of step 3": (0, 100),
        "kept from step 3": (70, 130),
    }
    assert found.period == 100
    assert (
        lifetime_sections(found).bound == 1 + 2 + 3 + 3 + 5
    )  # the activation is freed before the gradient exists


def test_a_buffer_without_a_counterpart_keeps_its_recorded_lifetime():
    rows = Buffers(np.array([50, 150]), np.array([130, 290]), np.array([4, 5]), ("old", "new"))
    found = buffers_of_repeating_step(rows, 100, 200)
    assert columns(found) == [("old", 0, 30, 4), ("new", 50, 100, 5)]


def test_counterparts_are_paired_in_order():
    """The first buffer left by the previous step pairs with the first of this step; they may touch."""
    lower, upper = np.array([60, 70, 110, 130]), np.array([110, 130, 220, 230])
    rows = Buffers(lower, upper, np.array([4, 4, 4, 4]), ("old a", "old b", "a", "b"))
    found = buffers_of_repeating_step(rows, 100, 200)
    assert columns(found) == [("a", 10, 110, 4), ("b", 30, 130, 4)]
