"""Updates that are held back in a script's own loop."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from memfit.injection import hold_back_updates
from memfit.injection.hold_back_updates import HeldBackUpdates
from memfit.patching.installed_hooks import InstalledHooks


@pytest.fixture
def refusals():
    """Hold back every update but each third; return why memfit refused to."""
    hooks, found = InstalledHooks(), []
    HeldBackUpdates(3, found.append).install(hooks)
    yield found
    hooks.remove()


def model_and_data():
    torch.manual_seed(0)
    return nn.Linear(4, 3), torch.randn(12, 2, 4), torch.randint(3, (12, 2))


def accumulated(make_optimizer):
    """Return the weights that a loop which accumulates three batches reaches."""
    model, inputs, labels = model_and_data()
    optimizer = make_optimizer(model.parameters())
    for number, (x, y) in enumerate(zip(inputs, labels, strict=True)):
        functional.cross_entropy(model(x), y).backward()
        if (number + 1) % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model.weight


@pytest.mark.parametrize("clear_first", [True, False])
@pytest.mark.parametrize("clear", ["optimizer", "model"])
def test_a_plain_loop_trains_as_one_that_accumulates(refusals, clear_first, clear):
    model, inputs, labels = model_and_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    cleared = optimizer if clear == "optimizer" else model
    for x, y in zip(inputs, labels, strict=True):
        if clear_first:
            cleared.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()
        if not clear_first:
            cleared.zero_grad()
    assert not refusals
    hooked = model.weight.detach().clone()
    refusals.append("from here on, the loop below creates its optimizer under the hooks")
    assert torch.equal(hooked, _without_hooks(lambda: accumulated(lambda p: torch.optim.AdamW(p, lr=0.1))))


@pytest.fixture
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_gradients_that_ddp_moves_to_other_buckets_are_not_dropped(refusals, one_rank):
    model, inputs, labels = model_and_data()
    model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for x, y in zip(inputs, labels, strict=True):
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model._has_rebuilt_buckets
    assert not refusals
    hooked = model.module.weight.detach().clone()
    assert torch.equal(hooked, _without_hooks(lambda: accumulated(lambda p: torch.optim.AdamW(p, lr=0.1))))


@pytest.mark.parametrize(("settles", "times"), [(True, 4), (False, 0)])
def test_collectives_settle_where_an_update_is_held_back_unless_work_finishes_late(
    monkeypatch, settles, times
):
    settled, hooks = [], InstalledHooks()
    HeldBackUpdates(3, pytest.fail, settles=settles).install(hooks)
    monkeypatch.setattr(hold_back_updates, "wait_until_collectives_released", lambda: settled.append(True))
    model, inputs, labels = model_and_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for x, y in zip(inputs[:6], labels[:6], strict=True):
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    hooks.remove()
    assert len(settled) == times


def _without_hooks(run):
    """Run with optimizers whose ``step`` and ``zero_grad`` are PyTorch's own."""
    kind, names = torch.optim.Optimizer, ("__init__", "zero_grad")
    hooked = [getattr(kind, name) for name in names]
    for name, method in zip(names, hooked, strict=True):
        setattr(kind, name, method.__wrapped__)
    try:
        return run()
    finally:
        for name, method in zip(names, hooked, strict=True):
            setattr(kind, name, method)


def test_a_closure_still_runs_for_each_micro_batch(refusals):
    model, inputs, labels = model_and_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x, y in zip(inputs[:3], labels[:3], strict=True):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        before = model.weight.detach().clone()
        losses.append(optimizer.step(closure))
        assert torch.equal(before, model.weight) == (len(losses) < 3)
    assert not refusals
    assert all(loss.item() > 0 for loss in losses)


def test_closures_that_clear_gradients_train_as_a_loop_that_accumulates(refusals):
    """The gradients of all micro-batches count, also if the one that makes the update clears them first."""
    model, inputs, labels = model_and_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in zip(inputs, labels, strict=True):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert not refusals
    reached = model.weight.detach().clone()
    assert torch.equal(reached, _without_hooks(lambda: accumulated(lambda p: torch.optim.SGD(p, lr=0.1))))


def test_a_second_optimizer_is_refused(refusals):
    first, second = (torch.optim.SGD(nn.Linear(2, 2).parameters()) for _ in range(2))
    first.step()
    assert not refusals
    second.step()
    assert "more than one optimizer" in refusals[0]


def test_a_loop_that_drops_gradients_itself_is_refused(refusals):
    model, inputs, labels = model_and_data()
    optimizer = torch.optim.SGD(model.parameters())
    for x, y in zip(inputs[:2], labels[:2], strict=True):
        for parameter in model.parameters():
            parameter.grad = None
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert "releases gradients other than by zero_grad" in refusals[0]


def test_an_optimizer_that_evaluates_several_times_is_refused(refusals):
    model = nn.Linear(2, 2)
    torch.optim.LBFGS(model.parameters()).step(lambda: model(torch.ones(1, 2)).sum())
    assert "LBFGS" in refusals[0]
