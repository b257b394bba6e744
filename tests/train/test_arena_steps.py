"""An engine whose configuration asks for an arena: each update and each validation batch is a step of it."""

import copy
import gc
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

import memfit
from memfit.errors import UsageError

MEM_PARAM = {"mem_param": {"optimize_train": True, "optimize_test": True, "exclude_blob": "fc1"}}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.drop, self.fc1, self.fc2 = nn.Dropout(0.2), nn.Linear(256, 16), nn.Linear(16, 5)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(self.drop(torch.relu(self.norm(self.conv(x)))).flatten(1))))


def data(samples=48, size=8):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 1, 8, 8, generator=generator)
    return DataLoader(TensorDataset(x, torch.randint(5, (samples,), generator=generator)), size)


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def engine(*settings, loss=loss, **options):
    torch.manual_seed(0)
    model = Net()
    given = {name: value for each in settings for name, value in each.items()}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return memfit.Engine(model, given, optimizer=optimizer, loss=loss, **options)


def fitted(*settings, epochs=3, **options):
    run = engine(*settings, **options)
    run.fit(data(), epochs, validate=data(32, 16))
    return run


def parameters(run):
    return [tensor.clone() for tensor in run.model.state_dict().values()]


def equal(one, two):
    return all(map(torch.equal, one, two))


def steps(run, kind="training"):
    return [step for step in run.arena.report().steps if step.name.startswith(kind)]


@pytest.fixture(autouse=True)
def _no_arena_is_open():
    """Close arenas whose engines the exceptions of earlier tests keep alive."""
    memfit.arena(device="cpu").close()


def by_hand():
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(3):
        for batch in data():
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            for batch in data(32, 16):
                loss(model, batch)
        model.train()
    return list(model.state_dict().values())


def test_training_in_an_arena_equals_a_plain_loop_bit_for_bit():
    run = fitted(MEM_PARAM)
    assert equal(parameters(run), by_hand())
    (train,), (test,) = steps(run), steps(run, "test")
    assert (train.recorded, train.placed, train.unplanned) == (3, 15, 0)
    assert (test.recorded, test.placed, test.unplanned) == (2, 4, 0)
    assert train.planned == train.live < train.unshared


@pytest.mark.filterwarnings("ignore:BatchNorm layers:UserWarning")
@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        ({"parts_per_batch": 2, "max_grad_norm": 0.1}, 1),
        ({"batches_per_update": 2}, 1),
        # 4; 2 that stay open; 2 that complete them; the last 2
        ({"batches_per_update": 4, "remainder": "carry"}, 4),
        ({"bf16": True, "master_weights": True, "precision": {"autocast": False}}, 1),
        ({"checkpointing": "drop"}, 1),
        ({"step_in_backward": True}, 1),
    ],
)
def test_every_way_of_training_has_the_same_result_in_an_arena(settings, kinds):
    def cast(model, batch):
        return F.cross_entropy(model(batch[0].to(model.fc1.weight.dtype)), batch[1])

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Checkpointing drop")
        plain, run = fitted(settings, loss=cast, epochs=5), fitted(settings, MEM_PARAM, loss=cast, epochs=5)
    assert equal(parameters(run), parameters(plain))
    assert run.metrics == plain.metrics
    assert len(steps(run)) == kinds
    assert steps(run)[0].placed > 0
    assert sum(step.unplanned for step in run.arena.report().steps) == 0


def test_only_the_phases_that_are_set_are_placed():
    run = fitted({"mem_param": {"exclude_blob": "fc1"}})
    assert steps(run)[0].placed
    assert not steps(run, "test")  # Caffe's default
    del run
    run = fitted({"mem_param": {"optimize_train": False, "optimize_test": True}})
    assert steps(run, "test")[0].placed
    assert not steps(run)
    assert fitted({"arena": False}).arena is None


@pytest.mark.filterwarnings("ignore:BatchNorm layers:UserWarning")
def test_a_loop_of_windows_is_placed_by_the_script():
    plain = engine({"batches_per_update": 2})
    plain.fit(data(), 2)
    run = engine({"batches_per_update": 2, "arena": True})
    for _ in range(2):
        for window in run.windows(data()):
            with run.arena.train(len(window)):
                for batch in window:
                    run.backward(loss(run.model, batch))
    assert equal(parameters(run), parameters(plain))
    assert [(step.name, step.placed) for step in steps(run)] == [("training step with 2", 3)]


