"""States that are damaged or do not match the engine are refused before anything changes."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._pytree import tree_flatten

import memfit
from memfit.errors import FileFormatError, UsageError
from support.lowest_loss import LowestLoss


def samples(count):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 6, generator=generator), torch.randint(4, (count,), generator=generator)


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def mean_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def engine(model, *plan, **options):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return memfit.Engine(model, plan, optimizer=optimizer, loss=mean_loss, **options)


def half(dtype="bf16", **options):
    return memfit.Precision(dtype, autocast=False, master_weights=True, **options)


@pytest.mark.parametrize(
    ("saved_with", "loaded_with", "words"),
    [
        (
            [],
            [half()],
            r"parameters=\['torch.float32'\], here .*; master_weights=False, here True",
        ),
        ([], [memfit.Precision("bf16")], "autocast=None, here 'bf16'"),
        ([memfit.Precision("bf16")], [], "autocast='bf16', here None"),
        ([half()], [memfit.Precision("bf16", autocast=False)], "master_weights=True, here False"),
        ([memfit.Precision("fp16")], [memfit.Precision("fp16", loss_scale=512.0)], "the loss scale differs"),
    ],
)
def test_the_precision_may_not_change_inside_a_window(saved_with, loaded_with, words):
    def made(plan):
        return engine(net(), *plan, memfit.Accumulation(batches_per_update=4))

    run, other = made(saved_with), made(loaded_with)
    x, y = samples(8)
    run.backward(mean_loss(run.model, (x.to(run.model[0].weight.dtype), y)))
    before = copy.deepcopy(other.model.state_dict())
    with pytest.raises(UsageError, match=words):
        other.load_state_dict(run.state_dict())
    assert all(torch.equal(value, other.model.state_dict()[name]) for name, value in before.items())
    made(saved_with).load_state_dict(run.state_dict())


@pytest.mark.parametrize(
    ("settings", "scales"),
    [
        (512.0, [512.0, 512.0, 512.0]),
        ({"init_scale": 4.0, "growth_interval": 1}, [8.0, 16.0, 32.0]),
        ({"init_scale": 4.0, "growth_interval": 2, "growth_factor": 4.0}, [8.0, 32.0, 32.0]),
        ("dynamic", [8.0, 8.0, 8.0]),
    ],
)
def test_a_resumed_loss_scale_follows_the_settings_of_this_run(settings, scales):
    def scaled(loss_scale):
        return engine(net(), memfit.Precision("fp16", loss_scale=loss_scale))

    run = scaled({"init_scale": 8.0})
    for _ in range(3):
        run.step(samples(8))
    resumed = scaled(settings)
    resumed.load_state_dict(run.state_dict())
    assert [resumed.step(samples(8)).loss_scale for _ in range(3)] == scales


def damaged(state, path, value):
    """Return a copy of a state with one value replaced, and with other parameters."""
    state = copy.deepcopy(state)
    state["model"] = {name: tensor + 1 for name, tensor in state["model"].items()}
    *parents, last = path.split("/")
    inner = state
    for name in parents:
        inner = inner[name]
    inner[last] = value
    return state


DAMAGE = {
    "window": {"bogus": 1},
    "window/done": 7,
    "window/loss": "x",
    "position": {},
    "position/consumed": -3,
    "position/began": {"own": []},
    "random": {},
    "random/torch": torch.zeros(3),
    "random/python": (1, 2),
    "scaler": 3,
    "optimizer": {"state": {}, "param_groups": []},
    "optimizer/state": 3,
    "optimizer_class": "torch.optim.sgd.SGD",
    "groups": [["0.weight"]],
    "callbacks": [1],
    "gradients": {"nope": torch.zeros(1)},
    "gradients/0.weight": torch.zeros(2, 2),
    "others": {"param_groups[0][0]": torch.zeros(1)},
    "micro_step": "x",
    "epoch": None,
    "finer": 0,
    "steps": True,
    "version": 2,
    "scheduler": 5,
    "scheduler_class": "torch.optim.lr_scheduler.StepLR",
    "model": [1],
    "model/0.weight": 3,
    "precision": {"parameters": ["torch.bfloat16"]},
}


@pytest.mark.parametrize("place", DAMAGE)
def test_a_damaged_state_is_refused_and_nothing_is_loaded(place):
    good = engine(net(), memfit.Accumulation(batches_per_update=4))
    good.backward(mean_loss(good.model, samples(8)))
    run = engine(net(seed=5), memfit.Accumulation(batches_per_update=4))
    run.backward(mean_loss(run.model, samples(8)))
    run.flush()
    before = copy.deepcopy(run.state_dict())
    with pytest.raises((UsageError, FileFormatError), match="Cannot resume"):
        run.load_state_dict(damaged(good.state_dict(), place, DAMAGE[place]))
    after = run.state_dict()
    assert torch.equal(after["random"]["torch"], before["random"]["torch"])
    assert (after["micro_step"], after["window"], after["gradients"]) == (1, None, {})
    assert all(torch.equal(value, after["model"][name]) for name, value in before["model"].items())
    for key, moments in before["optimizer"]["state"].items():
        assert all(torch.equal(value, after["optimizer"]["state"][key][n]) for n, value in moments.items())
    run.load_state_dict(good.state_dict())


def grouped(*order, scheduler=None):
    model = net()
    optimizer = torch.optim.AdamW([{"params": model[at].parameters()} for at in order], lr=0.1)
    return memfit.Engine(
        model,
        optimizer=optimizer,
        loss=mean_loss,
        scheduler=scheduler and scheduler(optimizer),
        scheduler_interval=scheduler and "update",
    )


def test_other_parameter_groups_are_refused():
    state = grouped(0, 2).state_dict()
    with pytest.raises(UsageError, match=r"have \[4\] parameters, but those .* have \[2, 2\]"):
        engine(net()).load_state_dict(state)
    with pytest.raises(
        UsageError, match=r"group 0 of .* has the parameter '2.weight', but .* has '0.weight'"
    ):
        grouped(2, 0).load_state_dict(state)
    grouped(0, 2).load_state_dict(state)


def test_another_scheduler_is_refused():
    def step(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def cosine(optimizer):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    made = [grouped(0, 2, scheduler=kind) for kind in (step, cosine, None)]
    for saved in made:
        for other in made:
            if saved is not other:
                with pytest.raises(
                    UsageError, match=r"saved run used .*, but .* uses (no scheduler|torch\.)"
                ):
                    other.load_state_dict(saved.state_dict())


def test_a_missing_callback_is_warned_about():
    state = engine(net(), callbacks=[LowestLoss()]).state_dict()
    with pytest.warns(UserWarning, match="This engine has no callback LowestLoss"):
        engine(net()).load_state_dict(state)


class Counting(memfit.Callback):
    """A callback that loads any state without checking it."""

    def __init__(self):
        self.seen = 0

    def on_window_end(self, engine, result):
        self.seen += 1

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def scaled(seed):
    """Return an engine whose state has every part, trained for ``seed`` steps."""
    model = net(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    run = memfit.Engine(
        model,
        [
            memfit.Precision("fp16", loss_scale={"init_scale": 8.0, "growth_interval": 1}),
            memfit.Accumulation(batches_per_update=2),
        ],
        optimizer=optimizer,
        loss=mean_loss,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        scheduler_interval="update",
        callbacks=[Counting(), LowestLoss()],
    )
    for _ in range(seed):
        updated(run)
    return run


def updated(run):
    """Make an update from two micro-batches; return its result."""
    for _ in range(2):
        with run.autocast():
            result = run.backward(mean_loss(run.model, samples(8)))
    return result


def state_inside_a_window():
    run = scaled(3)
    with run.autocast():
        run.backward(mean_loss(run.model, samples(8)))
    return run.state_dict()


ALTERED = {
    "a callback's": {"callbacks": [("Counting", {"seen": 99}), ("LowestLoss", {})]},
    "a callback's, of another kind": {"callbacks": [("Counting", {"seen": 99}), ("LowestLoss", None)]},
    "no parameter groups": {"optimizer": {"state": {}}},
    "no optimizer state": {"optimizer/state": None},
    "no parameters in a group": {"optimizer/param_groups": [{"lr": 1.0, "params": []}]},
    "a scheduler's that is a method": {"scheduler/step": 5},
    "a scheduler's that it leaves out": {"scheduler/optimizer": None},
    "a loss scale beyond float32": {"scaler/scale": 1e300},
    "gradients and no window": {"gradients": {"0.weight": torch.zeros(8, 6)}},
    "a model on meta": {"model/0.weight": torch.zeros(8, 6, device="meta")},
    "a sparse model": {"model/0.weight": torch.zeros(8, 6).to_sparse()},
    "a complex model": {"model/0.weight": torch.zeros(8, 6, dtype=torch.complex64)},
    "a model of integers": {"model/0.weight": torch.zeros(8, 6, dtype=torch.long)},
    "more parts than any batch has": {"finer": 10**30},
    "more is carried over than a window has": {"position/carried": 10**12},
}
WINDOWS = {
    "of no weight": {"window/weight": 0.0},
    "of less than no weight": {"window/weight": -1.0},
    "of less than nothing": {"window/total": -1.0},
    "of nothing": {"window/total": 0.0},
    "without a loss": {"window/loss": None},
    "with more done than planned": {"window/done": 7},
    "that was interrupted": {"window/interrupted": True},
}


def altered(state, changes):
    for path, value in changes.items():
        state = damaged(state, path, value)
    return state


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("kind", [*ALTERED, *WINDOWS])
def test_a_state_that_is_refused_changes_nothing(kind, steps):
    state = (
        altered(scaled(4).state_dict(), ALTERED[kind])
        if kind in ALTERED
        else altered(state_inside_a_window(), WINDOWS[kind])
    )
    run = scaled(steps)
    torch.manual_seed(9)
    before = copy.deepcopy(run.state_dict())
    with pytest.raises((UsageError, FileFormatError), match="Cannot resume"):
        run.load_state_dict(state)
    assert equal(run.state_dict(), before)
    other = scaled(steps)
    assert updated(run).loss == updated(other).loss
    for part in ("model", "optimizer", "scheduler", "scaler", "callbacks"):
        assert equal(run.state_dict()[part], other.state_dict()[part])
    run.load_state_dict(scaled(4).state_dict() if kind in ALTERED else state_inside_a_window())


def equal(left, right):
    (left_leaves, left_form), (right_leaves, right_form) = tree_flatten(left), tree_flatten(right)
    return left_form == right_form and all(
        torch.equal(*pair) if isinstance(pair[0], torch.Tensor) else pair[0] == pair[1]
        for pair in zip(left_leaves, right_leaves, strict=True)
    )
