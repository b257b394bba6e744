"""What each rank of a pool does in a test: it trains with its share of the data, and returns what it found.

``train`` is also what one process does with all data, under ``ranks=1``: the referee.
"""

import warnings

import torch
from torch import nn

import memfit
from support.rank_jobs import (
    Net,
    Seen,
    engine,
    found,
    mean_loss,
    net,
    samples,
    sgd,
    shares,
    token_loss,
)


def steps(rank, ranks, plan, sizes, dtype="float32", loss="mean_loss", options=None):
    """Make an update from each of some batches, of which each rank has a share.

    Args:
        rank: this one; ``ranks=1`` trains with whole batches.
        sizes: for each update, each rank's number of samples.
    """
    seen = Seen()
    run = engine(net(dtype), plan, loss=globals()[loss], callbacks=[seen], **options or {})
    results = []
    for seed, divided in enumerate(sizes):
        batch = samples(sum(divided), seed, dtype) if ranks == 1 else shares(divided, seed, dtype)[rank]
        results.append(run.step(batch))
    return found(run, results, seen)


def in_windows(rank, ranks, plan, counts, loop, loss="mean_loss"):
    """Make an update from each window of micro-batches of two samples, of which each rank has some.

    Args:
        rank: this one; ``ranks=1`` trains with each window as one batch.
        counts: for each window, each rank's number of micro-batches.
        loop: ``fit``, ``windows`` (a loop of the script's own) or ``backward`` (one without a loader).
    """
    seen, results = Seen(), []
    run = engine(net(), plan, loss=(loss := globals()[loss]), callbacks=[seen, Results(results)])
    micro = [shares([2] * sum(each), seed) for seed, each in enumerate(counts)]
    if ranks == 1:
        for window in micro:
            run.step(tuple(torch.cat(parts) for parts in zip(*window, strict=True)))
        return found(run, results, seen)
    begins = [sum(each[:rank]) for each in counts]
    mine = [
        window[begin : begin + each[rank]] for window, begin, each in zip(micro, begins, counts, strict=True)
    ]
    if loop == "fit":
        run.fit([part for window in mine for part in window])
    elif loop == "windows":
        for parts in run.windows([part for window in mine for part in window]):
            for part in parts:
                backward(run, loss, part)
    else:
        for window in mine:
            for part in window:
                backward(run, loss, part)
            run.flush()
    return found(run, results, seen)


def without_tokens(rank, ranks, mode):
    """Make an update from micro-batches of which the last one, on the last rank, has a mean loss of 0 / 0."""
    micro = shares([2] * 4, 0)
    micro[-1][1].zero_()
    each = len(micro) // ranks
    gathering = memfit.Accumulation(batches_per_update=each)
    seen, results = Seen(), []
    plan = [gathering] if ranks == 1 else [gathering, memfit.Sharding(mode)]
    run = engine(net(), plan, callbacks=[seen, Results(results)])
    for window in run.windows(micro[rank * each : (rank + 1) * each]):
        for batch in window:
            total, tokens = token_loss(run.model, batch)
            run.backward(total / tokens, weight=float(tokens))
    return found(run, results, seen)


