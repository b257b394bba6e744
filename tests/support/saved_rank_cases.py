"""What each rank of a pool does in a test of saved runs; ``ranks=1`` is a single process."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import memfit
from memfit.random_state import get_random_state, set_random_state
from support.lowest_loss import LowestLoss
from support.rank_jobs import whole
from support.window_loops import train_in_windows


class Noisy(Dataset):
    """Augments from all three libraries' generators, and notes which samples were read."""

    def __init__(self, count):
        generator = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(count, 6, generator=generator), torch.arange(count) % 4
        self.seen = []

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.seen.append(index)
        noise = random.random() + np.random.rand()  # noqa: NPY002, S311 - what datasets do
        return self.x[index] + torch.randn(6) / 3 + noise, self.y[index]


class Net(nn.Module):
    """With rows that four ranks do not all have, batch norm, dropout, and a buffer that is not saved."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 3)
        self.last = nn.Linear(3, 4)
        self.register_buffer("forwards", torch.zeros(2), persistent=False)

    def forward(self, x):
        if self.training:
            self.forwards += 1
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.last(F.dropout(self.head(self.norm(x)), 0.3, self.training))


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - what datasets draw from
    torch.manual_seed(seed)


def mean_loss(model, batch):
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def engine(rank, plan, seed, *callbacks):
    """Return an engine; ranks draw different numbers, and another seed different parameters as well."""
    torch.manual_seed(seed)
    model = Net()
    seed_all(seed + 100 + rank)
    return memfit.Engine(
        model,
        plan,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
        loss=mean_loss,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
        scheduler_interval="update",
        callbacks=[LowestLoss(), *callbacks],
        retry=False,
    )


def loader(rank, ranks, batch_size=4, *, samples=48, seed=0):
    data = Noisy(samples)
    sampler = DistributedSampler(data, ranks, rank, shuffle=seed is not None, seed=seed or 0)
    return DataLoader(data, batch_size=batch_size, sampler=sampler)


def state(run):
    """Return an engine's parameters, buffers and optimizer state by name, whole, and its other state."""
    model = getattr(run.model, "module", run.model)
    named = {name: whole(each) for name, each in model.state_dict().items()}
    optimizer = getattr(run.optimizer, "optim", run.optimizer)
    of = {id(each): name for name, each in model.named_parameters()}
    named |= {
        f"{of[id(parameter)]}.{key}": whole(value)
        for parameter, entry in optimizer.state.items()
        for key, value in entry.items()
    }
    counters = run.epoch, run.batch, run.micro_step, run.optimizer_step, run.scheduler.get_last_lr()
    return {
        "tensors": named,
        "forwards": model.forwards.clone(),
        "counters": counters,
        "scale": run._ledger.update.scaler.state_dict(),
        "early stopping": run.callbacks[0].state_dict(),
        "random": (random.random(), np.random.rand(), torch.rand(2)),  # noqa: NPY002, S311 - compared
    }


class SavesAt(memfit.Callback):
    """Saves after some updates, at the windows' end or inside windows, and stops after the last."""

    def __init__(self, path, at, *, inside=False):
        self.path, self.at, self.inside = path, at, inside

    def on_window_end(self, engine, result):
        if not self.inside and engine.optimizer_step == self.at:
            engine.save(self.path)
            engine.stop()


def interrupted(rank, ranks, plan, path):
    """Raise on rank 1 in the third update; return the updates that are saved."""

    class Fails(memfit.Callback):
        def on_optimizer_step_begin(self, engine):
            if rank == 1 and engine.optimizer_step == 2:
                raise ValueError("on rank 1 alone")

    run = engine(rank, plan, 0, Fails(), memfit.Saving(path, every=2))
    try:
        run.fit(loader(rank, ranks))
    except (ValueError, memfit.MemfitError) as error:
        kind = type(error).__name__
    torch.distributed.barrier()
    again = engine(rank, plan, 7)
    again.load(path)
    return kind, again.optimizer_step


def uninterrupted(rank, ranks, plan, epochs):
    run = engine(rank, plan, 0)
    run.fit(loader(rank, ranks), epochs=epochs)
    return state(run)


def saved(rank, ranks, plan, path, at, epochs):
    run = engine(rank, plan, 0, SavesAt(path, at))
    run.fit(loader(rank, ranks), epochs=epochs)
    return state(run)


def resumed(rank, ranks, plan, path, epochs, batch_size=4):
    run = engine(rank, plan, 7)
    run.load(path)
    before, data = state_without_drawing(run), loader(rank, ranks, batch_size)
    run.fit(data, epochs=epochs)
    return before, state(run), data.dataset.seen


def refused(rank, ranks, plan, path, batch_size=4):
    """Return what loading raises, or training after it, and whether the engine is as it was before."""
    run = engine(rank, plan, 7)
    before, error = state_without_drawing(run), None
    try:
        run.load(path)
        run.fit(loader(rank, ranks, batch_size), epochs=2)
    except (memfit.MemfitError, FileNotFoundError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    return error, before, state_without_drawing(run)


def state_without_drawing(run):
    now = get_random_state()
    found = state(run)
    set_random_state(now)
    return found


def saved_by_hand(rank, ranks, plan, path, at):
    """Save after some micro-batches in windows of 3."""
    run = engine(rank, plan, 0)
    for window in run.windows([(torch.ones(4, 6), torch.arange(4))] * at):
        for batch in window:
            run.backward(mean_loss(run.model, batch))
            if run.micro_step == at:
                run.save(path)
                return


def resumed_by_hand(rank, ranks, plan, path, at):
    """Save and resume after ``at`` of 8 micro-batches in windows of 3, by a loop of the script's own."""
    seed_all(rank)
    batches = [(torch.randn(4, 6), torch.arange(4)) for _ in range(8)]
    whole_run = state(train_in_windows(engine(rank, plan, 0), batches, mean_loss))
    first = engine(rank, plan, 0)
    if at:
        train_in_windows(first, batches, mean_loss, until=at)
    first.save(path)
    second = engine(rank, plan, 7)
    second.load(path)
    return whole_run, state(train_in_windows(second, batches, mean_loss))
