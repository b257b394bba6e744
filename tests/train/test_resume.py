"""Resuming from a state: the same data and random numbers, or a refusal that changes nothing."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import memfit
from memfit.errors import UsageError
from support.window_loops import train_in_windows


def samples(count=24):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 6, generator=generator), torch.randint(4, (count,), generator=generator)


def net(seed=0, dropout=0.5):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(dropout), nn.Linear(8, 4))


def mean_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def engine(model, *plan, **options):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return memfit.Engine(model, plan, optimizer=optimizer, **{"loss": mean_loss} | options)


def same(left, right):
    return all(torch.equal(*pair) for pair in zip(left.parameters(), right.parameters(), strict=True))


class SavesAndStops(memfit.Callback):
    def __init__(self, path, after):
        self.path, self.after = path, after

    def on_window_end(self, engine, result):
        if engine.optimizer_step == self.after:
            engine.save(self.path)
            engine.stop()


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - what datasets draw from
    torch.manual_seed(seed)


def fit(loader, *callbacks, epochs=3):
    run = engine(net(), callbacks=callbacks)
    seed_all(3)
    run.fit(loader(), epochs=epochs)
    return run


def assert_resumes_bit_for_bit(loader, path, stops, epochs=3):
    """Assert that runs saved and stopped between windows end like the uninterrupted run."""
    whole = fit(loader, epochs=epochs)
    for stop in stops:
        fit(loader, SavesAndStops(path, stop), epochs=epochs)
        resumed = engine(net(seed=9))
        seed_all(99)
        resumed.load(path)
        assert resumed.optimizer_step == stop
        resumed.fit(loader(), epochs=epochs)
        assert same(resumed.model, whole.model), stop


class Noisy(Dataset):
    """A dataset that draws from all three libraries for each sample, as augmentation does."""

    def __init__(self):
        self.x, self.y = samples()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        noise = random.random() + np.random.rand()  # noqa: NPY002, S311 - what datasets do
        return self.x[index] + torch.randn(6) / 3 + noise, self.y[index]


def test_augmentation_and_dropout_draw_the_same_after_a_resume_between_windows(tmp_path):
    assert_resumes_bit_for_bit(
        lambda: DataLoader(Noisy(), batch_size=4, shuffle=True), tmp_path / "run", (1, 3, 6, 7, 12)
    )


def with_own_generator():
    generator = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(*samples()), batch_size=4, shuffle=True, generator=generator)


class Shuffled:
    """A handwritten sampler."""

    def __init__(self, rng):
        self.rng = rng

    def __iter__(self):
        order = list(range(24))
        self.rng.shuffle(order)
        return iter(order)

    def __len__(self):
        return 24


def sampled(kind, *seed):
    return lambda: DataLoader(TensorDataset(*samples()), batch_size=4, sampler=Shuffled(kind(*seed)))


@pytest.mark.parametrize(
    "loader",
    [
        with_own_generator,
        sampled(random.Random, 0),
        sampled(np.random.default_rng, 0),
        sampled(np.random.RandomState, 0),
    ],
    ids=["torch", "python", "numpy", "numpy, old"],
)
def test_a_loader_with_its_own_generator_resumes_in_the_same_order(loader, tmp_path):
    assert_resumes_bit_for_bit(loader, tmp_path / "run", (3, 6, 9), epochs=2)


def test_a_loader_without_the_generator_is_refused(tmp_path):
    fit(with_own_generator, SavesAndStops(tmp_path / "run", 3))
    run = engine(net())
    run.load(tmp_path / "run")
    with pytest.raises(UsageError, match=r"1 random number generators, but this loader has 0"):
        run.fit(DataLoader(TensorDataset(*samples()), batch_size=4, shuffle=True), epochs=3)


def test_a_loader_of_other_batches_is_refused(tmp_path):
    fit(with_own_generator, SavesAndStops(tmp_path / "run", 3))
    run = engine(net())
    run.load(tmp_path / "run")
    with pytest.raises(UsageError, match=r"batch_size was 4 .* is 8 now"):
        run.fit(DataLoader(TensorDataset(*samples()), batch_size=8, shuffle=True), epochs=3)


def test_persistent_workers_are_warned_about(tmp_path):
    class Lasting(list):
        persistent_workers = True

    batches = Lasting(zip(*(tensor.split(4) for tensor in samples()), strict=True))
    fit(lambda: batches, SavesAndStops(tmp_path / "run", 3))
    run = engine(net())
    run.load(tmp_path / "run")
    with pytest.warns(UserWarning, match="restarts the loader's persistent workers"):
        run.fit(batches, epochs=1)


def carrying(model):
    return engine(model, memfit.Accumulation(batches_per_update=4, remainder="carry"))


def carry(run, until=None):
    """Train for 20 micro-batches, 10 per epoch, or stop at ``until``; return the batches' numbers."""
    x, y = samples(20)
    batches = list(enumerate(zip(x.split(2), y.split(2), strict=True)))
    seen = []

    def loss(model, numbered):
        number, batch = numbered
        seen.append(number)
        return mean_loss(model, batch)

    while run.micro_step < 20 and run.micro_step != until:
        train_in_windows(run, batches, loss, until)
    return seen


