"""memfit.arena: arguments, the report, interrupts, and steps that do not repeat."""

import contextlib
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import memfit
from memfit.arenas import arena_library
from memfit.arenas.step_plan_lifecycle import MANY
from memfit.errors import UsageError
from support.arena_training import Training, equal_steps, kind_of

pytestmark = pytest.mark.usefixtures("empty_cpu_arena")


def test_optimize_train_false_places_no_training_step():
    with contextlib.closing(memfit.arena(device="cpu", optimize_train=False)) as arena:
        Training(arena).run(4)
        assert not arena._kinds


@pytest.mark.parametrize(
    "arguments", [{"device": "tpu"}, {"exclude": ["layer4", None]}, {"optimize_train": 0}]
)
def test_an_invalid_argument_is_named(arguments):
    with pytest.raises(UsageError, match=next(iter(arguments))):
        memfit.arena(**arguments)


@pytest.mark.parametrize(
    "settings",
    [
        {"mem_param": {"exclude_blob": "fc1"}},
        "net.prototxt",
        memfit.configure({"arena": {"optimize_test": False, "exclude": "fc1"}}),
        memfit.ArenaSettings(optimize_test=False, exclude=("fc1",)),
    ],
)
def test_an_arena_is_set_up_by_a_configuration(settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("net.prototxt").write_text('mem_param { optimize_test: false exclude_blob: "fc1" }')
    with memfit.arena(settings, device="cpu") as arena:
        assert arena.settings == memfit.ArenaSettings(optimize_test=False, exclude=("fc1",))


@pytest.mark.parametrize(
    ("settings", "options", "words"),
    [
        ({"arena": True}, {"optimize_test": True}, "Leave them out of the call"),
        ({"arena": True}, {"exclude": "fc1"}, "Leave them out of the call"),
        ({"parts_per_batch": 2}, {}, "has no settings of the arena"),
        (memfit.Plan(), {}, "has no settings of the arena"),
    ],
)
def test_settings_without_an_arena_or_given_twice_are_refused(settings, options, words):
    with pytest.raises(UsageError, match=words):
        memfit.arena(settings, **options)


def test_an_arena_that_places_no_steps_leaves_the_allocator_alone():
    settings = {"mem_param": {"optimize_train": False}}
    with memfit.arena(settings, device="cpu") as arena:
        Training(arena).run(4)
        assert arena._memory is None
        assert not arena.report().steps


def test_closing_an_arena_again_leaves_its_successor_alone():
    with memfit.arena(device="cpu") as first, memfit.arena(device="cpu") as second:
        training = Training(second).run(4)
        first.close()
        training.run(2)
        assert kind_of(second).placed == 3


def test_an_abandoned_step_is_neither_recorded_nor_compared(arena):
    def step(*, abandons=False):
        with arena.train():
            torch.ones(500)
            if abandons:
                arena.abandon_step()
                torch.ones(700)

    for _ in range(3):
        step()
    assert kind_of(arena).placed == 1
    step(abandons=True)
    assert kind_of(arena).placed == 1
    step()
    assert (kind_of(arena).placed, kind_of(arena).unplanned, kind_of(arena).drops) == (2, 0, 0)


def test_the_rest_of_an_abandoned_step_is_not_placed(arena):
    for number in range(5):
        with arena.train():
            torch.ones(500)
            if number == 4:
                arena.abandon_step()
            held = torch.ones(700)
            assert arena_library.load().arena_live(arena._memory.arena) == (number in {2, 3})
            del held


def test_a_step_after_an_abandoned_recording_is_recorded_anew(arena):
    for number in range(5):
        with arena.train():
            torch.ones(500)
            if number == 1:
                arena.abandon_step()
    assert (kind_of(arena).recorded, kind_of(arena).placed) == (2, 2)


def test_steps_do_not_nest(arena):
    with arena.train(), pytest.raises(UsageError, match="has not ended"), arena.test():
        pass


def test_a_new_arena_closes_the_one_before():
    first = memfit.arena(device="cpu")
    training = Training(first).run(4)
    with memfit.arena(device="cpu"):
        training.run(2)
    assert kind_of(first).placed == 1
    assert " run according to the plan (" in str(first.report())


def test_the_report_counts_each_kind_of_step(arena):
    Training(arena).run(5)
    report = arena.report()
    (step,) = report.steps
    assert (step.recorded, step.placed, step.unplanned, step.kept) == (3, 2, 0, 0)
    assert step.live == step.planned == report.planned < step.unshared
    assert [term.name for term in report.terms] == ["process now", "process at its peak"]
    for words in (
        "training step with float32[8, 1, 8, 8]",
        "3 steps recorded, 2 run according to the plan (",
        "0 unplanned",
        "measured",
    ):
        assert words in str(report)


@pytest.mark.slow
@pytest.mark.process
def test_importing_the_report_draws_no_random_number_of_the_script():
    code = (
        "import memfit, random\n"
        "random.seed(1)\n"
        "with memfit.arena(device='cpu') as arena: arena.report()\n"
        "print(random.random())\n"
        "random.seed(1)\n"
        "print(random.random())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    after_report, expected = done.stdout.split()
    assert after_report == expected


def test_an_arena_cannot_be_closed_or_replaced_within_a_step(arena):
    with arena.train():
        with pytest.raises(UsageError, match="has not ended"):
            arena.close()
        with pytest.raises(UsageError, match="has not ended"):
            memfit.arena(device="cpu")
    arena.close()


def test_a_step_whose_context_manager_is_deleted_has_ended(arena):
    step = arena.train()
    step.__enter__()
    with pytest.raises(UsageError, match="has not ended"), arena.train():
        pass
    del step  # as after Ctrl-C before the end of the block
    with arena.train():
        pass


def test_an_interrupt_at_any_line_leaves_a_working_arena(arena):
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
        assert equal_steps(Training(arena).run(1).seen[0], expected)


def test_kinds_of_steps_past_the_limit_are_not_placed(arena, monkeypatch):
    monkeypatch.setattr("memfit.arenas.arena.MOST_KINDS", 3)
    for length in range(1, 4):
        with arena.train(length):
            torch.ones(length)
    with pytest.warns(UserWarning, match="more than 3 kinds of steps"), arena.train(4):
        torch.ones(4)
    with arena.train(5):
        torch.ones(5)
    assert len(arena._kinds) == 3


def test_steps_that_never_repeat_are_only_recorded(arena):
    def step(number):
        with arena.train():
            torch.ones(100 + number % 2)

    for number in range(MANY - 1):
        step(number)
    with pytest.warns(UserWarning, match=rf"'training step'\. It recorded {MANY} of them, and no two"):
        step(MANY - 1)
    step(MANY)
    kind = kind_of(arena)
    assert (kind.recorded, kind.placed, kind.plan) == (MANY + 1, 0, None)
    assert "no two were the same" in str(arena.report())


def test_settings_that_change_allocations_get_separate_plans(arena):
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
