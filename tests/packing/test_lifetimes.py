"""Lives read from what a script asked: streams and pools apart, sizes as blocks are."""

from memfit.allocator.requests import Ask, Requests
from memfit.packing.lifetimes import lifetimes


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
            (Ask.MALLOC, 0, 1),
            (Ask.MALLOC, 1, 512),
            (Ask.MALLOC, 2, 513),
            (Ask.FREE, 0, 0),
            (Ask.FREE_LATER, 1, 0),
            (Ask.GONE_ON, 1, 0),
            (Ask.STEP, -1, 0),
        )
    )
    assert list(found) == [(0, 0)]
    assert columns(found[0, 0]) == [("0", 0, 3, 512), ("10", 1, 5, 512), ("20", 2, 7, 1024)]


def test_streams_and_pools_are_apart():
    found = lifetimes(
        asked(
            (Ask.MALLOC, 0, 512),
            (Ask.MALLOC, 1, 512, 1),
            (Ask.MALLOC, 2, 512, 1, 1),
            (Ask.FREE, 1, 0),
            (Ask.MALLOC, 3, 512),
            pools=((0, 0), (1, 0)),
        )
    )
    assert {group: len(buffers) for group, buffers in found.items()} == {(0, 0): 2, (1, 0): 1, (1, 1): 1}
    assert columns(found[1, 0]) == [("10", 1, 3, 512)]


def test_a_malloc_that_failed_is_no_buffer():
    found = lifetimes(asked((Ask.FAILED, -1, 512), (Ask.MALLOC, 0, 512)))
    assert columns(found[0, 0]) == [("10", 1, 2, 512)]


def test_nothing_asked_is_nothing_to_pack():
    assert lifetimes(asked((Ask.STEP, -1, 0))) == {}
