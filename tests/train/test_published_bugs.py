"""Bugs that other frameworks shipped, by their rows in docs/training.md: memfit has none of them.

Each test fails on the reported behaviour. Rows about checkpointing are in tests/strategies.
"""

import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import memfit
from memfit.errors import UsageError
from support.window_loops import train_in_windows

SGD = torch.optim.SGD


def net(seed=0, *, norm=None):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), norm or nn.Identity(), nn.Tanh(), nn.Linear(8, 4))


def batch(size, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 6, generator=generator), torch.randint(4, (size,), generator=generator)


def mean_loss(model, data):
    return F.cross_entropy(model(data[0]), data[1])


def engine(model, *plan, lr=1.0, **options):
    return memfit.Engine(
        model, plan, optimizer=SGD(model.parameters(), lr=lr), **{"loss": mean_loss} | options
    )


def gradients(model, data):
    """Return the gradients of one batch, in plain PyTorch."""
    model.zero_grad()
    mean_loss(model, data).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


class Seen(memfit.Callback):
    """A callback that keeps the gradients that the optimizer sees."""

    def on_optimizer_step_begin(self, engine):
        self.gradients = [parameter.grad.clone() for parameter in engine.model.parameters()]


def assert_close(found, expected):
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-7)


def test_row_01_micro_batches_are_weighted_by_their_tokens():
    x, y = batch(8)
    y[:5] = -100
    y[0] = 2  # four tokens in total, one of them in the first half

    def tokens(model, data):
        return F.cross_entropy(model(data[0]), data[1], reduction="sum"), (data[1] != -100).sum()

    seen = Seen()
    engine(net(), memfit.Accumulation(parts_per_batch=2), loss=tokens, callbacks=[seen]).step((x, y))
    assert_close(seen.gradients, gradients(net(), (x, y)))
    naive = [
        (left + right) / 2
        for left, right in zip(
            gradients(net(), (x[:4], y[:4])), gradients(net(), (x[4:], y[4:])), strict=True
        )
    ]
    assert max((a - b).abs().max() for a, b in zip(naive, seen.gradients, strict=True)) > 1e-2


@pytest.mark.parametrize(("size", "steps"), [(4, 1), (1, 4), (2, 2)])
def test_row_02_the_divisor_has_one_owner(size, steps):
    data = batch(4)
    reference = engine(net(), max_grad_norm=100.0).step(data)
    run = engine(
        net(), memfit.Accumulation(parts_per_batch=steps, micro_batch_size=size), max_grad_norm=100.0
    )
    result = run.step(data)
    assert result.grad_norm == pytest.approx(reference.grad_norm, rel=1e-6)
    assert result.loss == pytest.approx(reference.loss, rel=1e-6)


class Saved:
    """A tensor that was saved for backward."""

    def __init__(self, tensor):
        self.tensor = tensor


@pytest.mark.parametrize("weighted", [False, True])
def test_row_03_tensors_saved_for_backward_do_not_grow_with_the_window(weighted):
    def peak_alive(steps):
        alive, peak = weakref.WeakSet(), 0

        def pack(tensor):
            nonlocal peak
            saved = Saved(tensor)
            alive.add(saved)
            peak = max(peak, len(alive))
            return saved

        def loss(model, data):
            out = model(data[0])
            if weighted:
                return F.cross_entropy(out, data[1], reduction="sum"), len(data[1])
            return F.cross_entropy(out, data[1])

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            engine(net(), memfit.Accumulation(parts_per_batch=steps), loss=loss).step(batch(8))
        return peak

    assert peak_alive(8) == peak_alive(2) > 0


def test_row_04_a_partial_window_is_divided_by_its_own_length():
    batches = [batch(4, seed) for seed in range(5)]
    seen = Seen()
    run = engine(net(), memfit.Accumulation(batches_per_update=2), lr=0.0, callbacks=[seen])
    for window in run.windows(batches):
        for data in window:
            run.backward(mean_loss(run.model, data))
    assert_close(seen.gradients, gradients(net(), batches[4]))


