"""Packing a run: one packing per stream and pool, steps in circular time, one capacity for all."""

import pytest

from memfit.allocator.requests import AllocatorRequests, RequestKind
from memfit.errors import UsageError
from memfit.packing import run_packing
from memfit.packing.best_packing import pack_buffers
from memfit.packing.run_packing import pack_run_memory
from memfit.records import Provenance

STEP = (RequestKind.STEP, -1, 0)
SIDE, GRAPH = (1, 0), (0, 1)  # another stream; a private pool
A_STEP = (
    *(
        (RequestKind.MALLOC, 0, 1024),
        (RequestKind.MALLOC, 1, 512, *SIDE),
        (RequestKind.MALLOC, 2, 2048, *GRAPH),
    ),  # never freed
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


def requests_of(*rows):
    found = AllocatorRequests(pools=((0, 0), (0, 7)))
    for event, (kind, block, size, *where) in enumerate(rows):
        found.add(kind, event, block, size, *where)
    return found


def packed(*rows, **options):
    return pack_run_memory(requests_of(*rows), (), Provenance.EXACT, seconds=10, **options)


def test_each_stream_and_pool_has_its_own_packing():
    found = packed(*A_STEP)
    heights = {(arena.stream, arena.pool): arena.packing.height for arena in found.arenas}
    assert heights == {(0, (0, 0)): 3072, (1, (0, 0)): 1536, (0, (0, 7)): 2560}
    assert (found.step, found.height, found.bound) == (2, 7168, 7168)
    assert found.unshared == 1024 + 512 + 1536 + 512 + 1024 + 2048 + 512
    # The graph's 512 are allocated after the last two are freed, when less is live.
    assert found.live == 1024 + 512 + 2048 + 512 + 1536
    periods = {
        arena.stream if arena.pool == (0, 0) else "graph": arena.packing.buffers.period
        for arena in found.arenas
    }
    assert periods == {0: 8, 1: 8, "graph": 0}


def test_packings_are_stacked_on_top_of_each_other():
    found = packed(*A_STEP)
    spans = [(int(offset.min()), int((offset + buffers.size).max())) for buffers, offset in found.parts]
    assert [begin for begin, _ in spans] == [0, *(end for _, end in spans[:-1])]
    assert spans[-1][1] == found.height


def test_without_steps_the_whole_run_is_packed():
    found = packed(
        (RequestKind.MALLOC, 0, 512), (RequestKind.FREE, 0, 0), STEP, (RequestKind.MALLOC, 1, 1024)
    )
    assert (found.step, found.height, found.live, found.unshared) == (0, 1024, 1024, 1536)


def test_buffers_live_only_before_or_after_a_step_are_not_part_of_it():
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
    capacities = []
    monkeypatch.setattr(
        run_packing,
        "pack_buffers",
        lambda buffers, capacity, **options: (
            capacities.append(capacity) or pack_buffers(buffers, capacity, **options)
        ),
    )
    packed(*A_STEP, capacity=7168 + 700)
    assert capacities == [3072 + 300, 1536 + 200, 2560 + 200]
    capacities.clear()
    packed(*A_STEP, capacity=5000)  # too little: each is searched for its smallest
    assert capacities == [3072, 1536, 2560]


def test_a_run_without_requests_is_rejected():
    with pytest.raises(UsageError, match="requested no memory"):
        packed(STEP)