@pytest.mark.parametrize("stopped", [8, 9, 10, 11, 12, 13, 18])
def test_carried_micro_batches_are_not_trained_twice(stopped, tmp_path):
    whole = carrying(net())
    seen = carry(whole)
    first = carrying(net())
    carry(first, stopped)
    first.save(tmp_path / "run")
    resumed = carrying(net(seed=9))
    resumed.load(tmp_path / "run")
    assert carry(resumed) == seen[stopped:]
    assert same(resumed.model, whole.model)


def test_a_loaded_state_can_be_saved_before_training(tmp_path):
    whole, run = (engine(net(), memfit.Accumulation(batches_per_update=4)) for _ in range(2))
    torch.manual_seed(3)
    carry(whole)
    torch.manual_seed(3)
    carry(run, 6)
    for _ in range(2):
        run.save(tmp_path / "run")
        run = engine(net(seed=9), memfit.Accumulation(batches_per_update=4))
        run.load(tmp_path / "run")
    carry(run)
    assert same(run.model, whole.model)


def with_temperature(**options):
    """Return an engine whose loss has a parameter, as contrastive losses have, and that parameter."""
    model, scale = net(dropout=0.0), nn.Parameter(torch.ones(()))
    groups = [{"params": [scale], "lr": 0.5}, {"params": model.parameters()}]
    return memfit.Engine(
        model,
        memfit.Accumulation(batches_per_update=2),
        optimizer=torch.optim.Adam(groups, lr=0.05),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]) * scale, batch[1]),
    ), scale


@pytest.mark.parametrize("micro_steps", [6, 7])
def test_parameters_outside_the_model_are_saved(micro_steps, tmp_path):
    def train(run, scale, steps):
        for _ in range(steps):
            run.backward(F.cross_entropy(run.model(samples()[0]) * scale, samples()[1]))

    (whole, first), (run, second), (resumed, third) = (with_temperature() for _ in range(3))
    train(whole, first, 10)
    train(run, second, micro_steps)
    run.save(tmp_path / "run")
    resumed.load(tmp_path / "run")
    assert torch.equal(third, second)
    assert not torch.equal(third, torch.ones(()))
    train(resumed, third, 10 - micro_steps)
    assert torch.equal(third, first)
    assert same(resumed.model, whole.model)


def test_a_state_in_memory_may_be_loaded_twice():
    """Training does not write to the state: gradients, moments, the loss so far."""
    batches = [tuple(tensor[:8] for tensor in samples(8 + seed)) for seed in range(12)]

    def train(run, part):
        return [run.backward(mean_loss(run.model, batch)) for batch in part]

    saving = engine(net(dropout=0.0), memfit.Accumulation(batches_per_update=4))
    train(saving, batches[:6])
    state = saving.state_dict()
    kept = copy.deepcopy(state)
    for _ in range(2):
        run = engine(net(seed=9, dropout=0.0), memfit.Accumulation(batches_per_update=4))
        run.load_state_dict(state)
        results = train(run, batches[6:])
        for name in ("model", "gradients"):
            assert all(torch.equal(value, state[name][key]) for key, value in kept[name].items())
        assert torch.equal(state["window"]["loss"], kept["window"]["loss"])
        for key, moments in kept["optimizer"]["state"].items():
            assert all(
                torch.equal(value, state["optimizer"]["state"][key][n]) for n, value in moments.items()
            )
    train(saving, batches[6:])
    assert same(run.model, saving.model)
    assert results[1].loss > 0


