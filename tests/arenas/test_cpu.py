"""Training on the CPU at planned offsets is bit-identical, even if the plan is wrong."""

import contextlib
import os
import threading
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import memfit
from memfit.arenas import arena_library
from memfit.arenas.step_plan import StepPlan
from memfit.arenas.step_plan_lifecycle import MOST_DROPS
from support.arena_training import Training, kind_of, same

pytestmark = pytest.mark.usefixtures("empty_cpu_arena")


def test_training_is_bit_identical_and_placed_entirely(arena):
    placed = Training(arena).run(20)
    assert same(placed.seen, Training().run(20).seen)
    kind = kind_of(arena)
    assert (kind.recorded, kind.placed, kind.unplanned) == (3, 17, 0)  # the first step created Adam's state
    tally = arena_library.step_tally(kind.memory.arena)
    assert tally["placed"] > 60
    assert tally["kept"] == 0
    assert kind.plan.height == kind.plan.bound < kind.plan.unshared


@pytest.fixture(scope="module")
def plan():
    """Return the plan of a training step."""
    with contextlib.closing(memfit.arena(device="cpu")) as arena:
        Training(arena).run(3)
        return kind_of(arena).plan


def changed(plan, at, how):
    size, offset = plan.size, plan.offset
    if how == "wrong size":
        size = size.copy()
        size[at] += 4
    elif how == "missing":  # from the plan, so that the step has one allocation more
        size, offset = np.delete(size, at), np.delete(offset, at)
    elif how == "extra":
        size, offset = np.insert(size, at, 12345), np.insert(offset, at, 0)
    return StepPlan(size, offset, plan.height, plan.bound, plan.unshared)


@pytest.mark.parametrize(("first", "how"), [(0, "wrong size"), (1, "missing"), (2, "extra")])
def test_a_step_that_differs_from_its_plan_anywhere_is_bit_identical(plan, first, how):
    expected = Training().run(5).seen
    for at in range(first, len(plan.size), 3):  # together, the three kinds of difference are tried everywhere
        with contextlib.closing(memfit.arena(device="cpu")) as arena:
            training = Training(arena).run(3)
            kind = kind_of(arena)
            kind.drop_plan()
            kind.use_plan(changed(plan, at, how))
            with pytest.warns(UserWarning, match="did not match its plan"):
                training.step()
            assert kind.plan is None
            training.step()
        assert same(training.seen, expected)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_random_plan_overwrites_no_live_tensor(plan, seed):
    random = np.random.default_rng(seed)
    offset = random.integers(-1, plan.height // 64, len(plan.size)) * 64
    with contextlib.closing(memfit.arena(device="cpu")) as arena:
        training = Training(arena).run(3)
        kind = kind_of(arena)
        kind.drop_plan()
        kind.use_plan(StepPlan(plan.size, np.maximum(offset, -1), plan.height, plan.bound, plan.unshared))
        with pytest.warns(UserWarning, match="still occupied the planned places"):
            training.run(2)
        assert arena_library.step_tally(kind.memory.arena)["overlapping"] > 0
    assert same(training.seen, Training().run(5).seen)


def test_a_plan_made_with_other_threads_changes_no_result(arena):
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        Training(arena).run(4)
        with_two = kind_of(arena)
        torch.set_num_threads(1)
        training = Training(arena).run(4)
        assert len(arena._kinds) == 2
        (with_one,) = (kind for kind in arena._kinds.values() if kind is not with_two)
        with_one.drop_plan()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with_one.use_plan(with_two.plan)
            training.run(2)
        assert same(training.seen, Training().run(6).seen)
    finally:
        torch.set_num_threads(threads)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.data())
def test_tensors_kept_across_steps_keep_their_values(data):
    with contextlib.closing(memfit.arena(device="cpu")) as arena:
        held: list[tuple[torch.Tensor, torch.Tensor]] = []
        sizes = data.draw(st.lists(st.integers(1, 300), min_size=2, max_size=8))
        for number in range(6):
            dropped = data.draw(st.integers(0, 2**6 - 1))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with arena.train():
                    values = [torch.full((size,), float(number)) + torch.arange(size) for size in sizes]
            kept = [value for at, value in enumerate(values) if not dropped >> at & 1]
            held = [pair for pair in held if data.draw(st.booleans())]
            del values
            held += [(value, torch.tensor(value.tolist())) for value in kept]
            assert all(torch.equal(value, copy) for value, copy in held)


