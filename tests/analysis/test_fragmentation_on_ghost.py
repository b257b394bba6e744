"""What reserved bytes are used for, compared with PyTorch's own snapshot and with a replay."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from memfit.allocator.config import AllocatorConfig
from memfit.allocator.replay import replay_requests
from memfit.allocator.requests import AllocatorRequests, RequestKind, allocator_requests_of_trace
from memfit.allocator.timeline import memory_timeline
from memfit.analysis.fragmentation import (
    END,
    HOLES,
    PEAK_ALLOCATED,
    PEAK_RESERVED,
    classify_unrequested_bytes,
)
from memfit.records import Action, Provenance, Segment, SnapshotBlock

MIB = 1 << 20
NEVER_SHORT = {"captured graphs", "captured graphs, expandable"}
"""Situations that release memory only on request, as ``torch.cuda.graph`` does."""


# -- referees ----------------------------------------------------------------------------------------


def classified(segments):
    """Classify bytes naively: (requested, beyond, awaiting, holes, cached) of each pool, and all holes."""
    rows, holes = {"small": Counter(), "large": Counter()}, Counter()
    for segment in segments:
        row = rows[segment.kind]
        in_use = any(block.state != "inactive" for block in segment.blocks)
        for block in segment.blocks:
            if block.state == "active_allocated":
                row["requested"] += block.requested
                row["beyond"] += block.size - block.requested
            elif block.state == "active_awaiting_free":
                row["awaiting"] += block.size
            elif in_use:
                row["holes"] += block.size
                holes[block.size] += 1
            else:
                row["cached"] += block.size
    names = ("requested", "beyond", "awaiting", "holes", "cached")
    return {kind: tuple(row[name] for name in names) for kind, row in rows.items()}, holes


def rows_until(trace, events, *more):
    history = trace.events
    columns_ = (history.action, history.address, history.size, *more)
    return zip(*(column[:events].tolist() for column in columns_), strict=True)


def mapped_after(trace, events):
    """Return (start, stop, whether it is in the small pool) of each segment."""
    whole, pages = {}, {}
    for action, address, size in rows_until(trace, events):
        within = range(address, address + size, 2 * MIB)
        if action == Action.SEGMENT_ALLOC:
            whole[address] = size
        elif action == Action.SEGMENT_FREE:
            del whole[address]
        elif action == Action.SEGMENT_MAP:
            pages |= dict.fromkeys(within, size == 2 * MIB)
        elif action == Action.SEGMENT_UNMAP:
            pages = {page: small for page, small in pages.items() if page not in within}
    ranges = [(start, start + size, size == 2 * MIB) for start, size in whole.items()]
    for page in sorted(pages):
        start = ranges.pop()[0] if page - 2 * MIB in pages else page
        ranges.append((start, page + 2 * MIB, pages[page]))
    return ranges


def in_use_after(trace, events):
    """Return the blocks in use, by address; their sizes are the timeline's."""
    blocks = {}
    for action, address, requested, size in rows_until(trace, events, memory_timeline(trace).block_size):
        if action == Action.ALLOC:
            blocks[address] = SnapshotBlock(address, size, requested, "active_allocated")
        elif action == Action.FREE_REQUESTED:
            blocks[address] = replace(blocks[address], state="active_awaiting_free")
        elif action == Action.FREE_COMPLETED:
            del blocks[address]
    return blocks


def rebuilt_segments(trace, events):
    """Rebuild the segments of a moment from the history: all that is not in use is free."""
    used = sorted(in_use_after(trace, events).items())
    for start, stop, small in mapped_after(trace, events):
        blocks, at = [], start
        for address, block in used:
            if start <= address < stop:
                blocks += [SnapshotBlock(at, address - at, 0, "inactive")] * (at < address) + [block]
                at = address + block.size
        blocks += [SnapshotBlock(at, stop - at, 0, "inactive")] * (at < stop)
        kind = "small" if small else "large"
        yield Segment(start, stop - start, 0, kind, (0, 0), expandable=False, blocks=tuple(blocks))


def rows_of(split):
    return (split.requested, split.rounding + split.unsplit, split.awaiting_free, split.holes, split.cached)


def assert_agreement(moment, segments):
    rows, holes = classified(segments)
    assert {"small": rows_of(moment.small), "large": rows_of(moment.large)} == rows
    largest = sorted(holes.elements(), reverse=True)[:HOLES]
    assert [hole.size for hole in moment.holes] == largest


