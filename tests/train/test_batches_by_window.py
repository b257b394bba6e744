"""``fit`` gathers the loader's batches into updates, as plain loops do, and resumes between any two."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

import memfit
from memfit.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:BatchNorm layers")
EPOCHS, SIZE = 3, 4


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 3))


def loader(batches, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SIZE * batches, 5, generator=generator)
    y = torch.randint(3, (SIZE * batches,), generator=generator)
    return DataLoader(TensorDataset(x, y), SIZE, shuffle=True)


def mean_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def engine(model, gathered, remainder=None, **options):
    settings = memfit.Accumulation(batches_per_update=gathered, remainder=remainder)
    return memfit.Engine(model, settings, optimizer=optimizer(model), **{"loss": mean_loss} | options)


def plain(model, gathered, remainder, batches, epochs=EPOCHS):
    """Train in a loop written by hand; return the number of updates."""
    steps, updates = optimizer(model), 0
    data, done = loader(batches), 0
    for _ in range(epochs):
        for number, batch in enumerate(data):
            at, total = (done, epochs * batches) if remainder == "carry" else (number, batches)
            window = min(gathered, total - at // gathered * gathered)
            if remainder == "drop" and window < gathered:
                continue
            (mean_loss(model, batch) / window).backward()
            done += 1
            if at % gathered + 1 == window:
                steps.step()
                steps.zero_grad()
                updates += 1
    return updates


def state(run):
    optimizer = [value for each in run.optimizer.state.values() for value in each.values()]
    return [*run.model.state_dict().values(), *optimizer]


def assert_same(one, other):
    assert all(torch.equal(a, b) for a, b in zip(state(one), state(other), strict=True))


@pytest.mark.parametrize("remainder", ["step", "carry", "drop", None])
@pytest.mark.parametrize("gathered", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("batches", [1, 2, 7, 8])
def test_fit_equals_a_plain_loop_bit_for_bit(gathered, remainder, batches):
    ours, theirs = net(), net()
    torch.manual_seed(2)
    run = engine(ours, gathered, remainder)
    run.fit(loader(batches), EPOCHS)
    torch.manual_seed(2)
    assert plain(theirs, gathered, remainder or "step", batches) == run.optimizer_step
    assert all(map(torch.equal, ours.state_dict().values(), theirs.state_dict().values()))


class Saved(memfit.Callback):
    """Copies the run's state after each backward."""

    def __init__(self):
        self.states = []

    def on_micro_step_end(self, engine, loss):
        self.states.append(copy.deepcopy(engine.state_dict()))


@pytest.mark.parametrize("remainder", ["step", "carry", "drop"])
def test_a_run_resumes_between_any_two_batches(remainder):
    saved = Saved()
    torch.manual_seed(2)
    whole = engine(net(), 3, remainder, callbacks=[saved])
    whole.fit(loader(7), EPOCHS)
    assert len(saved.states) == whole.micro_step == (18 if remainder == "drop" else 21)
    for at, kept in enumerate(saved.states, 1):
        resumed = engine(net(seed=9), 3, remainder)
        resumed.load_state_dict(kept)
        assert resumed.micro_step == at
        resumed.fit(loader(7), EPOCHS)
        assert (resumed.micro_step, resumed.optimizer_step) == (whole.micro_step, whole.optimizer_step)
        assert_same(resumed, whole)


class SavedOnce(memfit.Callback):
    """Copies the run's state after the first epoch."""

    def on_epoch_end(self, engine):
        if engine.epoch == 1:
            self.state = copy.deepcopy(engine.state_dict())


@pytest.mark.parametrize("remainder", ["step", "carry"])
def test_a_run_resumes_between_epochs(remainder):
    torch.manual_seed(2)
    saved = SavedOnce()
    whole = engine(net(), 3, remainder, callbacks=[saved])
    whole.fit(loader(7), EPOCHS)
    resumed = engine(net(seed=9), 3, remainder)
    resumed.load_state_dict(saved.state)
    resumed.fit(loader(7), EPOCHS)
    assert_same(resumed, whole)


