"""Training on the CPU at planned offsets: the same to the bit, whatever the plan says."""

import contextlib
import gc
import json
import os
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import memfit
from memfit.arenas import native
from memfit.arenas.repeated_step import MANY, MOST_DROPS
from memfit.arenas.step_plan import StepPlan
from memfit.errors import FileFormatError, UsageError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.last = nn.Linear(4 * 64, 10)
        self.extra = 0

    def forward(self, images):
        hidden = torch.relu(self.norm(self.first(images)))
        if self.extra:
            hidden = hidden + torch.zeros(self.extra)[0]
        return self.last(hidden.flatten(1))


class Training:
    """A training whose every loss and gradient is kept."""

    def __init__(self, arena=None):
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.images, self.labels = torch.randn(8, 1, 8, 8), torch.randint(0, 10, (8,))
        self.arena = arena
        self.seen = []

    def step(self, size=8):
        with self.arena.train(self.images[:size]) if self.arena else contextlib.nullcontext():
            loss = nn.functional.cross_entropy(self.model(self.images[:size]), self.labels[:size])
            loss.backward()
            self.seen.append(
                [loss.item(), *(parameter.grad.numpy().copy() for parameter in self.model.parameters())]
            )
            self.optimizer.step()
            self.optimizer.zero_grad()

    def run(self, steps):
        for _ in range(steps):
            self.step()
        return self


def same(one, other):
    return len(one) == len(other) and all(map(_equal, one, other))


def _equal(step, other):
    return len(step) == len(other) and all(map(np.array_equal, step, other))


@pytest.fixture(autouse=True)
def _nothing_left_in_the_arena():
    """Let go of what exceptions of earlier tests hold: it may lie in the arena, of which there is one."""
    with memfit.arena(device="cpu") as one:
        place = one._memory.arena
    if native.load().arena_live(place):
        gc.collect()
    assert native.load().arena_live(place) == 0


@pytest.fixture
def arena():
    made = memfit.arena(device="cpu")
    yield made
    made.close()


def kind_of(arena):
    (kind,) = arena._kinds.values()
    return kind


def test_training_is_the_same_to_the_bit_and_all_of_it_is_placed(arena):
    placed = Training(arena).run(20)
    assert same(placed.seen, Training().run(20).seen)
    kind = kind_of(arena)
    assert (kind.recorded, kind.placed, kind.unplanned) == (3, 17, 0)  # the first one made Adam's state
    tally = native.tally(kind.memory.arena)
    assert tally["placed"] > 60
    assert tally["kept"] == 0
    assert kind.plan.height == kind.plan.bound < kind.plan.unshared


@pytest.fixture(scope="module")
def plan():
    """The plan of a training step, and what the training that is made of it comes to."""
    with contextlib.closing(memfit.arena(device="cpu")) as arena:
        Training(arena).run(3)
        return kind_of(arena).plan


def changed(plan, at, how):
    size, offset = plan.size, plan.offset
    if how == "wrong size":
        size = size.copy()
        size[at] += 4
    elif how == "missing":  # from the plan: to the plan, the step has one more
        size, offset = np.delete(size, at), np.delete(offset, at)
    elif how == "extra":
        size, offset = np.insert(size, at, 12345), np.insert(offset, at, 0)
    return StepPlan(size, offset, plan.height, plan.bound, plan.unshared)