def test_only_the_shapes_of_a_batch_tell_steps_apart():
    run = engine({"arena": True}, loss=lambda model, batch: loss(model, batch["data"]))
    run.fit([{"data": each, "number": number} for number, each in enumerate(data())])
    assert [(step.name, step.placed) for step in steps(run)] == [
        ("training step with float32[8, 1, 8, 8], int64[8]", 3)
    ]


class Reading(memfit.Callback):
    """Reads an excluded output at the end of each window."""

    def __init__(self):
        self.read = []

    def on_window_end(self, engine, result):
        self.read.append([output.clone() for output in engine.arena.outputs["fc1"]])


@pytest.mark.filterwarnings("ignore:BatchNorm layers:UserWarning")
def test_excluded_outputs_are_readable_in_callbacks_and_after_the_step():
    reading, expected = Reading(), []
    run = engine({"arena": {"exclude": "fc1"}, "parts_per_batch": 2}, callbacks=[reading])
    hook = run.model.fc1.register_forward_hook(lambda *given: expected.append(given[2].detach().clone()))
    for batch in data():
        run.step(batch)
        assert equal(run.arena.outputs["fc1"], expected[-2:])
    hook.remove()
    assert len(reading.read) == 6
    assert equal([output for outputs in reading.read for output in outputs], expected)
    run.validate(data(32, 16))
    assert [len(output) for output in run.arena.outputs["fc1"]] == [16]


def short_of_memory(fits):
    """Return a loss that runs out of memory, after its forward, for more than this many samples."""

    def limited(model, batch):
        value = loss(model, batch)
        if model.training and len(batch[0]) > fits:
            raise torch.OutOfMemoryError
        return value

    return limited


@pytest.mark.filterwarnings("ignore:BatchNorm layers:UserWarning", "ignore:Memory ran out:UserWarning")
def test_a_batch_that_runs_out_of_memory_is_retried_inside_its_step():
    with pytest.warns(UserWarning, match="Memory ran out"):
        plain = fitted(loss=short_of_memory(4))
    reading = Reading()
    with pytest.warns(UserWarning, match="Memory ran out"):
        run = fitted(MEM_PARAM, loss=short_of_memory(4), callbacks=[reading])
    assert equal(parameters(run), parameters(plain))
    assert [len(output) for output in reading.read[0]] == [4, 4]  # of the last attempt only
    whole, halves = steps(run)
    assert (whole.recorded, whole.placed) == (0, 0)
    assert halves.name.startswith("training step with 2 times the parts, float32")
    assert (halves.recorded, halves.placed, halves.unplanned) == (2, 15, 0)


@pytest.mark.filterwarnings("ignore:BatchNorm layers:UserWarning", "ignore:Memory ran out:UserWarning")
def test_a_planned_step_that_runs_out_of_memory_is_not_compared_with_its_plan():
    scarce = []

    def limited(model, batch):
        return short_of_memory(4 if scarce else 8)(model, batch)

    run = engine(MEM_PARAM, loss=limited)
    run.fit(data())
    assert steps(run)[0].placed == 3
    scarce.append(True)
    run.fit(data(), 2)  # a step that differs from its plan would be warned about, and fail the test
    assert [(step.placed, step.unplanned) for step in steps(run)] == [(3, 0), (3, 0)]


def test_an_error_in_a_step_leaves_the_arena_ready():
    def failing(model, batch):
        value = loss(model, batch)
        if failing.fails:
            raise ZeroDivisionError
        return value

    failing.fails = False
    run = engine(MEM_PARAM, loss=failing)
    run.fit(data())
    failing.fails = True
    with pytest.raises(ZeroDivisionError):
        run.step(next(iter(data())))
    failing.fails = False
    assert not run.arena.outputs
    run.step(next(iter(data())))
    assert steps(run)[0].placed == 4