def test_a_run_saved_between_epochs_resumes_in_the_order_of_the_next(tmp_path):
    whole = fit(with_own_generator)
    fit(with_own_generator, memfit.Saving(tmp_path / "run"), epochs=2)
    resumed = engine(net(seed=9))
    resumed.load(tmp_path / "run")
    assert (resumed.epoch, resumed.optimizer_step) == (2, 12)
    resumed.fit(with_own_generator(), epochs=3)
    assert same(resumed.model, whole.model)


class SetsEpoch(memfit.Callback):
    def __init__(self, sampler):
        self.sampler = sampler

    def on_epoch_begin(self, engine):
        self.sampler.set_epoch(engine.epoch)


def test_a_callback_sets_the_epoch_of_a_sampler(tmp_path):
    def run(*callbacks, load=None):
        data = TensorDataset(*samples())
        sampler = DistributedSampler(data, num_replicas=1, rank=0)
        torch.manual_seed(3)
        engine_ = engine(net(), callbacks=[SetsEpoch(sampler), *callbacks])
        if load:
            engine_.load(load)
        engine_.fit(DataLoader(data, batch_size=4, sampler=sampler), epochs=3)
        return engine_.model

    whole = run()
    run(SavesAndStops(tmp_path / "run", 9))
    assert same(run(load=tmp_path / "run"), whole)


def test_a_state_is_loaded_to_the_gpu_of_the_run(dry_run):
    """Also inside a window: gradients, their sums, moments and the loss so far."""
    script = """
    import memfit, torch
    from torch import nn

    def run(*plan):
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        return memfit.Engine(model, [*plan, memfit.Accumulation(batches_per_update=4)], optimizer=optimizer)

    def train(engine, micro_steps):
        for _ in range(micro_steps):
            with engine.autocast():
                data = torch.randn(8, 6, device="cuda", dtype=engine.model[0].weight.dtype)
                loss = engine.model(data).square().mean()
            engine.backward(loss)

    half = memfit.Precision("bf16", autocast=False, master_weights=True)
    for plan in ([], [half], [memfit.Precision("fp16")]):
        first, second = run(*plan), run(*plan)
        train(first, 6)
        first.save("run")
        second.load("run")
        assert second._ledger.window.loss.is_cuda
        train(second, 2)
        assert second.micro_step == 8
        for state in second.optimizer.state.values():
            assert state["exp_avg"].is_cuda
    print("resumed")
    """
    done = dry_run(script)
    assert "resumed" in done.out, done.err


class KeepsFloat32(torch.optim.Optimizer):
    """An optimizer with momentum in float32 whatever its parameters' dtype, as custom ones may have."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            kept = self.state[parameter].setdefault("kept", torch.zeros(parameter.shape))
            kept.mul_(0.9).add_(parameter.grad)
            parameter.sub_(0.05 * kept)


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, KeepsFloat32])
def test_optimizer_state_of_another_dtype_than_its_parameters_keeps_it(kind, tmp_path):
    def made(seed=0):
        model = net(seed, dropout=0.0)
        return memfit.Engine(
            model,
            memfit.Precision("bf16", autocast=False),
            optimizer=kind(model.parameters()),
            loss=lambda model, batch: F.cross_entropy(model(batch[0].bfloat16()), batch[1]),
        )

    run, resumed = made(), made(9)
    for _ in range(3):
        run.step(samples())
    run.save(tmp_path / "run")
    resumed.load(tmp_path / "run")
    for trained in (run, resumed):
        for _ in range(3):
            trained.step(samples())
    states = zip(run.optimizer.state.values(), resumed.optimizer.state.values(), strict=True)
    for state, loaded in states:
        assert any(value.dtype == torch.float32 for name, value in state.items() if name != "step")
        assert all(torch.equal(value, loaded[name]) for name, value in state.items())
        assert all(value.dtype == loaded[name].dtype for name, value in state.items())
    assert same(run.model, resumed.model)