@pytest.mark.parametrize("how", ["wrong size", "missing", "extra"])
def test_a_step_that_differs_anywhere_is_the_same_to_the_bit(plan, how):
    expected = Training().run(5).seen
    for at in range(len(plan.size)):
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
def test_nothing_that_lives_is_overwritten_by_a_plan_that_is_all_wrong(plan, seed):
    random = np.random.default_rng(seed)
    offset = random.integers(-1, plan.height // 64, len(plan.size)) * 64
    with contextlib.closing(memfit.arena(device="cpu")) as arena:
        training = Training(arena).run(3)
        kind = kind_of(arena)
        kind.drop_plan()
        kind.use_plan(StepPlan(plan.size, np.maximum(offset, -1), plan.height, plan.bound, plan.unshared))
        with pytest.warns(UserWarning, match="still occupied their slot"):
            training.run(2)
        assert native.tally(kind.memory.arena)["overlapping"] > 0
    assert same(training.seen, Training().run(5).seen)


def test_a_plan_for_other_threads_changes_nothing(arena):
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        Training(arena).run(4)
        two = kind_of(arena)
        torch.set_num_threads(1)
        training = Training(arena).run(4)
        assert len(arena._kinds) == 2
        (one,) = (kind for kind in arena._kinds.values() if kind is not two)
        one.drop_plan()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            one.use_plan(two.plan)
            training.run(2)
        assert same(training.seen, Training().run(6).seen)
    finally:
        torch.set_num_threads(threads)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.data())
def test_what_is_held_across_steps_stays_as_it_is(data):
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


def test_evaluation_and_other_batches_in_between(arena):
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


def test_a_step_that_is_not_as_planned_is_said_and_recorded_anew(arena):
    training = Training(arena).run(4)
    for drops in range(1, MOST_DROPS + 1):
        training.model.extra = 4096 * drops
        last = (
            "later steps use the default allocator" if drops == MOST_DROPS else "records the next steps again"
        )
        with pytest.warns(UserWarning, match=rf"training step with float32\[8, 1, 8, 8\] did not .*{last}"):
            training.step()
        training.run(3)
    assert kind_of(arena).placed == 2 * MOST_DROPS


def test_allocations_that_do_not_come_are_a_difference_too(arena):
    training = Training(arena)
    training.model.extra = 4096
    training.run(4)
    training.model.extra = 0
    with pytest.warns(UserWarning, match=r"\d planned allocations were not made"):
        training.step()


def test_an_exception_ends_the_step_and_drops_nothing(arena):
    training = Training(arena).run(4)
    with pytest.raises(IndexError), arena.train(training.images):
        training.model(training.images)[99]
    training.run(2)
    assert kind_of(arena).placed == 3
    assert kind_of(arena).unplanned == 0


def test_outputs_of_excluded_modules_are_there_until_the_step_ends():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=False), nn.Linear(4, 2))
    batch = torch.randn(3, 4)
    with contextlib.closing(memfit.arena(device="cpu", exclude=[model[1]])) as arena:
        for _ in range(5):
            with arena.train(batch):
                model(batch).sum().backward()
                model.zero_grad()
                (output,) = arena.outputs[model[1]]
                assert torch.equal(output, torch.relu(model[0](batch)))
                del output
            assert not arena.outputs
        assert kind_of(arena).placed > 0
    assert not model[1]._forward_hooks


def test_what_is_not_to_be_optimized_is_not():
    with contextlib.closing(memfit.arena(device="cpu", optimize_train=False)) as arena:
        Training(arena).run(4)
        assert not arena._kinds


@pytest.mark.parametrize("arguments", [{"device": "tpu"}, {"exclude": ["layer4"]}, {"exclude": [None]}])
def test_arguments_that_are_wrong_are_named(arguments):
    with pytest.raises(UsageError, match=next(iter(arguments))):
        memfit.arena(**arguments)


def test_steps_do_not_nest(arena):
    with arena.train(), pytest.raises(UsageError, match="has not ended"), arena.test():
        pass