def test_a_window_that_is_skipped_is_not_compared_with_its_plan():
    def overflowing(model, batch):
        return loss(model, batch) * (torch.inf if overflowing.overflows else 1.0)

    run = engine(MEM_PARAM, {"fp16": {"loss_scale": 1.0}}, loss=overflowing)
    overflowing.overflows = False
    run.fit(data())
    overflowing.overflows = True
    assert run.step(next(iter(data()))).found_inf
    overflowing.overflows = False
    run.step(next(iter(data())))
    assert (steps(run)[0].placed, steps(run)[0].unplanned) == (4, 0)


def test_saving_now_and_then_changes_no_step(tmp_path):
    run = fitted(MEM_PARAM, callbacks=[memfit.Saving(tmp_path / "run.pt", every=5)])
    assert (steps(run)[0].placed, steps(run)[0].unplanned) == (15, 0)


def test_a_run_resumes_with_or_without_an_arena():
    straight = engine()
    straight.fit(data(), 2)
    for before, after in ((MEM_PARAM, {}), ({}, MEM_PARAM)):
        first, second = engine(before), engine(after)
        first.fit(data(), 1)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        second.fit(data(), 2)
        assert equal(parameters(second), parameters(straight))


# ---- Whose arena it is


def test_the_engine_uses_the_arena_of_the_script():
    configuration = memfit.configure(MEM_PARAM)
    with memfit.arena(configuration, device="cpu") as arena:
        run = fitted(MEM_PARAM)
        assert run.arena is arena
        del run
        gc.collect()
        assert arena.is_open
        assert arena.report().steps[0].placed


def test_an_arena_of_other_settings_is_refused():
    with (
        memfit.arena(device="cpu", optimize_test=False),
        pytest.raises(UsageError, match="same configuration"),
    ):
        engine({"arena": True})


def test_an_engine_without_settings_leaves_the_arena_to_the_script():
    with memfit.arena(device="cpu") as arena:
        run = engine()
        assert run.arena is None
        for _ in range(5):
            batch = next(iter(data()))
            with arena.train(batch):
                run.step(batch)
        assert [step.placed for step in arena.report().steps] == [1]


def test_updates_within_a_step_of_the_script_are_part_of_it():
    one, two = engine({"arena": True}), engine({"arena": True})
    batch = next(iter(data()))
    for _ in range(5):
        with one.arena.train(batch):
            one.step(batch)
            two.step(batch)
    assert [(step.recorded, step.placed) for step in steps(one)] == [(4, 1)]


def test_the_arena_of_an_engine_is_closed_with_the_last_engine_that_uses_it():
    one, two = engine(MEM_PARAM), engine(MEM_PARAM)
    arena = one.arena
    assert two.arena is arena
    del one
    gc.collect()
    assert arena.is_open
    del two
    gc.collect()
    assert not arena.is_open


def test_an_engine_with_other_settings_replaces_the_arena_of_an_engine():
    one = engine({"arena": {"optimize_test": False}})
    with pytest.warns(UserWarning, match=r"closes the first arena: from here on, that engine trains without"):
        two = engine({"arena": True})
    assert not one.arena.is_open
    one.fit(data())
    two.fit(data())
    assert steps(two)[0].placed == 3


@pytest.mark.filterwarnings("ignore:BatchNorm layers:UserWarning")
def test_engines_that_share_an_arena_have_plans_of_their_own():
    one, two = engine({"arena": True}), engine({"arena": True, "parts_per_batch": 2})
    for batch in data():
        one.step(batch)
        two.step(batch)
    first, second = steps(one)
    assert second.name == first.name.replace("with ", "with engine 2, ")
    assert first.unplanned == second.unplanned == 0
    assert first.placed > 0
    assert second.placed > 0


def test_an_unknown_name_is_refused_when_the_engine_is_made_and_opens_no_arena():
    with pytest.raises(UsageError, match=r"no module of Net has the name or class 'fc'.*Nearest: fc2, fc1"):
        engine({"arena": {"exclude": "fc"}})
    gc.collect()
    run = engine({"arena": True})  # another arena would be of other settings
    assert run.arena.is_open


def test_apply_refuses_the_settings_of_the_arena():
    with pytest.raises(UsageError, match=r"memfit\.arena\(configuration\) and memfit\.apply"):
        memfit.apply(Net(), MEM_PARAM)