class Drawing(Net):
    """Draws a number and counts in each forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x):
        self.forwards += 1
        return super().forward(x) + 0.1 * torch.rand(())


def padded(rank, ranks):
    """Return what is left after an update in which the last rank has one micro-batch, and others three."""
    gathering = memfit.Accumulation(batches_per_update=3)
    torch.manual_seed(0)
    run = engine(Drawing(), [gathering, memfit.Sharding("fsdp2")])
    torch.manual_seed(rank)
    forwards = 3 if rank < ranks - 1 else 1
    run.fit(shares([2] * 4, 0)[:forwards])
    drawn = torch.rand(())
    torch.manual_seed(rank)
    alone = [torch.rand(()) for _ in range(forwards + 1)]
    return run.model.forwards.item() == forwards, bool(drawn == alone[-1])


def growing_weights(rank, ranks, mode):
    """Return whether an fp16 window makes an update whose second micro-batch weighs 4,000 times its first."""
    gathering = memfit.Accumulation(batches_per_update=2)
    run = engine(net(), [gathering, memfit.Sharding(mode), memfit.Precision("fp16", loss_scale=1024.0)])
    for window in run.windows(shares([2] * 2, 0)):
        for batch, weight in zip(window, [1.0, 4000.0], strict=True):
            with run.autocast():
                loss = mean_loss(run.model, batch)
            run.backward(loss, weight=weight)
    return window.result.updated


class Results(memfit.Callback):
    """Keeps the result of each window."""

    def __init__(self, results):
        self.results = results

    def on_window_end(self, engine, result):
        self.results.append(result)


def backward(run, loss, part):
    value = loss(run.model, part)
    if isinstance(value, tuple):
        run.backward(value[0] / max(value[1], 1), value[1])
    else:
        run.backward(value)


def reductions(rank, ranks, parts, updates):
    """Return how often DistributedDataParallel reduced its one bucket, forward and backward apart."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    run = engine(net(), [memfit.Sharding("ddp"), memfit.Accumulation(parts_per_batch=parts)])
    calls = []

    def counted(state, bucket):
        calls.append(1)
        return allreduce_hook(None, bucket)

    run.model.register_comm_hook(None, counted)
    for seed in range(updates):
        run.step(samples(2 * parts, 2 * seed + rank))
    storages = {each.grad.untyped_storage().data_ptr() for each in run.model.parameters()}
    return len(calls), len(storages)


class Overflowing(Net):
    """Has a parameter of which one element gets an infinite gradient on demand: in one rank's shard."""

    infinite = False

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(5))

    def forward(self, x):
        shift = self.shift * 1.0
        if Overflowing.infinite:
            shift.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([0]), float("inf")))
        return super().forward(x) + shift


def overflow(rank, ranks, mode, infinite):
    """Train in fp16 with a gradient that is infinite in one micro-batch, on one rank or on none.

    Args:
        infinite: rank and number of the micro-batch, counted over three updates of two micro-batches.
    """
    calls = iter(range(100))

    def loss(model, batch):
        Overflowing.infinite = (rank, next(calls)) == infinite
        return mean_loss(model, batch)

    torch.manual_seed(0)
    seen, results = Seen(), []
    scale = memfit.LossScale(init_scale=64.0, growth_interval=2)
    plan = [memfit.Precision("fp16", loss_scale=scale), memfit.Accumulation(parts_per_batch=2)]
    sharding = [memfit.Sharding(mode)] if ranks > 1 else []
    run = engine(Overflowing(), plan + sharding, loss=loss, callbacks=[seen])
    for seed in range(3):
        divided = shares([4, 4], seed)
        batch = divided[rank] if ranks > 1 else samples(8, seed)
        results.append(run.step(batch))
    state = run._ledger.update.scaler.state_dict()
    return found(run, results, seen) | {"scaler": state}


class Unused(Net):
    """Has a layer that no forward uses, and one that only some batches use."""

    def __init__(self):
        super().__init__()
        self.never = nn.Linear(3, 3)
        self.sometimes = nn.Linear(7, 7)

    def forward(self, x):
        hidden = self.inside(x)
        if len(x) > 2:
            hidden = self.sometimes(hidden)
        return self.head(hidden)


def unused(rank, ranks, sizes):
    """Train with weight decay, which would change parameters that got a gradient of zeros."""
    torch.manual_seed(0)
    seen = Seen()

    def optimizer(parameters):
        return torch.optim.SGD(parameters, lr=0.1, weight_decay=0.1)

    plan = [memfit.Sharding("ddp")] if ranks > 1 else None
    run = engine(Unused(), plan, callbacks=[seen], optimizer=optimizer)
    results = []
    for seed, divided in enumerate(sizes):
        batch = shares(divided, seed)
        if ranks > 1:
            results.append(run.step(batch[rank]))
            continue
        # In one process, each share is a micro-batch of its own: the layers that it uses depend on its size.
        weights = [len(part[0]) / sum(divided) for part in batch]
        for part, weight in zip(batch, weights, strict=True):
            (mean_loss(run.model, part) * weight).backward()
        seen.on_optimizer_step_begin(run)
        run.optimizer.step()
        run.optimizer.zero_grad()
    return found(run, results, seen)


