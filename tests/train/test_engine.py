"""The engine's bookkeeping: what a loss is divided by, when it steps, and bit-identical resumption."""

import copy
import os
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from memfit.errors import UsageError
from memfit.strategies.accumulation import Accumulation
from memfit.strategies.precision import LossScale, Precision
from memfit.train.engine import Engine
from support.window_loops import train_in_windows

BATCHES, K = 102, 4


def net(seed=0, dropout=0.0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3))


def data(batches=BATCHES, size=6, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 5, generator=generator), torch.randint(3, (size,), generator=generator))
        for _ in range(batches)
    ]


def mean_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


through = partial(train_in_windows, loss=mean_loss)


def engine(model, optimizer=torch.optim.SGD, lr=0.1, **options):
    plan = [options.pop(name) for name in ("accumulation", "precision") if name in options]
    return Engine(
        model, plan, optimizer=optimizer(model.parameters(), lr=lr), **{"loss": mean_loss} | options
    )


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_the_last_window_is_divided_by_its_own_length():
    ours, plain = net(), net()
    run = engine(ours, accumulation=Accumulation(batches_per_update=K))
    through(run, data())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    batches = data()
    for begin in range(0, BATCHES, K):
        window = batches[begin : begin + K]
        for batch in window:
            (mean_loss(plain, batch) / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (run.optimizer_step, run.micro_step) == (26, BATCHES)
    assert same(state(ours), state(plain))


ADAMW = {"accumulation": Accumulation(batches_per_update=K), "optimizer": torch.optim.AdamW}


@pytest.fixture(scope="module")
def whole():
    """Return the model of an uninterrupted run."""
    model = net(dropout=0.3)
    through(engine(model, **ADAMW), data())
    return model


# The start, both sides of a window's end (first, a middle one and the last full one), inside the partial last
# window, and the end; with MEMFIT_TIMES=8, each of the 102.
STOPS = (0, 1, 2, 3, 4, 5, 49, 50, 51, 52, 99, 100, 101, BATCHES)
if int(os.environ.get("MEMFIT_TIMES", "1")) > 1:
    STOPS = range(BATCHES + 1)


@pytest.mark.parametrize("stopped", STOPS)
def test_a_run_stopped_inside_or_between_windows_resumes_bit_for_bit(stopped, whole, tmp_path):
    first = engine(net(dropout=0.3), **ADAMW)
    if stopped:
        through(first, data(), until=stopped)
    first.save(tmp_path / "state")
    torch.manual_seed(99)
    second = engine(net(seed=5, dropout=0.3), **ADAMW)
    second.load(tmp_path / "state")
    assert second.micro_step == stopped
    through(second, data())
    assert (second.optimizer_step, second.micro_step) == (26, BATCHES)
    assert same(state(second.model), state(whole))


@pytest.mark.parametrize("steps", [1, 2, 4, 8])
def test_a_batch_in_parts_equals_the_whole_batch(steps):
    batch = data(1, size=16)[0]
    whole, parts = net(), net()
    result = engine(whole, max_grad_norm=0.5).step(batch)
    in_parts = engine(parts, max_grad_norm=0.5, accumulation=Accumulation(parts_per_batch=steps)).step(batch)
    assert in_parts.micro_step == steps
    assert in_parts.loss == pytest.approx(result.loss, rel=1e-6)
    assert in_parts.grad_norm == pytest.approx(result.grad_norm, rel=1e-6)
    for name, value in state(parts).items():
        torch.testing.assert_close(value, state(whole)[name], rtol=1e-6, atol=1e-7)


def test_micro_batches_are_weighted_by_their_tokens():
    """Row 1: a mean of means is not the mean."""
    x, y = torch.randn(8, 5), torch.randint(3, (8,))
    whole, parts = net(), net()
    mean_loss(whole, (x, y)).backward()
    run = engine(parts, lr=1.0, accumulation=Accumulation(batches_per_update=2))
    before = state(parts)
    for part in (slice(0, 1), slice(1, 8)):
        run.backward(mean_loss(parts, (x[part], y[part])), weight=len(x[part]))
    for (name, parameter), expected in zip(parts.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(before[name] - parameter.detach(), expected.grad, rtol=1e-5, atol=1e-6)


def test_a_window_with_a_gradient_that_is_not_finite_is_skipped():
    """Rows 11, 14, 15."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    run = Engine(
        model,
        [
            Accumulation(batches_per_update=2),
            Precision("fp16", loss_scale=LossScale("dynamic", init_scale=8.0)),
        ],
        optimizer=optimizer,
        scheduler=scheduler,
        scheduler_interval="update",
    )
    before, rate = state(model), optimizer.param_groups[0]["lr"]
    loss = mean_loss(model, data(1)[0])
    assert run.backward(loss * float("inf")) is None
    result = run.backward(mean_loss(model, data(1)[0]))
    assert (result.updated, result.found_inf, result.loss_scale) == (False, True, 8.0)
    assert same(state(model), before)
    assert optimizer.param_groups[0]["lr"] == rate
    assert all(parameter.grad is None for parameter in model.parameters())
    run.backward(mean_loss(model, data(1)[0]))
    result = run.backward(mean_loss(model, data(1)[0]))
    assert (result.updated, result.loss_scale, run.optimizer_step) == (True, 4.0, 1)
    assert optimizer.param_groups[0]["lr"] == rate / 2


def test_bf16_gradients_are_summed_in_float32():
    k = 256
    model = nn.Linear(64, 1, bias=False).to(torch.bfloat16)
    batches = [torch.randn(4, 64).to(torch.bfloat16) for _ in range(k)]
    expected, naive = torch.zeros(64, dtype=torch.float64), torch.zeros(64, dtype=torch.bfloat16)
    for batch in batches:
        model.zero_grad()
        model(batch).float().square().mean().backward()
        expected += model.weight.grad[0].double() / k
        naive += model.weight.grad[0] / k
    model.zero_grad()
    run = engine(model, lr=0.0, accumulation=Accumulation(batches_per_update=k))
    seen = {}
    run.optimizer.register_step_pre_hook(lambda *_: seen.update(grad=model.weight.grad.clone()))
    sums = run._ledger.update.gradients.sums
    write_back = sums.write_back
    sums.write_back = lambda factor: (seen.update(sum=sums._sums[model.weight] * factor), write_back(factor))
    for batch in batches:
        run.backward(model(batch).float().square().mean())
    error = (seen["sum"][0].double() - expected).norm() / expected.norm()
    assert error < 1e-6
    assert (naive.double() - expected).norm() / expected.norm() > 1e-3


@pytest.mark.parametrize("fails", [0, 1, 3])
def test_a_batch_that_runs_out_of_memory_is_repeated_in_smaller_parts(fails):
    batch = data(1, size=8)[0]
    plain = net()
    engine(plain).step(batch)
    left = [fails]

    def short_of_memory(model, part):
        if left[0] and len(part[0]) > 1:
            left[0] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return mean_loss(model, part)

    model = net()
    result = engine(model, loss=short_of_memory).step(batch)
    assert result.retried == fails
    for name, value in state(model).items():
        torch.testing.assert_close(value, state(plain)[name], rtol=1e-6, atol=1e-7)


def test_a_batch_that_never_fits_leaves_the_state_unchanged():
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    before, random = copy.deepcopy(state(model)), torch.get_rng_state()

    def never(model, part):
        model(part[0])
        raise torch.OutOfMemoryError("CUDA out of memory")

    run = engine(model, loss=never)
    # A single sample has no variance: the error is BatchNorm's, with a note that memory had run out.
    with (
        pytest.warns(UserWarning, match="Memory ran out, so memfit divides batches from here on"),
        pytest.raises(ValueError, match="more than 1 value") as error,
    ):
        run.step(data(1, size=8)[0])
    assert "into 8 parts, because memory ran out" in error.value.__notes__[0]
    assert same(state(model), before)
    assert torch.equal(torch.get_rng_state(), random)
    assert run.micro_step == 0


def test_a_window_left_open_is_an_error():
    run = engine(net(), accumulation=Accumulation(batches_per_update=K))
    windows = run.windows(data(8))
    for batch in next(windows):
        run.backward(mean_loss(run.model, batch))
        break
    with pytest.raises(UsageError, match="called for 1 of its 4 micro-batches"):
        next(windows)
    assert run.flush().updated


@pytest.mark.parametrize(("remainder", "updates"), [("step", 3), ("drop", 2), ("carry", 2)])
def test_remaining_batches_step_carry_on_or_are_dropped(remainder, updates):
    """Rows 4 and 5: also a loader that is shorter than a window."""
    run = engine(net(), accumulation=Accumulation(batches_per_update=K, remainder=remainder))
    through(run, data(10))
    assert run.optimizer_step == updates
    assert run.micro_step == 10 - 2 * (remainder == "drop")
    through(run, data(2))
    assert run.optimizer_step == updates + (remainder != "drop")
    if remainder == "carry":
        through(run, data(3))
        assert run.flush().optimizer_step == 4


def test_weights_are_given_for_all_or_none():
    run = engine(net(), accumulation=Accumulation(batches_per_update=K))
    batch = data(1)[0]
    run.backward(mean_loss(run.model, batch), weight=3)
    with pytest.raises(UsageError, match="have a weight and others do not"):
        run.backward(mean_loss(run.model, batch))
    with pytest.raises(UsageError, match=r"'weight' must be finite and at least 0, not -1\.0"):
        run.backward(mean_loss(run.model, batch), weight=-1)


def test_a_micro_batch_without_a_backward_is_an_error():
    run = engine(net(), accumulation=Accumulation(batches_per_update=K))
    micros = iter(next(run.windows(data(8))))
    next(micros)
    with pytest.raises(UsageError, match="must be called exactly once"):
        next(micros)


def test_a_loss_may_be_a_sum_with_its_weight():
    def summed(model, part):
        return F.cross_entropy(model(part[0]), part[1], reduction="sum"), len(part[0])

    batch = data(1, size=10)[0]
    whole, parts = net(), net()
    engine(whole).step(batch)
    assert (
        engine(parts, loss=summed, accumulation=Accumulation(parts_per_batch=4)).step(batch).micro_step == 4
    )
    for name, value in state(parts).items():
        torch.testing.assert_close(value, state(whole)[name], rtol=1e-6, atol=1e-7)


def test_resuming_with_less_data_is_refused(tmp_path):
    run = engine(net(), accumulation=Accumulation(batches_per_update=K))
    through(run, data(20), until=10)
    run.save(tmp_path / "state")
    resumed = engine(net(), accumulation=Accumulation(batches_per_update=K))
    resumed.load(tmp_path / "state")
    with pytest.raises(UsageError, match="after 8 batches of an epoch, but this loader has only 5"):
        through(resumed, data(5))


class Noisy(torch.utils.data.Dataset):
    """A dataset that draws random numbers for each sample, as augmentation does."""

    def __init__(self):
        self.x, self.y = (torch.cat(parts) for parts in zip(*data(10), strict=True))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + torch.randn(5) / 10, self.y[index]


@pytest.mark.parametrize("stopped", [1, 4, 5, 8, 14, 15, 17])
def test_a_shuffled_loader_resumes_with_the_same_samples(stopped, tmp_path):
    def train(run, until=None):
        loader = torch.utils.data.DataLoader(Noisy(), batch_size=4, shuffle=True)
        while run.micro_step < 30 and run.micro_step != until:
            through(run, loader, until=until)
        return run

    options = {"accumulation": Accumulation(batches_per_update=4)}
    torch.manual_seed(3)
    whole = train(engine(net(dropout=0.3), **options))
    torch.manual_seed(3)
    train(engine(net(dropout=0.3), **options), stopped).save(tmp_path / "state")
    resumed = engine(net(seed=8, dropout=0.3), **options)
    resumed.load(tmp_path / "state")
    assert same(state(train(resumed).model), state(whole.model))
