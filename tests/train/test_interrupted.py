"""Ctrl-C or an error outside the engine: in a fetch, a forward, a scheduler, ``zero_grad``."""

import copy

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import UsageError
from memfit.train.training_job import SchedulerAndInterval


class RandomSamples(torch.utils.data.Dataset):
    """A dataset that draws random numbers for each sample, and is interrupted at one of them."""

    def __init__(self):
        self.at = 0

    def __len__(self):
        return 24

    def __getitem__(self, index):
        sample = torch.randn(6) + index
        self.at -= 1
        if self.at == 0:
            raise KeyboardInterrupt
        return sample


def mean_loss(model, data):
    return model(data).square().mean()


def engine(*plan, scheduler=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    scheduler = scheduler and scheduler(optimizer)
    torch.manual_seed(5)
    return memfit.Engine(
        model,
        plan,
        optimizer=optimizer,
        loss=mean_loss,
        scheduler=scheduler,
        scheduler_interval=scheduler and "update",
        **options,
    )


def same(left, right):
    pairs = zip(left.model.parameters(), right.model.parameters(), strict=True)
    return all(torch.equal(*pair) for pair in pairs)


def resumed(run, *plan):
    state = copy.deepcopy(run.state_dict())
    loaded = engine(*plan)
    loaded.load_state_dict(state)
    return loaded


def fit(loader, epochs=2):
    run = engine()
    run.fit(loader, epochs)
    return run


def interrupted(run, loader, at, epochs=2):
    loader.dataset.at = at
    with pytest.raises(KeyboardInterrupt):
        run.fit(loader, epochs)


def shuffled():
    return torch.utils.data.DataLoader(RandomSamples(), 4, shuffle=True)


@pytest.mark.parametrize("how", [lambda run: run, resumed], ids=["fit again", "save and resume"])
@pytest.mark.parametrize("at", [1, 3, 4, 6, 23, 26])
def test_an_interrupted_fetch_is_repeated(at, how):
    run, loader = engine(), shuffled()
    interrupted(run, loader, at)
    run = how(run)
    run.fit(loader, 2)
    assert same(run, fit(shuffled()))


@pytest.mark.parametrize("at", [1, 6, 10], ids=["reading again", "the fetch", "the next fetch"])
@pytest.mark.parametrize("how", [lambda run: run, resumed], ids=["fit again", "save and resume"])
def test_an_interrupted_resume_is_repeated(at, how):
    run, loader = engine(), shuffled()
    interrupted(run, loader, 6)
    run = resumed(run)
    interrupted(run, loader, at)
    run = how(run)
    run.fit(loader, 2)
    assert same(run, fit(shuffled()))


def windows(run, data, until=0, *, backward=False):
    """Train on one pass over the data; raise KeyboardInterrupt after a forward, or after its backward."""
    for window in run.windows(data):
        for part in window:
            loss = mean_loss(run.model, part)
            if run.micro_step + 1 == until and not backward:
                raise KeyboardInterrupt
            run.backward(loss)
            if run.micro_step == until:
                raise KeyboardInterrupt
    return run


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("until", [1, 2, 3, 4])
def test_an_interrupted_forward_is_repeated_but_not_a_completed_backward(until, backward):
    data = torch.utils.data.DataLoader(RandomSamples(), 4)
    plan = memfit.Accumulation(batches_per_update=2)
    whole = windows(engine(plan), data)
    run = engine(plan)
    with pytest.raises(KeyboardInterrupt):
        windows(run, data, until, backward=backward)
    run = windows(resumed(run, plan), data)
    assert run.micro_step == whole.micro_step == 6
    assert same(run, whole)


def test_an_interrupted_resume_inside_a_window_is_repeated():
    data = torch.utils.data.DataLoader(RandomSamples(), 4)
    plan = memfit.Accumulation(batches_per_update=3)
    whole = windows(engine(plan), data)
    run = engine(plan)
    with pytest.raises(KeyboardInterrupt):
        windows(run, data, 3)  # two of three micro-batches are done
    run = resumed(run, plan)
    data.dataset.at = 5
    with pytest.raises(KeyboardInterrupt):
        windows(run, data)
    assert same(windows(resumed(run, plan), data), whole)


def test_nested_passes_over_data_are_refused():
    run, data = engine(), torch.randn(4, 2, 6)
    for part in run.through(data):
        run.step(part)
        with pytest.raises(UsageError, match="The engine is already iterating over a loader"):
            next(run.through(data))
    assert run.optimizer_step == 4
    assert run.state_dict()["position"]["began"] is None


def one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=3)


def step(run, seed):
    torch.manual_seed(seed)
    return run.step(torch.randn(4, 6))


def test_an_update_whose_scheduler_raised_is_made_and_counted():
    run, plain = engine(scheduler=one_cycle), engine(scheduler=one_cycle)
    for seed in range(3):
        step(run, seed)
        step(plain, seed)
    with pytest.raises(ValueError, match="Tried to step 4 times") as error:
        step(run, 3)
    assert "the update was made and counted" in error.value.__notes__[0]
    assert (run.optimizer_step, run.is_whole) == (4, True)
    plain._ledger.update.schedule = SchedulerAndInterval()
    step(plain, 3)
    assert same(run, plain)
    state = copy.deepcopy(run.state_dict())
    assert (state["optimizer_step"], state["window"], state["gradients"]) == (4, None, {})
    loaded = engine(scheduler=one_cycle)
    loaded.load_state_dict(state)
    assert same(loaded, run)


def test_a_window_whose_scheduler_raised_is_not_repeated():
    run = engine(memfit.Accumulation(batches_per_update=2), scheduler=one_cycle)
    data = list(torch.randn(8, 4, 6))
    with pytest.raises(ValueError, match="Tried to step 4 times"):
        windows(run, data)
    assert (run.optimizer_step, run.batch, run.is_whole) == (4, 8, True)


@pytest.mark.parametrize("where", ["class", "instance"])
def test_an_optimizer_with_a_zero_grad_of_its_own_is_left_to_it(where):
    run, calls = engine(), []

    class Counting(type(run.optimizer)):
        def zero_grad(self, set_to_none=True):
            calls.append(set_to_none)
            super().zero_grad(set_to_none)

    if where == "class":
        run.optimizer.__class__ = Counting
    else:
        zero_grad = run.optimizer.zero_grad
        run.optimizer.zero_grad = lambda set_to_none=True: (calls.append(set_to_none), zero_grad(set_to_none))
    step(run, 0)
    assert calls == [True]
    assert all(parameter.grad is None for parameter in run.model.parameters())


def test_zero_grad_that_raises_after_the_step_undoes_the_update():
    run, plain = engine(protect="always"), engine()
    for trained in (run, plain):
        step(trained, 0)
    zero_grad = run.optimizer.zero_grad

    def raises(set_to_none=True):
        if run._ledger.update.torn:
            run.optimizer.zero_grad = zero_grad
            raise torch.OutOfMemoryError("CUDA out of memory")
        zero_grad(set_to_none)

    run.optimizer.zero_grad = raises
    with pytest.raises(torch.OutOfMemoryError):
        step(run, 1)
    assert (run.micro_step, run.optimizer_step, run.is_whole) == (1, 1, True)
    assert same(run, plain)
    for trained in (run, plain):
        step(trained, 1)
    assert same(run, plain)
