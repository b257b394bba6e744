"""Telling a process's bytes on a card from everybody else's."""

import pytest

from memfit.card.nvml import Usage
from memfit.card.outside_allocator import BY_CARD, BY_GROWTH, BY_PROCESS, Reading, _reading

MIB = 1 << 20
IDLE = Usage(600 * MIB, {})  # what the driver keeps for itself
DESKTOP = Usage(900 * MIB, {77: 300 * MIB})


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        # NVML names this process.
        (IDLE, Usage(1600 * MIB, {9: 1000 * MIB}), Reading(1000 * MIB, 400 * MIB, 0, BY_PROCESS)),
        # So does it beside a process that was there already, whose bytes are the others'.
        (
            DESKTOP,
            Usage(1900 * MIB, {77: 300 * MIB, 9: 1000 * MIB}),
            Reading(1000 * MIB, 400 * MIB, 0, BY_PROCESS),
        ),
        # From inside a container NVML knows it by another number: the one process that appeared.
        (
            DESKTOP,
            Usage(1900 * MIB, {77: 300 * MIB, 4242: 1000 * MIB}),
            Reading(1000 * MIB, 400 * MIB, 0, BY_PROCESS),
        ),
        # Somebody else there has our number: what was there before is not us.
        (
            Usage(900 * MIB, {9: 300 * MIB}),
            Usage(1900 * MIB, {9: 300 * MIB, 4242: 1000 * MIB}),
            Reading(1000 * MIB, 400 * MIB, 0, BY_PROCESS),
        ),
        # Two appeared and neither has our number: the card's growth is all there is.
        (
            IDLE,
            Usage(1600 * MIB, {4242: 800 * MIB, 4243: 200 * MIB}),
            Reading(1000 * MIB, 400 * MIB, 0, BY_GROWTH),
        ),
        # NVML tells no process's bytes (WSL).
        (IDLE, Usage(1600 * MIB, {}), Reading(1000 * MIB, 400 * MIB, 0, BY_GROWTH)),
        # NVML is not there.
        (None, None, Reading(1000 * MIB, 400 * MIB, 0, BY_CARD)),
    ],
)
def test_each_way_of_telling_them_apart(before, now, expected):
    assert _reading(1000 * MIB, 400 * MIB, before=before, now=now, pid=9) == expected
    assert expected.outside == 600 * MIB


def test_what_is_not_this_processs_is_the_others():
    reading = _reading(1500 * MIB, 0, before=IDLE, now=Usage(0, {9: 1000 * MIB}), pid=9)
    assert reading.others == 500 * MIB


def test_a_reading_below_what_pytorch_reserved_is_not_negative():
    assert Reading(100, 200, 0, BY_GROWTH).outside == 0
