"""Secondary peaks: separated by a dip, in the peak's own step, each location once."""

import pytest

from memfit.allocator.timeline import memory_timeline
from memfit.analysis.explanation import secondary_peaks
from memfit.records import Action, EventLabel, Mark, MarkKind, Phase
from support.traces import BASE, Event, freed, segment, trace_of

LABELS = tuple(EventLabel(phase, "", "", -1) for phase in Phase)


def label(phase):
    return list(Phase).index(phase)


def climb(*levels):
    """Return a history that reaches these levels, in blocks of 512 bytes, each under a phase."""
    history, held = [Event(Action.SEGMENT_ALLOC, BASE, 2 << 20, label=0)], []
    for level, phase in levels:
        while len(held) > level:
            history += freed(BASE + 512 * (len(held) - 1), 512, label=label(phase))
            held.pop()
        while len(held) < level:
            address = BASE + 512 * len(held)
            history.append(Event(Action.ALLOC, address, 512, label=label(phase)))
            held.append(address)
    return history


def near(*levels, marks=()):
    history = climb(*levels)
    trace = trace_of(history, [segment(BASE, 2 << 20, "small")], labels=LABELS, marks=tuple(marks))
    return [
        (moment.place.phase, moment.allocated // 512)
        for moment in secondary_peaks(trace, memory_timeline(trace))
    ]


def test_secondary_peaks_are_separated_by_a_dip():
    run = (90, Phase.FORWARD), (50, Phase.LOSS), (100, Phase.BACKWARD), (60, Phase.BETWEEN)
    assert near(*run, (80, Phase.OPTIMIZER), (10, Phase.INPUT)) == [
        (Phase.FORWARD, 90),
        (Phase.OPTIMIZER, 80),
    ]
    assert near(*run, (74, Phase.OPTIMIZER)) == [(Phase.FORWARD, 90)]  # more than a quarter below


@pytest.mark.parametrize(("dip", "separate"), [(85, True), (86, False)])
def test_a_slope_has_one_peak(dip, separate):
    found = near((90, Phase.FORWARD), (dip, Phase.LOSS), (100, Phase.BACKWARD))
    assert found == [(Phase.FORWARD, 90)] * separate


def test_secondary_peaks_are_separated_from_each_other():
    """97 and 95 are on one slope, after a deep dip from the peak."""
    fallen = (100, Phase.FORWARD), (50, Phase.LOSS), (97, Phase.BACKWARD)
    assert near(*fallen, (94, Phase.BETWEEN), (95, Phase.OPTIMIZER)) == [(Phase.BACKWARD, 97)]
    assert near(*fallen, (90, Phase.BETWEEN), (95, Phase.OPTIMIZER))[1:] == [(Phase.OPTIMIZER, 95)]


def test_each_location_appears_once():
    found = near(*[(level, Phase.BACKWARD) for level in (100, 50, 99, 50, 98)])
    assert found == []


def test_other_steps_repeat_what_the_step_of_the_peak_shows():
    first = climb((90, Phase.FORWARD), (0, Phase.BACKWARD))
    levels = (90, Phase.FORWARD), (0, Phase.BACKWARD), (100, Phase.FORWARD), (0, Phase.INPUT)
    ends = [Mark(len(first), MarkKind.TRAINING_STEP, 0), Mark(len(climb(*levels)), MarkKind.TRAINING_STEP, 1)]
    other = (95, Phase.OPTIMIZER), (0, Phase.INPUT)
    assert near(*levels, *other, marks=ends) == []
    assert near(*levels, *other, marks=ends[:1]) == [(Phase.OPTIMIZER, 95)]


def test_a_run_without_allocations_has_no_peaks():
    assert near() == []
