"""Changes of the optimizer: the few that are worth a run."""

from dataclasses import fields, replace

import pytest

from memfit.planning.optimizer_state_changes import (
    OptimizerChangesToTry,
    has_8_bit_state,
    makes_updates_in_backward,
    offloads_state,
    optimizer_state_changes,
)
from memfit.planning.strategy_and_allocator_changes import AllowedChanges
from memfit.records import (
    STRATEGY_TRAITS,
    Change,
    DividedBatches,
    Equality,
    Figure,
    Phase,
    PlanRun,
    Provenance,
    ScriptLocation,
    Term,
    equality_of,
)
from memfit.strategies.plan import Plan

HALVES = DividedBatches(2, 4, "--batch-size 4", "")
BACKWARD, OFFLOADED = "step in backward", "optimizer state offloaded"
BOTH = f"{OFFLOADED}, {BACKWARD}"
LOW = "8-bit optimizer state"


def ran(needs, gradients=0, state=0, temporaries=0, *, time=1.0, phase=Phase.BACKWARD, divided=None):
    held = {"gradients": gradients, "optimizer state": state, "temporaries": temporaries}
    terms = tuple(Term(name, Figure(size, Provenance.EXACT)) for name, size in held.items())
    figure = Figure(needs, Provenance.EXACT)
    place = ScriptLocation(2, phase, "", "", "")
    return PlanRun(Change(micro_batches=divided), figure, figure, time, place, terms=terms)


def tried(plain, budget, *others, chosen=None, low=False, offloaded=1.5, refused=()):
    """Return what is tried, if that changes nothing, or is refused."""
    allowed = replace(AllowedChanges(), low_bit_state=low)
    changes, words = OptimizerChangesToTry(plain, allowed, budget, lambda: offloaded), []
    while change := changes.next([*others, *filter(None, [chosen])], chosen):
        words += change.words
        if change.words[0] in refused:
            changes.refuse(change)
    return words


def test_what_may_be_enough_is_tried_fastest_first():
    plain = ran(100, gradients=20, state=40)
    assert tried(plain, 90) == [BACKWARD, OFFLOADED, BOTH]
    assert tried(plain, 70) == [OFFLOADED, BOTH]
    assert tried(plain, 50) == [BOTH]
    assert tried(plain, 90, low=True) == [BACKWARD, LOW, f"{LOW}, {BACKWARD}", OFFLOADED, BOTH]
    assert tried(plain, 70, low=True) == [LOW, f"{LOW}, {BACKWARD}", OFFLOADED, BOTH]
    assert tried(plain, 69, low=True) == [f"{LOW}, {BACKWARD}", OFFLOADED, BOTH]


def test_where_none_seems_enough_the_one_that_saves_most_shows_what_is_needed_at_least():
    plain = ran(100, gradients=20, state=40)
    assert tried(plain, 30) == [BOTH]
    assert tried(plain, 30, refused=[BOTH]) == [BOTH, OFFLOADED]


def test_if_nothing_fits_the_one_that_saves_most_is_tried_after_those_that_seemed_enough():
    plain = ran(100, gradients=20, state=40)
    offloaded = ran(62, gradients=3)  # most of the gradients are not yet there at the new peak
    assert tried(plain, 60, offloaded) == [BOTH]
    changes = OptimizerChangesToTry(plain, AllowedChanges(), 60, lambda: 1.5)
    assert changes.next([], None).words == (OFFLOADED,)
    assert changes.next([offloaded], None).words == (BOTH,)
    assert changes.next([offloaded, ran(61)], None) is None


def test_what_saves_next_to_nothing_is_not_tried():
    assert tried(ran(100, gradients=4), 90) == []
    assert tried(ran(100, gradients=5), 90) == [BOTH]  # the last, not enough


def test_in_the_optimizer_temporaries_are_saved_too():
    assert tried(ran(100, 5, 5, 40), 60) == [BOTH]
    assert tried(ran(100, 5, 5, 40, phase=Phase.OPTIMIZER), 60) == [BACKWARD, OFFLOADED, BOTH]


def test_what_contains_a_refused_change_is_not_tried():
    plain = ran(100, gradients=20, state=40)
    assert tried(plain, 90, refused=[BACKWARD]) == [BACKWARD, OFFLOADED]
    assert tried(plain, 90, low=True, refused=[BACKWARD, LOW]) == [BACKWARD, LOW, OFFLOADED]


def test_a_run_with_divided_batches_says_nothing_about_steps_in_the_backward():
    plain, halves = ran(100, gradients=20, state=40), ran(60, gradients=20, state=20, divided=HALVES)
    assert tried(plain, 40, halves) == [OFFLOADED, BOTH]
    assert tried(plain, 39, halves) == [BOTH]


def test_once_something_fits_only_what_may_be_faster_is_tried():
    plain = ran(100, gradients=20, state=40)
    recomputed = ran(50, gradients=20, state=2, time=1.2)
    assert tried(plain, 90, chosen=recomputed) == [BACKWARD]
    assert tried(plain, 90, chosen=recomputed, offloaded=1.1) == [BACKWARD, OFFLOADED, BOTH]
    assert tried(plain, 90, chosen=ran(50, gradients=20, time=1.001)) == []
    assert tried(plain, 50, chosen=recomputed) == [BACKWARD]  # with less to recompute
    halves = replace(recomputed, change=Change(micro_batches=HALVES))
    assert tried(plain, 50, chosen=halves) == []
    assert tried(plain, 80, chosen=halves) == [BACKWARD]


@pytest.mark.parametrize(("low", "exact"), [(False, False), (True, False), (True, True)])
def test_nothing_is_changed_that_is_not_allowed(low, exact):
    found = optimizer_state_changes(AllowedChanges(optimizer=exact, low_bit_state=low))
    assert any(has_8_bit_state(each) for each in found) is low
    assert any(not has_8_bit_state(each) for each in found) is exact


def test_each_change_does_what_its_words_say():
    for change in optimizer_state_changes(AllowedChanges(low_bit_state=True)):
        (words,) = change.words
        assert change.plan.keys() == {"optimizer_state"}
        assert offloads_state(change) is change.uses_side_streams is (OFFLOADED in words)
        assert makes_updates_in_backward(change) is (BACKWARD in words)
        assert equality_of(change) == (Equality.OTHER if LOW in words else Equality.BITWISE)


def test_another_implementation_of_the_optimizer_rounds_otherwise():
    settings = {"optimizer_state": {"implementation": "fused", "offload": True}}
    assert equality_of(Change(settings)) is Equality.ROUNDING


def test_each_field_of_a_plan_has_its_traits():
    assert list(STRATEGY_TRAITS) == [field.name for field in fields(Plan)]


def test_nothing_is_promised_of_a_strategy_that_memfit_does_not_know():
    assert equality_of(Change({"offload": {}, "pruning": {}})) is Equality.OTHER
    assert equality_of(Change({"offload": {}, "compilation": {}})) is Equality.ROUNDING
