"""Separating a process's bytes on a card from those of other processes."""

import pytest

from memfit.card.nvml import CardMemoryUse, NvmlLibrary
from memfit.card.outside_allocator import (
    BY_CARD,
    BY_GROWTH,
    BY_PROCESS,
    MemoryReading,
    OutsideMemoryMeter,
    _reading,
)

MIB = 1 << 20
IDLE = CardMemoryUse(600 * MIB, {})  # what the driver keeps for itself
DESKTOP = CardMemoryUse(900 * MIB, {77: 300 * MIB})


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        # NVML names this process.
        (
            IDLE,
            CardMemoryUse(1600 * MIB, {9: 1000 * MIB}),
            MemoryReading(1000 * MIB, 400 * MIB, 0, BY_PROCESS),
        ),
        # NVML names this process beside an earlier one, whose bytes count as others'.
        (
            DESKTOP,
            CardMemoryUse(1900 * MIB, {77: 300 * MIB, 9: 1000 * MIB}),
            MemoryReading(1000 * MIB, 400 * MIB, 0, BY_PROCESS),
        ),
        # In a container NVML reports another id for this process: it is the only one that appeared.
        (
            DESKTOP,
            CardMemoryUse(1900 * MIB, {77: 300 * MIB, 4242: 1000 * MIB}),
            MemoryReading(1000 * MIB, 400 * MIB, 0, BY_PROCESS),
        ),
        # A process that was there before has our id, so it is not this process.
        (
            CardMemoryUse(900 * MIB, {9: 300 * MIB}),
            CardMemoryUse(1900 * MIB, {9: 300 * MIB, 4242: 1000 * MIB}),
            MemoryReading(1000 * MIB, 400 * MIB, 0, BY_PROCESS),
        ),
        # Two processes appeared, neither with our id: only the card's growth is known.
        (
            IDLE,
            CardMemoryUse(1600 * MIB, {4242: 800 * MIB, 4243: 200 * MIB}),
            MemoryReading(1000 * MIB, 400 * MIB, 0, BY_GROWTH),
        ),
        # NVML reports no process's bytes (WSL).
        (IDLE, CardMemoryUse(1600 * MIB, {}), MemoryReading(1000 * MIB, 400 * MIB, 0, BY_GROWTH)),
        # NVML is missing.
        (None, None, MemoryReading(1000 * MIB, 400 * MIB, 0, BY_CARD)),
    ],
)
def test_each_way_of_determining_the_process_bytes(before, now, expected):
    assert _reading(1000 * MIB, 400 * MIB, before=before, now=now, pid=9) == expected
    assert expected.outside == 600 * MIB


def test_the_bytes_of_other_processes_are_the_remainder():
    reading = _reading(1500 * MIB, 0, before=IDLE, now=CardMemoryUse(0, {9: 1000 * MIB}), pid=9)
    assert reading.others == 500 * MIB


def test_a_reading_below_what_pytorch_reserved_is_not_negative():
    assert MemoryReading(100, 200, 0, BY_GROWTH).outside == 0


def test_a_meter_keeps_the_largest_reading(monkeypatch):
    import torch

    taken = iter((500 * MIB, 700 * MIB, 600 * MIB))
    monkeypatch.setattr(NvmlLibrary, "open", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000 * MIB - next(taken), 1000 * MIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 100 * MIB)
    meter = OutsideMemoryMeter()
    assert [meter.read().outside for _ in range(3)] == [400 * MIB, 600 * MIB, 500 * MIB]
    assert meter.figure().bytes == 600 * MIB
