"""A run's arenas: streams and pools apart, steps as circles, a capacity that all share."""

import pytest

from memfit.allocator.requests import RequestKind, Requests
from memfit.errors import UsageError
from memfit.packing import run_packing
from memfit.packing.best_packing import pack
from memfit.packing.run_packing import pack_run
from memfit.records import Provenance

STEP = (RequestKind.STEP, -1, 0)
SIDE, GRAPH = (1, 0), (0, 1)  # another stream; a pool of its own
A_STEP = (
    *(
        (RequestKind.MALLOC, 0, 1024),
        (RequestKind.MALLOC, 1, 512, *SIDE),
        (RequestKind.MALLOC, 2, 2048, *GRAPH),
    ),  # kept for good
    *(
        STEP,
        (RequestKind.MALLOC, 3, 512),
        (RequestKind.MALLOC, 4, 1536),
        (RequestKind.FREE, 3, 0),
        (RequestKind.FREE, 4, 0),
    ),
    *(
        (RequestKind.MALLOC, 5, 512, *GRAPH),
        (RequestKind.FREE, 5, 0),
        (RequestKind.MALLOC, 6, 1024, *SIDE),
        STEP,
        (RequestKind.FREE, 6, 0),
    ),
)


def asked(*rows):
    found = Requests(pools=((0, 0), (0, 7)))
    for event, (ask, block, size, *where) in enumerate(rows):
        found.add(ask, event, block, size, *where)
    return found


def packed(*rows, **options):
    return pack_run(asked(*rows), (), Provenance.EXACT, seconds=10, **options)


def test_each_stream_and_pool_is_an_arena():
    found = packed(*A_STEP)
    heights = {(arena.stream, arena.pool): arena.packing.height for arena in found.arenas}
    assert heights == {(0, (0, 0)): 3072, (1, (0, 0)): 1536, (0, (0, 7)): 2560}
    assert (found.step, found.height, found.bound) == (2, 7168, 7168)
    assert found.unshared == 1024 + 512 + 1536 + 512 + 1024 + 2048 + 512
    assert (
        found.live == 1024 + 512 + 2048 + 512 + 1536
    )  # with the graph's 512, when these are gone, it is less
    periods = {
        arena.stream if arena.pool == (0, 0) else "graph": arena.packing.buffers.period
        for arena in found.arenas
    }
    assert periods == {0: 8, 1: 8, "graph": 0}


def test_arenas_lie_one_above_the_other():
    found = packed(*A_STEP)
    spans = [(int(offset.min()), int((offset + buffers.size).max())) for buffers, offset in found.parts]
    assert [begin for begin, _ in spans] == [0, *(end for _, end in spans[:-1])]
    assert spans[-1][1] == found.height


def test_without_steps_it_is_the_whole_run():
    found = packed(
        (RequestKind.MALLOC, 0, 512), (RequestKind.FREE, 0, 0), STEP, (RequestKind.MALLOC, 1, 1024)
    )
    assert (found.step, found.height, found.live, found.unshared) == (0, 1024, 1024, 1536)


def test_what_lives_before_and_after_a_step_only_is_not_live_in_it():
    found = packed(
        (RequestKind.MALLOC, 0, 9216),
        (RequestKind.FREE, 0, 0),
        STEP,
        (RequestKind.MALLOC, 1, 512),
        STEP,
        (RequestKind.MALLOC, 2, 9216),
    )
    assert (found.height, found.live) == (512, 512)


def test_a_capacity_is_shared_by_number_of_buffers(monkeypatch):
    rooms = []
    monkeypatch.setattr(run_packing, "pack", lambda *what, **how: rooms.append(what[1]) or pack(*what, **how))
    packed(*A_STEP, capacity=7168 + 700)
    assert rooms == [3072 + 300, 1536 + 200, 2560 + 200]
    rooms.clear()
    packed(*A_STEP, capacity=5000)  # too little: each is asked for as little as can be
    assert rooms == [3072, 1536, 2560]


def test_nothing_to_pack():
    with pytest.raises(UsageError, match="asked for no memory"):
        packed(STEP)