def sums(rank, ranks, master_weights):
    """Train a model in bf16 whose gradients are summed in float32."""
    precision = memfit.Precision("bf16", autocast=False, master_weights=master_weights)
    plan = [precision, memfit.Accumulation(micro_batch_size=4)]
    run = engine(net(), [*plan, memfit.Sharding("ddp")] if ranks > 1 else plan)
    kept = []

    class Sums(memfit.Callback):
        def on_optimizer_step_begin(self, engine):
            own = (p for group in engine.optimizer.param_groups for p in group["params"])
            kept.append([p.grad.clone() for p in own])

    run.callbacks = (Sums(),)
    for seed in range(2):
        x, y = samples(16, seed, "bfloat16")
        share = slice(rank * 16 // ranks, (rank + 1) * 16 // ranks)
        run.step((x[share], y[share]))
    return {"gradients": kept, "dtypes": {str(each.dtype) for each in kept[0]}}


def by_hand(rank, ranks):
    """Train a model with batch norms by hand and with an engine; return if both are equal, and buffers."""

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5))

    plain = nn.parallel.DistributedDataParallel(build())
    optimizer = torch.optim.AdamW(plain.parameters())
    batches = [[samples(4, 100 * rank + 3 * window + part) for part in range(3)] for window in range(4)]
    for window in batches:
        with plain.no_sync():
            for part in window[:-1]:
                (mean_loss(plain, part) / 3).backward()
        (mean_loss(plain, window[-1]) / 3).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    accumulation = memfit.Accumulation(batches_per_update=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that batch norms see micro-batches
        run = engine(
            build(), [memfit.Sharding("ddp"), accumulation], optimizer=torch.optim.AdamW, max_grad_norm=0.5
        )
    run.fit([part for window in batches for part in window])
    pairs = zip(plain.parameters(), run.model.parameters(), strict=True)
    buffers = [[b.clone() for b in model.buffers()] for model in (plain, run.model)]
    return all(torch.equal(mine, theirs) for mine, theirs in pairs), *buffers


def sharded_before(rank, ranks, mode, sizes):
    """Make updates of a model that ``memfit.apply`` sharded, with an optimizer that is sharded, too."""
    sharding, seen = memfit.Sharding(mode), Seen()
    model = memfit.apply(net(), sharding)
    run = engine(
        model,
        memfit.Accumulation(micro_batch_size=2),
        callbacks=[seen],
        optimizer=sharding.optimizer(sgd(model.parameters()), model),
    )
    results = [run.step(shares(divided, seed)[rank]) for seed, divided in enumerate(sizes)]
    return found(run, results, seen)


def lenet(rank, ranks, dtype, updates):
    """Train LeNet-5 on scikit-learn's digits, with 48 digits an update in micro-batches of 8."""
    from sklearn.datasets import load_digits
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    digits, kind = load_digits(), getattr(torch, dtype)
    images = torch.tensor(digits.images[: 48 * updates]).to(kind).unsqueeze(1) / 16
    data = TensorDataset(images, torch.tensor(digits.target[: 48 * updates]))
    loader = DataLoader(data, batch_size=48 // ranks, sampler=DistributedSampler(data, ranks, rank))
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Upsample(32),
        *(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    ).to(kind)
    seen, results = Seen(), []
    plan = [memfit.Accumulation(micro_batch_size=8), *([memfit.Sharding("ddp")] if ranks > 1 else [])]
    run = engine(model, plan, callbacks=[seen, Results(results)])
    run.fit(loader)
    return found(run, results, seen)