@pytest.mark.parametrize(("policy", "updates"), [("step", 1), ("drop", 0), ("carry", 0)])
def test_row_05_a_loader_shorter_than_a_window_is_a_partial_window(policy, updates):
    seen = Seen()
    run = engine(net(), memfit.Accumulation(batches_per_update=4, remainder=policy), lr=0.0, callbacks=[seen])
    batches = [batch(4, seed) for seed in range(3)]
    for window in run.windows(batches):
        for data in window:
            run.backward(mean_loss(run.model, data))
    assert run.optimizer_step == updates
    if updates:
        whole = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
        assert_close(seen.gradients, gradients(net(), whole))


def test_row_06_the_last_window_after_a_resume_is_counted_from_the_data():
    """10 batches, K = 4: resumed after 6, the last window still has 2 and is divided by 2."""
    batches = [batch(4, seed) for seed in range(10)]
    first = engine(net(), memfit.Accumulation(batches_per_update=4))
    train_in_windows(first, batches, mean_loss, until=6)
    seen = Seen()
    second = engine(net(3), memfit.Accumulation(batches_per_update=4), callbacks=[seen])
    second.load_state_dict(first.state_dict())
    before = None

    class Before(memfit.Callback):
        def on_window_begin(self, engine):
            nonlocal before
            before = [parameter.detach().clone() for parameter in engine.model.parameters()]

    second.callbacks = (*second.callbacks, Before())
    train_in_windows(second, batches, mean_loss)
    assert second.optimizer_step == 3
    plain = net()
    with torch.no_grad():
        for parameter, value in zip(plain.parameters(), before, strict=True):
            parameter.copy_(value)
    last = tuple(torch.cat(parts) for parts in zip(*batches[8:], strict=True))
    assert_close(seen.gradients, gradients(plain, last))


