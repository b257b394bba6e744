"""Replays of handmade histories, under other settings, and the failures they report."""

from dataclasses import replace as changed

import pytest

from memfit.allocator.config import AllocatorConfig
from memfit.allocator.replay import replay_requests
from memfit.allocator.requests import AllocatorRequests, RequestKind, allocator_requests_of_trace
from memfit.allocator.setting_outcomes import (
    recommended_setting_outcome,
    replay_under_setting,
    smallest_device_that_fits,
)
from memfit.errors import FileFormatError, UsageError
from memfit.records import (
    Action,
    AllocatorSetting,
    FailedMalloc,
    Mark,
    MarkKind,
    SecondsPerDriverCall,
    SettingOutcome,
)
from support.traces import freed, trace_of

MIB = 1 << 20
GIB = 1 << 30


def request_names(found):
    return [RequestKind(ask).name for ask in found.ask]


def shape(segment):
    return (
        segment.size,
        segment.stream,
        segment.kind,
        segment.pool,
        [(block.size, block.state) for block in segment.blocks],
    )


TOTAL = {
    "several streams": 3,
    "expandable": 4,
    "garbage collection": 6,
    "roundup": 8,
    "private pools": 8,
    "captured graphs": 8,
    "captured graphs, expandable": 8,
}


@pytest.mark.parametrize("situation", TOTAL)
def test_a_replay_equals_the_real_allocator(drive, situation):
    trace, _, truth = drive(situation)
    config = AllocatorConfig.read(trace.settings)
    if situation == "garbage collection":  # the driver sets the limit by a call, which no history records
        config = changed(config, per_process_memory_fraction=0.8)
    result = replay_requests(allocator_requests_of_trace(trace), config, total=TOTAL[situation] << 30)
    assert result.peak_allocated == truth[:, 1].max()
    assert result.peak_reserved == truth[:, 2].max()
    assert result.statistics["num_alloc_retries"] == trace.statistics["num_alloc_retries"]
    # Addresses may differ: streams release their segments in the order of their handles, which is random.
    assert sorted(map(shape, result.segments)) == sorted(map(shape, trace.segments))


def test_a_block_used_by_another_stream_waits_for_its_completed_free():
    trace = trace_of(
        [
            (Action.SEGMENT_ALLOC, 0x1000, 20 * MIB),
            (Action.ALLOC, 0x1000, 2 * MIB),
            (Action.FREE_REQUESTED, 0x1000, 2 * MIB),
            (Action.ALLOC, 0x201000, 2 * MIB),  # the first is not free yet
            (Action.FREE_COMPLETED, 0x1000, 2 * MIB),
            (Action.ALLOC, 0x1000, 2 * MIB),
        ]
    )
    found = allocator_requests_of_trace(trace)
    assert request_names(found) == ["MALLOC", "FREE_LATER", "MALLOC", "GONE_ON", "MALLOC"]
    result = replay_requests(found, AllocatorConfig(), total=GIB)
    assert result.statistics["active_bytes.all.peak"] == 4 * MIB
    (segment,) = result.segments
    assert [block.state for block in segment.blocks] == ["active_allocated", "active_allocated", "inactive"]


def test_empty_cache_is_recognised_by_a_mark_or_by_its_releases():
    events = (
        (Action.SEGMENT_ALLOC, 0x1000, 20 * MIB),
        (Action.ALLOC, 0x1000, 2 * MIB),
        *freed(0x1000, 2 * MIB),
        (Action.SEGMENT_FREE, 0x1000, 20 * MIB),
        (Action.SEGMENT_ALLOC, 0x1000, 2 * MIB),
        (Action.ALLOC, 0x1000, 512),
    )
    wanted = ["MALLOC", "FREE", "EMPTY_CACHE", "MALLOC"]
    trace = changed(trace_of(events), statistics={"num_alloc_retries": 0})
    assert request_names(allocator_requests_of_trace(trace)) == wanted
    marked = changed(trace, marks=(Mark(4, MarkKind.EMPTY_CACHE, 0),))
    assert request_names(allocator_requests_of_trace(marked)) == wanted
    full = changed(
        trace, statistics={}, device=changed(trace.device, total=changed(trace.device.total, bytes=21 * MIB))
    )
    # The second malloc was short of memory.
    assert request_names(allocator_requests_of_trace(full)) == ["MALLOC", "FREE", "MALLOC"]


def test_a_free_of_an_unknown_block_names_the_event():
    trace = trace_of([(Action.FREE_REQUESTED, 0x7000, 512)])
    with pytest.raises(FileFormatError, match=r"Event 0 of 1 \(kind free_requested, 512 bytes at 0x7000"):
        allocator_requests_of_trace(trace)


def test_a_replay_ends_at_the_first_malloc_that_fails():
    trace = trace_of(
        [
            (Action.SEGMENT_ALLOC, 0x10000000, 30 * MIB),
            (Action.ALLOC, 0x10000000, 30 * MIB),
            (Action.SEGMENT_ALLOC, 0x20000000, 40 * MIB),
            (Action.ALLOC, 0x20000000, 40 * MIB),
        ]
    )
    result = replay_requests(
        allocator_requests_of_trace(trace), AllocatorConfig(), total=64 * MIB, taken=2 * MIB
    )
    assert not result.fits
    assert result.failure == FailedMalloc(3, 40 * MIB, 32 * MIB)
    assert result.peak_reserved == 30 * MIB