def test_evaluation_and_other_batch_sizes_between_steps_are_bit_identical(arena):
    def mixed(arena):
        training = Training(arena)
        model, found = training.model, []
        for number in range(12):
            training.step(size=5 if number % 4 == 3 else 8)
            if number % 2:
                model.eval()
                with torch.no_grad(), arena.test() if arena else contextlib.nullcontext():
                    found.append([model(training.images).numpy().copy()])
                model.train()
        return training.seen + found

    assert same(mixed(arena), mixed(None))
    assert [kind.unplanned for kind in arena._kinds.values()] == [0, 0, 0]
    assert all(kind.placed for kind in arena._kinds.values())


def test_a_step_that_differs_from_its_plan_warns_and_is_recorded_again(arena):
    training = Training(arena).run(4)
    for drops in range(1, MOST_DROPS + 1):
        training.model.extra = 4096 * drops
        last = (
            "later steps of this kind use the default allocator"
            if drops == MOST_DROPS
            else "now records the next steps of this kind"
        )
        with pytest.warns(UserWarning, match=rf"training step with float32\[8, 1, 8, 8\] did not .*{last}"):
            training.step()
        training.run(3)
    assert kind_of(arena).placed == 2 * MOST_DROPS


def test_missing_allocations_differ_from_the_plan(arena):
    training = Training(arena)
    training.model.extra = 4096
    training.run(4)
    training.model.extra = 0
    with pytest.warns(UserWarning, match=r"it skipped \d planned allocations?"):
        training.step()


def test_an_exception_ends_the_step_and_keeps_the_plan(arena):
    training = Training(arena).run(4)
    with pytest.raises(IndexError), arena.train(training.images):
        training.model(training.images)[99]
    training.run(2)
    assert kind_of(arena).placed == 3
    assert kind_of(arena).unplanned == 0


@pytest.mark.process
def test_a_data_loader_may_fork_workers_within_a_step(arena):
    data = torch.utils.data.TensorDataset(torch.arange(32.0).reshape(8, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context="fork")
    model = nn.Linear(4, 4)
    for _ in range(4):
        with arena.train():
            total = sum(model(batch).detach().sum() for (batch,) in loader)
    assert torch.allclose(total, model(data.tensors[0]).sum())


def test_allocations_of_other_threads_are_not_placed(arena):
    kept = []
    for number in range(6):
        with arena.train():
            ours = torch.full((500,), float(number))
            thread = threading.Thread(
                target=lambda value=number: kept.append(torch.full((500,), float(value)))
            )
            thread.start()
            thread.join()
            ours = ours * 2
    tally = arena_library.step_tally(kind_of(arena).memory.arena)
    assert tally["placed"] > 0
    assert (tally["elsewhere"], tally["unplanned"]) == (1, 1)
    assert [tensor.unique().tolist() for tensor in kept] == [[float(number)] for number in range(6)]
    assert torch.equal(ours, torch.full((500,), 10.0))


@pytest.mark.process
def test_a_process_forked_within_a_step_places_nothing(arena):
    def step():
        with arena.train():
            return torch.ones(500)

    for _ in range(3):
        step()
    with arena.train():
        before = arena_library.step_tally(kind_of(arena).memory.arena)["placed"]
        child = os.fork()
        if not child:
            torch.ones(500)
            os._exit(arena_library.step_tally(kind_of(arena).memory.arena)["placed"] - before)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        torch.ones(500)
        assert arena_library.step_tally(kind_of(arena).memory.arena)["placed"] == before + 1


def test_the_memory_of_a_dropped_plan_is_released(arena):
    def step(extra):
        with arena.train():
            torch.ones(50 << 18).sum()
            torch.ones(extra)

    for _ in range(4):
        step(10)
    before = arena._memory.used()[0].figure.bytes
    with pytest.warns(UserWarning, match="did not match its plan"):
        step(11)
    assert arena._memory.used()[0].figure.bytes < before - (40 << 20)