def test_row_07_a_resume_inside_a_window_keeps_its_gradients():
    run, resumed, plain = (engine(net(), memfit.Accumulation(batches_per_update=4)) for _ in range(3))
    data = [batch(4, seed) for seed in range(4)]
    for part in data[:2]:
        run.backward(mean_loss(run.model, part))
    resumed.load_state_dict(run.state_dict())
    for part in data[2:]:
        resumed.backward(mean_loss(resumed.model, part))
    for part in data:
        plain.backward(mean_loss(plain.model, part))
    for left, right in zip(resumed.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(left, right)


def test_row_08_a_resume_continues_with_the_next_samples():
    seen = []

    def loss(model, data):
        seen.append(data[0, 0].item())
        return model(data).square().mean()

    loader = torch.arange(12.0).repeat_interleave(12).reshape(12, 2, 6)
    first = engine(net(), memfit.Accumulation(parts_per_batch=2), loss=loss, lr=0.01)
    for data in first.through(loader):
        first.step(data)
        if first.batch == 5:
            break
    second = engine(net(), memfit.Accumulation(parts_per_batch=2), loss=loss, lr=0.01)
    second.load_state_dict(first.state_dict())
    assert (second.micro_step, second.optimizer_step) == (10, 5)
    second.fit(loader)
    assert (second.micro_step, second.optimizer_step) == (24, 12)
    assert seen == [number for number in range(12) for _ in range(2)]


def scheduled(plan, loss=mean_loss):
    """Return an engine whose learning rate is halved by each update, and its scheduler."""
    model = net()
    optimizer = SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    more = {"scheduler": scheduler, "scheduler_interval": "update"}
    return memfit.Engine(model, plan, optimizer=optimizer, loss=loss, **more), scheduler


def test_rows_09_and_10_the_scheduler_steps_once_per_update():
    run, scheduler = scheduled(memfit.Accumulation(parts_per_batch=4))
    rates = []
    for _ in range(3):
        rates.append(scheduler.optimizer.param_groups[0]["lr"])
        run.step(batch(8))
    assert rates == [1.0, 0.5, 0.25]


def fp16(**options):
    return memfit.Precision("fp16", loss_scale=memfit.LossScale(**options))


def infinite(at):
    """Return a loss that is infinite in some of its calls."""
    calls = iter(range(1000))
    return lambda model, data: mean_loss(model, data) * (float("inf") if next(calls) in at else 1.0)


def test_row_11_the_scheduler_waits_if_an_update_is_skipped():
    run, scheduler = scheduled(fp16(), infinite({1}))
    results = [run.step(batch(8)) for _ in range(3)]
    assert [result.updated for result in results] == [True, False, True]
    assert [result.found_inf for result in results] == [False, True, False]
    assert (scheduler.last_epoch, run.optimizer_step) == (2, 2)


def test_row_12_gradients_are_unscaled_once():
    seen = Seen()
    run = engine(
        net(),
        fp16(init_scale=1024.0),
        memfit.Accumulation(parts_per_batch=4),
        callbacks=[seen],
        max_grad_norm=100.0,
    )
    result = run.step(batch(8))
    for found, expected in zip(seen.gradients, gradients(net(), batch(8)), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-3)  # fp16's rounding, far below 1024
    assert result.loss_scale == 1024.0


def test_row_12_a_full_window_accepts_no_more():
    run = engine(net(), memfit.Accumulation(batches_per_update=2))
    window = next(run.windows([batch(4), batch(4)]))
    for data in window:
        run.backward(mean_loss(run.model, data))
        if len(window) == run.micro_step:
            with pytest.raises(UsageError, match="called more than"):
                run.backward(mean_loss(run.model, data))


def test_row_13_gradients_are_clipped_once_per_window():
    data = batch(8)
    expected = gradients(net(), data)
    norm = torch.stack([gradient.norm() for gradient in expected]).norm()
    seen = Seen()
    result = engine(net(), memfit.Accumulation(parts_per_batch=4), callbacks=[seen], max_grad_norm=0.1).step(
        data
    )
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    assert_close(seen.gradients, [gradient * (0.1 / norm) for gradient in expected])


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_rows_14_15_17_one_infinite_micro_batch_skips_its_window_and_no_other(at):
    seen = Seen()
    model = net()
    before = [parameter.clone() for parameter in model.parameters()]
    run = engine(
        model,
        fp16(init_scale=8.0),
        memfit.Accumulation(parts_per_batch=4),
        loss=infinite({at}),
        lr=0.0,
        callbacks=[seen],
    )
    skipped = run.step(batch(8))
    assert (skipped.updated, skipped.loss_scale) == (False, 8.0)
    assert not hasattr(seen, "gradients")
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(left, right) for left, right in zip(before, model.parameters(), strict=True))
    applied = run.step(batch(8))
    assert (applied.updated, applied.loss_scale) == (True, 4.0)
    for found, expected in zip(seen.gradients, gradients(net(), batch(8)), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-3)


def test_row_24_the_warning_about_batch_norm_names_alternatives():
    """SyncBatchNorm is no alternative: it joins the batches of ranks, not of micro-batches."""
    words = r"BatchNorm layers such as 1 .* each micro-batch of a window.*GroupNorm.*eval\(\)\)\.$"
    with pytest.warns(UserWarning, match=words):
        engine(net(norm=nn.BatchNorm1d(8)), memfit.Accumulation(parts_per_batch=2))
    engine(net(norm=nn.GroupNorm(2, 8)), memfit.Accumulation(parts_per_batch=2))
    engine(net(norm=nn.BatchNorm1d(8)).eval(), memfit.Accumulation(parts_per_batch=2))
    engine(net(norm=nn.BatchNorm1d(8)))


@pytest.mark.parametrize(("dtype", "expected"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_row_32_low_precision_takes_effect_on_a_cpu(dtype, expected):
    model = net()
    dtypes = []
    model[0].register_forward_hook(lambda *seen: dtypes.append(seen[-1].dtype))
    assert engine(model, memfit.Precision(dtype)).step(batch(4)).updated
    assert dtypes == [expected]