def test_without_a_cache_every_tensor_costs_two_calls():
    events = [(Action.SEGMENT_ALLOC, 0x1000, 20 * MIB)]
    for _ in range(5):
        events += [
            (Action.ALLOC, 0x1000, 2 * MIB),
            *freed(0x1000, 2 * MIB),
        ]
    result = replay_requests(
        allocator_requests_of_trace(trace_of(events)), AllocatorConfig(caching=False), total=GIB
    )
    assert (result.calls.malloc, result.calls.free) == (5, 5)
    assert result.peak_reserved == 2 * MIB


def test_the_smallest_capacity_is_found_from_above():
    trace = trace_of(
        [
            (Action.SEGMENT_ALLOC, 0x10000000, 30 * MIB),
            (Action.ALLOC, 0x10000000, 30 * MIB),
            *freed(0x10000000, 30 * MIB),
            (Action.SEGMENT_ALLOC, 0x20000000, 40 * MIB),
            (Action.ALLOC, 0x20000000, 40 * MIB),
        ]
    )
    found = allocator_requests_of_trace(trace)
    size = smallest_device_that_fits(found, AllocatorSetting(), taken=2 * MIB, version=(2, 14))
    assert size == 42 * MIB  # the allocator releases the cached 30 MiB because the 40 do not fit beside them
    assert replay_requests(found, AllocatorConfig(), total=size, taken=2 * MIB).fits
    assert not replay_requests(found, AllocatorConfig(), total=size - 2 * MIB, taken=2 * MIB).fits


def test_after_so_many_replays_the_strides_to_the_smallest_capacity_double():
    """Each of 100 cached blocks is released alone, so every stride of 2 MiB takes a replay."""
    events = []
    for number in range(100):
        block = (0x10000000 + (number << 32), (40 + 2 * number) * MIB)
        events += [(Action.SEGMENT_ALLOC, *block), (Action.ALLOC, *block), *freed(*block)]
    found = allocator_requests_of_trace(trace_of(events))
    tried: list[int] = []

    def size(exhaustive, **more):
        tried.clear()
        return smallest_device_that_fits(
            found, AllocatorSetting(), taken=0, version=(2, 14), exhaustive=exhaustive,
            on_replay=tried.append, **more,
        )  # fmt: skip

    assert size(2000) == 238 * MIB
    assert len(tried) > 50
    assert size(0) == 238 * MIB
    assert len(tried) < 25
    assert size(0, fails_at=400 * MIB) == 402 * MIB
    assert size(0, fails_at=1 << 40) == (1 << 40) + 2 * MIB


def test_only_a_setting_that_gains_is_recommended():
    def row(reserved, seconds=0.0, *, fits=True, conf="expandable_segments:True"):
        failure = None if fits else FailedMalloc(0, 1, 0)
        done = changed(
            replay_requests(_NOTHING, AllocatorConfig(), total=GIB), failure=failure, peak_reserved=reserved
        )
        return SettingOutcome(AllocatorSetting(conf), done, seconds)

    now = row(1000 * MIB, conf="")
    assert recommended_setting_outcome([row(999 * MIB)], now) is None  # saves too little
    assert recommended_setting_outcome([row(900 * MIB, seconds=0.5)], now) is None  # slower
    assert recommended_setting_outcome([row(900 * MIB, fits=False)], now) is None
    best = row(800 * MIB)
    assert recommended_setting_outcome([row(900 * MIB), best], now) is best
    assert recommended_setting_outcome([best], row(100 * MIB, fits=False, conf="")) is best


def test_pytorch_accepts_every_setting_that_is_tried():
    from memfit.allocator.setting_outcomes import allocator_config_of_setting, allocator_settings_worth_trying

    for version in ((2, 8), (2, 14)):
        names = [setting.name for setting in allocator_settings_worth_trying(version)]
        assert len(set(names)) == len(names)
        for setting in allocator_settings_worth_trying(version):
            allocator_config_of_setting(setting)
    assert not any("large_segment" in setting.conf for setting in allocator_settings_worth_trying((2, 8)))
    with pytest.raises(UsageError, match="max_split_size_mb:3 "):
        replay_under_setting(
            _NOTHING,
            AllocatorSetting("max_split_size_mb:3"),
            total=GIB,
            taken=0,
            version=(2, 14),
            rates=SecondsPerDriverCall(),
        )


def test_since_2_12_the_age_of_segments_orders_blocks_of_equal_size():
    from support.reference_allocator.caching_allocator import CachingAllocator
    from support.reference_allocator.device_memory import DeviceMemory

    def chosen(version):
        allocator = CachingAllocator(DeviceMemory(GIB), AllocatorConfig(), version)
        lowest, old = allocator.malloc(30 * MIB), allocator.malloc(30 * MIB)
        allocator.free(lowest)
        allocator.empty_cache()
        young = allocator.malloc(30 * MIB)  # where the lowest was
        assert young.address < old.address
        allocator.free(young)
        allocator.free(old)
        return "old" if allocator.malloc(30 * MIB).address == old.address else "young"

    assert (chosen((2, 11)), chosen((2, 12)), chosen((2, 14))) == ("young", "old", "old")


_NOTHING = AllocatorRequests()