# -- against the real allocator ----------------------------------------------------------------------


def test_the_end_equals_pytorchs_snapshot(drive, situation):
    trace, _, _ = drive(situation)
    found = classify_unrequested_bytes(trace)
    end = found.moments[-1]
    assert (end.name, found.provenance) == (END, Provenance.EXACT)
    assert_agreement(end, trace.segments)
    statistics = trace.statistics
    for pool, split in (("all", end.all), ("small_pool", end.small), ("large_pool", end.large)):
        awaiting = sum(
            block.requested
            for segment in trace.segments
            for block in segment.blocks
            if block.state == "active_awaiting_free" and pool in ("all", f"{segment.kind}_pool")
        )
        counted = {
            name: statistics[f"{name}_bytes.{pool}.current"]
            for name in ("requested", "allocated", "reserved")
        }
        derived = {
            "requested": split.requested + awaiting,
            "allocated": split.allocated,
            "reserved": split.reserved,
        }
        assert derived == counted


def test_the_peaks_equal_pytorchs(drive, situation):
    trace, _, _ = drive(situation)
    peaks = {moment.name: moment.all for moment in classify_unrequested_bytes(trace).moments}
    assert peaks[PEAK_RESERVED].reserved == trace.statistics["reserved_bytes.all.peak"]
    assert peaks[PEAK_ALLOCATED].allocated == trace.statistics["allocated_bytes.all.peak"]


def test_every_moment_sums_to_the_timeline(drive, situation):
    trace, _, _ = drive(situation)
    dice = random.Random(20261122)  # noqa: S311
    at = {str(n): dice.randint(1, len(trace.events)) for n in range(15)}
    for moment in classify_unrequested_bytes(trace, at).moments:
        assert_agreement(moment, rebuilt_segments(trace, moment.events))


def test_every_moment_equals_a_replay(drive, situation):
    """Until memory first runs short: from there, a replay needs the device's size, which a snapshot lacks."""
    trace, _, _ = drive(situation)
    requests = allocator_requests_of_trace(trace)
    short = np.isin(trace.events.action, (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP, Action.OOM))
    if situation in NEVER_SHORT:
        short[:] = False
    until = int(np.argmax(short)) if short.any() else len(trace.events)
    mallocs = [
        index
        for index, kind in enumerate(requests.ask)
        if kind == RequestKind.MALLOC and requests.event[index] < until
    ]
    assert len(mallocs) >= 50
    for index in random.Random(20261122).sample(mallocs, 10):  # noqa: S311
        names = ("ask", "block", "size", "stream", "pool", "event")
        columns = (getattr(requests, name)[: index + 1] for name in names)
        first = AllocatorRequests(*columns, pools=requests.pools)
        result = replay_requests(first, AllocatorConfig.read(trace.settings), total=80 << 30)
        (moment,) = classify_unrequested_bytes(trace, {"then": requests.event[index] + 1}).moments
        assert_agreement(moment, result.segments)


@pytest.mark.parametrize("situation", ["several streams", "expandable", "max_split_size"])
def test_a_late_history_gives_the_same_fragmentation(drive, situation):
    whole, _, _ = drive(situation)
    trace, _, _ = drive(situation, history_from=700)
    missing = len(whole.events) - len(trace.events)
    at = {str(count): count for count in (0, 1, *range(50, len(trace.events), 150), len(trace.events))}
    known = classify_unrequested_bytes(whole, {name: missing + count for name, count in at.items()})
    found = classify_unrequested_bytes(trace, at)
    assert missing > 500
    assert found.provenance is (Provenance.EXACT if situation == "expandable" else Provenance.ASSUMED)
    for moment, truth in zip(found.moments, known.moments, strict=True):
        for split, exact in ((moment.small, truth.small), (moment.large, truth.large)):
            if situation == "expandable":
                assert split == exact
            assert split.reserved == exact.reserved
            assert split.requested == exact.requested
            assert split.rounding == exact.rounding
            assert split.awaiting_free == exact.awaiting_free
            # An older block may have an unsplit remainder that the late history shows as a hole.
            seems_free = split.holes + split.cached - exact.holes - exact.cached
            assert 0 <= exact.unsplit - split.unsplit == seems_free
    pins = [pin for moment in found.moments for hole in moment.holes for pin in hole.pins]
    assert any(pin.born is None and pin.freed is not None for pin in pins)
    assert any(pin.born is not None for pin in pins)
    assert_agreement(found.moments[-1], trace.segments)
