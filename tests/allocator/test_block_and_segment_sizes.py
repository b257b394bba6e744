"""Rounding, segment sizes and splits, at their edges and by their properties."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.allocator.block_and_segment_sizes import round_size, segment_bytes_for_request, should_split_block
from memfit.allocator.config import INTERVALS, AllocatorConfig

MIB = 1 << 20
sizes = st.one_of(
    st.integers(1, 1 << 37), st.integers(0, 36).flatmap(lambda n: st.integers(1 << n, (1 << n) + 4))
)
divisions = st.lists(st.sampled_from([0, 1, 2, 4, 8, 16]), min_size=INTERVALS, max_size=INTERVALS).map(tuple)


@pytest.mark.parametrize(
    ("size", "rounded"), [(1, 512), (511, 512), (512, 512), (513, 1024), (MIB - 1, MIB), (MIB + 1, MIB + 512)]
)
def test_sizes_are_rounded_to_512(size, rounded):
    assert round_size(size) == rounded


# The worked example of the comment above roundup_power2_next_division: 1200 with 4 divisions of 1024.
@pytest.mark.parametrize(
    ("size", "rounded"), [(1200 * MIB, 1280 * MIB), (1024 * MIB, 1024 * MIB), (2047 * MIB, 2048 * MIB)]
)
def test_sizes_are_rounded_to_divisions_of_a_power_of_two(size, rounded):
    assert round_size(size, AllocatorConfig(roundup_power2_divisions=(4,) * INTERVALS)) == rounded


def test_divisions_need_more_than_512_bytes_each():
    config = AllocatorConfig(roundup_power2_divisions=(4,) * INTERVALS)
    assert round_size(2048, config) == 2048
    assert round_size(2049, config) == 2560
    assert round_size(4097, config) == 5120


def test_each_interval_has_its_own_divisions():
    config = AllocatorConfig(roundup_power2_divisions=(0, 2, *(0,) * 14))
    assert round_size(2 * MIB - 511, config) == 2 * MIB
    assert round_size(2 * MIB + 1, config) == 3 * MIB
    assert round_size(4 * MIB + 1, config) == 4 * MIB + 512


@given(sizes, divisions)
def test_rounding_is_minimal_and_idempotent(size, each):
    config = AllocatorConfig(roundup_power2_divisions=each)
    rounded = round_size(size, config)
    assert rounded >= size
    assert rounded % 512 == 0
    assert rounded <= max(2 * size, 512)
    assert round_size(rounded, config) == rounded


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB - 1, 10 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
        (12 * MIB + 1, 14 * MIB),
    ],
)
def test_segment_sizes(size, segment):
    assert segment_bytes_for_request(size) == segment


def test_large_segment_size_serves_requests_up_to_10_mib():
    config = AllocatorConfig(large_segment_size=48 * MIB)
    assert [segment_bytes_for_request(n * MIB, config) for n in (1, 2, 9, 10)] == [
        2 * MIB,
        48 * MIB,
        48 * MIB,
        10 * MIB,
    ]


@pytest.mark.parametrize(
    ("rounded", "remainder", "config", "split"),
    [
        (512, 511, AllocatorConfig(), False),
        (MIB, 512, AllocatorConfig(), True),
        (MIB + 512, 512, AllocatorConfig(), False),
        (MIB + 512, MIB, AllocatorConfig(), False),
        (MIB + 512, MIB + 512, AllocatorConfig(), True),
        (2 * MIB, 512, AllocatorConfig(expandable_segments=True), True),
        (2 * MIB, 8 * MIB, AllocatorConfig(max_split_size=2 * MIB), False),
        (2 * MIB - 512, 8 * MIB, AllocatorConfig(max_split_size=2 * MIB), True),
    ],
)
def test_remainders_are_split_by_size_and_setting(rounded, remainder, config, split):
    assert should_split_block(rounded, remainder, config) == split
