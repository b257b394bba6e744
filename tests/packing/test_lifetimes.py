"""Lives read from what a script asked: streams and pools apart, sizes as blocks are, one step as a circle."""

import numpy as np

from memfit.allocator.requests import RequestKind, Requests
from memfit.packing.buffers import Buffers, sections
from memfit.packing.lifetimes import last_step, lifetimes, one_step


def asked(*rows, pools=((0, 0),)):
    found = Requests(pools=pools)
    for event, (ask, block, size, *where) in enumerate(rows):
        found.add(ask, 10 * event, block, size, *where)
    return found


def columns(buffers):
    return list(
        zip(buffers.names, buffers.lower.tolist(), buffers.upper.tolist(), buffers.size.tolist(), strict=True)
    )


def test_the_picture_in_the_docstring():
    found = lifetimes(
        asked(
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


def test_streams_and_pools_are_apart():
    found = lifetimes(
        asked(
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


def test_a_malloc_that_failed_is_no_buffer():
    found = lifetimes(asked((RequestKind.FAILED, -1, 512), (RequestKind.MALLOC, 0, 512)))
    assert columns(found[0, 0]) == [("10", 1, 2, 512)]


def test_nothing_asked_is_nothing_to_pack():
    assert lifetimes(asked((RequestKind.STEP, -1, 0))) == {}


def test_the_last_full_step():
    step = (RequestKind.STEP, -1, 0)
    assert last_step(asked((RequestKind.MALLOC, 0, 512), step)) is None
    assert last_step(asked(step, (RequestKind.MALLOC, 0, 512), step, (RequestKind.FREE, 0, 0))) == (2, 0, 2)


def test_one_step_as_the_docstring_draws_it():
    """Step 3 is [100, 200); what is of step 2 or 4 alone is no part of it."""
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
    found = one_step(Buffers(lower, upper, np.array(size), tuple(rows)), 100, 200)
    lives = dict(zip(found.names, zip(found.lower.tolist(), found.upper.tolist(), strict=True), strict=True))
    assert lives == {
        "weight": (0, 100),
        "gradient of step 3": (60, 110),  # from here over the end to the next step's 10
        "activation": (20, 50),
        "loss of step 2": (0, 100),
        "loss of step 3": (0, 100),
        "kept from step 3": (70, 130),
    }
    assert found.period == 100
    assert sections(found).bound == 1 + 2 + 3 + 3 + 5  # the activation is gone when the gradient comes


def test_what_has_no_twin_lives_as_far_as_it_is_seen():
    rows = Buffers(np.array([50, 150]), np.array([130, 290]), np.array([4, 5]), ("old", "new"))
    found = one_step(rows, 100, 200)
    assert columns(found) == [("old", 0, 30, 4), ("new", 50, 100, 5)]


def test_twins_are_paired_as_they_come():
    """The first of the step before with the first of this one, which may begin just when that ends."""
    lower, upper = np.array([60, 70, 110, 130]), np.array([110, 130, 220, 230])
    rows = Buffers(lower, upper, np.array([4, 4, 4, 4]), ("old a", "old b", "a", "b"))
    found = one_step(rows, 100, 200)
    assert columns(found) == [("a", 10, 110, 4), ("b", 30, 130, 4)]
