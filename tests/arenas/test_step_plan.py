"""Plan a step that was recorded twice."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.arenas.arena_library import LIVES, SHARED
from memfit.arenas.step_plan import placeable_lifetimes, plan_step_offsets
from memfit.packing.packing_violations import find_packing_violation


def step(*rows):
    return np.array(rows, np.int64)


def test_a_lifetime_is_the_longer_of_the_two_recordings():
    older, newer = step([64, 1, -1], [64, 2, -1]), step([64, 2, -1], [64, 2, -1])
    assert placeable_lifetimes(older, newer, follows=True, alignment=64)[0].upper.tolist() == [2, 2]
    assert plan_step_offsets(older, newer, follows=True, alignment=64).height == 128
    assert plan_step_offsets(older, older, follows=True, alignment=64).height == 64


def test_a_tensor_that_overlaps_its_successor_is_not_placed():
    a_loss = step([64, 2, -1], [64, LIVES, 2])  # its variable is rebound after the next loss is computed
    a_gradient = step([64, 2, -1], [64, LIVES, 1])  # zero_grad frees it just before the next gradient
    assert plan_step_offsets(a_loss, a_loss, follows=True, alignment=64).offset.tolist() == [0, -1]
    assert sorted(plan_step_offsets(a_gradient, a_gradient, follows=True, alignment=64).offset) == [0, 64]
    not_followed = plan_step_offsets(a_gradient, a_gradient, follows=False, alignment=64)
    assert not_followed.offset.tolist() == [0, -1]


def test_memory_used_by_other_streams_is_not_placed():
    for shared, other in ((SHARED, 1), (1, SHARED), (SHARED, SHARED), (LIVES, 1), (1, LIVES)):
        assert (
            plan_step_offsets(step([64, shared, 0]), step([64, other, 0]), follows=True, alignment=64).height
            == 0
        )


@settings(deadline=None, derandomize=True)
@given(st.data())
def test_placed_buffers_never_overlap_in_repeated_steps(data):
    count = data.draw(st.integers(1, 12))
    rows = []
    for born in range(count):
        within = st.tuples(st.integers(born + 1, count), st.just(LIVES))
        beyond = st.tuples(st.just(LIVES), st.integers(-1, count))
        rows.append([data.draw(st.integers(1, 300)), *data.draw(st.one_of(within, beyond))])
    recording = step(*rows)
    plan = plan_step_offsets(recording, recording, follows=True, alignment=64)
    living: dict[int, tuple[int, int]] = {}  # three steps, allocation by allocation: number -> its place
    for moment in range(3 * count):
        number = moment % count
        for other, (_, until, following) in enumerate(rows):
            is_over = until == number if other < number else following == number and until == LIVES
            if is_over or (number == 0 and until == count):
                living.pop(other, None)
        if plan.offset[number] < 0:
            continue
        place = (int(plan.offset[number]), int(plan.offset[number] + rows[number][0]))
        assert all(place[1] <= start or end <= place[0] for start, end in living.values())
        assert place[1] <= plan.height
        living[number] = place


def test_a_plan_is_minimal():
    recording = step([100, 2, -1], [200, 3, -1], [100, LIVES, 0])
    plan = plan_step_offsets(recording, recording, follows=True, alignment=64)
    buffers, which = placeable_lifetimes(recording, recording, follows=True, alignment=64)
    assert not find_packing_violation(buffers, plan.offset[which], plan.height)
    assert (plan.height, plan.bound, plan.unshared) == (384, 384, 512)