def test_workers_of_a_loader_may_be_forked_within_a_step(arena):
    data = torch.utils.data.TensorDataset(torch.arange(32.0).reshape(8, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context="fork")
    model = nn.Linear(4, 4)
    for _ in range(4):
        with arena.train():
            total = sum(model(batch).detach().sum() for (batch,) in loader)
    assert torch.allclose(total, model(data.tensors[0]).sum())


def test_plans_in_a_file_are_carried_out_from_the_first_step(tmp_path):
    path = tmp_path / "plans.json"
    seen = []
    for _ in range(2):
        with contextlib.closing(memfit.arena(device="cpu", plans=path)) as arena:
            seen.append(Training(arena).run(6).seen)
            first, later = arena.report().steps
    assert (first.name, later.name) == (f"first {later.name}", "training step with float32[8, 1, 8, 8]")
    assert (first.recorded, first.placed, first.unplanned) == (0, 1, 0)
    assert (later.recorded, later.placed, later.unplanned) == (0, 5, 0)
    assert first.kept > later.kept == 0  # Adam's state
    assert same(*seen)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"format":"memfit plans"', '"format":"other"'),
        ('"version":1', '"version":2'),
        ('"offset":[0', '"offset":[4'),
        ('"offset":[0', '"offset":[-2'),
        ('"offset":[0', '"offset":[70368744177664'),
        ('"offset":[0', '"offset":[0,0'),
        ('"height":4096', '"height":64'),
        ('"bound":', '"bounds":'),
        ('"height":4096', '"height":-1'),
        ('{"format"', "["),
    ],
)
def test_a_file_that_holds_no_plans_is_refused(tmp_path, old, new):
    path = tmp_path / "plans.json"
    with contextlib.closing(memfit.arena(device="cpu", plans=path)) as arena:
        for _ in range(3):
            with arena.train():
                torch.ones(1000).sum()
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(FileFormatError, match=r"plans\.json"):
        memfit.arena(device="cpu", plans=path)


def test_the_next_arena_ends_the_one_before():
    first = memfit.arena(device="cpu")
    training = Training(first).run(4)
    with memfit.arena(device="cpu"):
        training.run(2)
    assert kind_of(first).placed == 1
    assert "placed: " in str(first.report())


def test_a_report_says_what_came_of_each_kind(arena):
    Training(arena).run(5)
    report = arena.report()
    (step,) = report.steps
    assert (step.recorded, step.placed, step.unplanned, step.kept) == (3, 2, 0, 0)
    assert step.live == step.planned == report.planned < step.unshared
    assert [term.name for term in report.terms] == ["process now", "process at its peak"]
    for words in (
        "training step with float32[8, 1, 8, 8]",
        "3 recorded, 2 placed",
        "0 unplanned",
        "measured",
    ):
        assert words in str(report)