class RunsOut(torch.autograd.Function):
    """Runs out of memory in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError("CUDA out of memory")


def runs_out(call):
    """Return a loss that runs out of memory in a call's backward, after the last layer's gradients exist."""
    calls = 0

    def loss(model, batch):
        nonlocal calls
        calls += 1
        hidden = model[:-1](batch[0])
        return F.cross_entropy(model[-1](RunsOut.apply(hidden) if calls == call else hidden), batch[1])

    return loss


@pytest.mark.parametrize("call", [1, 2, 3, 8, 9, 10])
def test_batches_that_run_out_of_memory_are_repeated_in_smaller_parts(call):
    """Call 8 is the first of epoch 2, in a window that has one batch of epoch 1."""

    def groups(model):
        return nn.Sequential(model[0], model[1], nn.GroupNorm(2, 8), model[4])

    parts = []

    class Counts(memfit.Callback):
        def on_retry(self, engine, parts_):
            parts.append(parts_)

    torch.manual_seed(2)
    ours = engine(groups(net()), 3, "carry", loss=runs_out(call), callbacks=[Counts()])
    ours.fit(loader(7), EPOCHS)
    torch.manual_seed(2)
    theirs = engine(groups(net()), 3, "carry")
    theirs.fit(loader(7), EPOCHS)
    assert (ours.optimizer_step, parts) == (7, [4 if call in (8, 9) else 6])
    for a, b in zip(state(ours), state(theirs), strict=True):
        torch.testing.assert_close(a, b)


def test_an_error_restores_the_window_that_was_carried_over():
    torch.manual_seed(2)
    whole = engine(net(), 3, "carry")
    whole.fit(loader(7), EPOCHS)
    calls = 0

    def loss(model, batch):
        nonlocal calls
        calls += 1
        if calls == 9:
            raise RuntimeError("the second batch of epoch 2")
        return mean_loss(model, batch)

    torch.manual_seed(2)
    run, data = engine(net(), 3, "carry", loss=loss), loader(7)
    with pytest.raises(RuntimeError, match="the second batch of epoch 2"):
        run.fit(data, EPOCHS)
    assert run.micro_step == 7
    run.fit(data, EPOCHS)
    assert_same(run, whole)


def test_a_loss_with_its_own_divisor_weighs_batches():
    def tokens(model, batch):
        kept = batch[1] > 0
        return F.cross_entropy(model(batch[0])[kept], batch[1][kept], reduction="sum"), int(kept.sum())

    model, reference = net(), net()
    for each in (*model[2:4], *reference[2:4]):  # nothing is dropped, and the statistics stay
        each.eval()
    data = list(loader(3))
    run = memfit.Engine(
        model,
        memfit.Accumulation(batches_per_update=3),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=tokens,
    )
    run.fit(data)
    x, y = (torch.cat(each) for each in zip(*data, strict=True))
    total, kept = tokens(reference, (x, y))
    (total / kept).backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "setting",
    [
        {"accumulate_grad_batches": 4},
        {"accumulative_counts": 4},
        {"gradient_accumulation_steps": 4},
        {"mini_steps": 4},
        {"iter_size": 4},
        {"optimizer_config": {"type": "GradientCumulativeOptimizerHook", "cumulative_iters": 4}},
    ],
)
def test_settings_of_others_gather_as_theirs_do(setting):
    """8 batches of 2 make 2 updates of 4 batches."""
    model = net()
    run = memfit.Engine(model, setting, optimizer=optimizer(model), loss=mean_loss)
    run.fit([(torch.ones(2, 5), torch.ones(2, dtype=torch.long))] * 8)
    assert (run.micro_step, run.optimizer_step) == (8, 2)


def cells(model, mini_steps, batches, epochs):
    """Train as the three cells of MindSpore's tutorial do, and return the number of updates."""
    steps, updates = torch.optim.SGD(model.parameters(), lr=0.1), 0
    for _ in range(epochs):
        for number, batch in enumerate(batches):
            mean_loss(model, batch).backward()
            if (number + 1) % mini_steps == 0:
                steps.step()
                steps.zero_grad()
                updates += 1
    return updates


@pytest.mark.parametrize(("batches", "updates"), [(8, (4, 4)), (6, (2, 3))])
def test_mini_steps_take_the_mean_and_count_on_where_the_cells_sum_and_count_anew(batches, updates):
    """docs/settings.md and docs/guide/articles.md say so, and that the loss times four gives the same."""
    generator = torch.Generator().manual_seed(2)
    data = [
        (torch.randn(4, 5, generator=generator), torch.randint(3, (4,), generator=generator))
        for _ in range(batches)
    ]

    def trained(train):
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        return train(model), model.weight

    def by_engine(model, times):
        run = memfit.Engine(
            model,
            {"mini_steps": 4},
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss=lambda model, batch: times * mean_loss(model, batch),
        )
        run.fit(data, 2)
        return run.optimizer_step

    by_cells, weight = trained(lambda model: cells(model, 4, data, 2))
    mean, of_mean = trained(lambda model: by_engine(model, 1))
    _, of_sum = trained(lambda model: by_engine(model, 4))
    assert (by_cells, mean) == updates
    assert not torch.allclose(of_mean, weight, rtol=0, atol=1e-3)
    assert torch.allclose(of_sum, weight, rtol=0, atol=1e-6) == (batches % 4 == 0)


def test_methods_that_would_divide_or_gather_otherwise_are_refused():
    gathers, divides = (
        engine(net(), 2),
        memfit.Engine(
            (model := net()),
            memfit.Accumulation(parts_per_batch=2),
            optimizer=optimizer(model),
            loss=mean_loss,
        ),
    )
    batch = next(iter(loader(1)))
    for call, message in (
        (
            lambda: gathers.step(batch),
            "engine.step makes one update from each batch, but .* several make one",
        ),
        (lambda: next(gathers.through([batch])), "engine.through makes one update from each batch"),
        (lambda: next(divides.windows([batch])), "engine.windows takes each batch as one micro-batch, but"),
        (lambda: divides.backward(torch.ones(())), "engine.backward takes each batch as one micro-batch"),
    ):
        with pytest.raises(UsageError, match=message):
            call()


def test_the_bar_says_how_many_batches_make_an_update(capsys):
    from rich.console import Console

    console = Console(width=150, force_terminal=True, color_system=None)
    engine(net(), 4, callbacks=[memfit.ProgressBar(console)]).fit(loader(8))
    assert "8/8 batches, 4 per update" in capsys.readouterr().out