def test_an_imported_report_draws_none_of_the_scripts_random_numbers():
    code = (
        "import memfit, random\n"
        "random.seed(1)\n"
        "with memfit.arena(device='cpu') as arena: arena.report()\n"
        "print(random.random())\n"
        "random.seed(1)\n"
        "print(random.random())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    one, other = done.stdout.split()
    assert one == other


def test_what_other_threads_allocate_within_a_step_is_left_alone(arena):
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
    tally = native.tally(kind_of(arena).place.arena)
    assert tally["placed"] > 0
    assert (tally["elsewhere"], tally["unplanned"]) == (1, 1)
    assert [tensor.unique().tolist() for tensor in kept] == [[float(number)] for number in range(6)]
    assert torch.equal(ours, torch.full((500,), 10.0))


def test_a_process_that_is_forked_within_a_step_has_no_step(arena):
    def step():
        with arena.train():
            return torch.ones(500)

    for _ in range(3):
        step()
    with arena.train():
        before = native.tally(kind_of(arena).place.arena)["placed"]
        child = os.fork()
        if not child:
            torch.ones(500)
            os._exit(native.tally(kind_of(arena).place.arena)["placed"] - before)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        torch.ones(500)
        assert native.tally(kind_of(arena).place.arena)["placed"] == before + 1


def test_steps_that_never_come_twice_the_same_are_recorded_and_no_more(arena):
    def step(number):
        with arena.train():
            torch.ones(100 + number % 2)

    for number in range(MANY - 1):
        step(number)
    with pytest.warns(
        UserWarning, match=f"{MANY} steps of the kind 'training step' were recorded, and no two"
    ):
        step(MANY - 1)
    step(MANY)
    kind = kind_of(arena)
    assert (kind.recorded, kind.placed, kind.plan) == (MANY + 1, 0, None)
    assert "no two were the same" in str(arena.report())


def test_settings_that_change_what_is_asked_for_have_plans_of_their_own(arena):
    model = nn.Linear(4, 4)

    def test():
        with arena.test():
            return model(torch.ones(2, 4))

    test()
    with torch.no_grad():
        test()
    with torch.autocast("cpu", torch.bfloat16):
        test()
    assert len(arena._kinds) == 3


def test_an_arena_is_not_closed_nor_replaced_within_a_step(arena):
    with arena.train():
        with pytest.raises(UsageError, match="has not ended"):
            arena.close()
        with pytest.raises(UsageError, match="has not ended"):
            memfit.arena(device="cpu")
    arena.close()


def test_a_step_that_was_left_where_nobody_ended_it_is_over(arena):
    step = arena.train()
    step.__enter__()
    with pytest.raises(UsageError, match="has not ended"), arena.train():
        pass
    del step  # as where Ctrl-C comes before the block's end is reached
    with arena.train():
        pass


def test_interrupts_at_any_line_of_a_step_leave_an_arena_that_works(arena):
    def interrupt(at):
        lines = 0

        def trace(frame, event, _):
            nonlocal lines
            if "memfit/arenas" not in frame.f_code.co_filename:
                return None
            lines += event == "line"
            if lines == at:
                lines += 1
                raise KeyboardInterrupt
            return trace

        return trace

    training = Training(arena).run(4)
    expected = Training().run(1).seen[0]
    for at in range(1, 60):
        sys.settrace(interrupt(at))
        with contextlib.suppress(KeyboardInterrupt), arena.train(training.images[:8]):
            torch.ones(3)
        sys.settrace(None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training.run(4)
        assert _equal(Training(arena).run(1).seen[0], expected)


def test_more_kinds_of_steps_than_can_be_known_are_left_alone(arena, monkeypatch):
    monkeypatch.setattr("memfit.arenas.arena.MOST_KINDS", 3)
    for length in range(1, 4):
        with arena.train(length):
            torch.ones(length)
    with pytest.warns(UserWarning, match="more than 3 kinds of steps"), arena.train(4):
        torch.ones(4)
    with arena.train(5):
        torch.ones(5)
    assert len(arena._kinds) == 3


def test_plans_of_other_runs_stay_in_the_file_and_are_no_concern_of_this_one(tmp_path):
    path = tmp_path / "plans.json"

    def run(name, size):
        with memfit.arena(device="cpu", plans=path) as arena:
            for _ in range(4):
                with arena.train(name):
                    torch.ones(size)
            return arena.report().steps

    run("theirs", 1000)
    path.write_text(path.read_text().replace('"height":4032', '"height":70000000000000'))
    assert all("mine" in step.name for step in run("mine", 2000))
    kept = json.loads(path.read_text())["plans"]
    assert [plan["shapes"] for plan in kept] == [["theirs"], ["theirs"], ["mine"], ["mine"]]
    assert {plan["height"] for plan in kept[:2]} == {70000000000000}
    with pytest.warns(UserWarning, match="not enough memory for the arena"):
        run("theirs", 1000)


def test_a_plan_that_was_dropped_is_gone_from_the_file(tmp_path):
    path = tmp_path / "plans.json"
    with memfit.arena(device="cpu", plans=path) as arena:
        for _ in range(3):
            with arena.train():
                torch.ones(1000)
        torch.ones(3)
        with arena.train():
            torch.ones(1000)
        assert [plan["is_first"] for plan in json.loads(path.read_text())["plans"]] == [True, False]
        with pytest.warns(UserWarning, match="did not match its plan"), arena.train():
            torch.ones(2000)
        assert [plan["is_first"] for plan in json.loads(path.read_text())["plans"]] == [True]


def test_a_file_that_cannot_be_written_is_told_of_at_once(tmp_path):
    with pytest.raises(UsageError, match="absent"):
        memfit.arena(device="cpu", plans=tmp_path / "absent" / "plans.json")


def test_one_module_may_be_excluded_as_it_is():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with memfit.arena(device="cpu", exclude=model) as arena, arena.train():
        output = model(torch.ones(2, 4))
        assert arena.outputs[model] == [output]
        assert list(arena.outputs) == [model]


def test_memory_of_a_dropped_plan_goes_back_to_the_system(arena):
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
