"""What each rank of a pool does in a test: it trains with its share of the data, and returns what it found.

``train`` is also what one process does with all data, under ``ranks=1``: the referee.
"""

import os
import warnings

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import memfit


class Block(nn.Module):
    """Sizes that neither two nor four ranks divide."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 11)
        self.down = nn.Linear(11, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(6, 7)
        self.layers = nn.ModuleList(Block(7) for _ in range(3))
        self.head = nn.Linear(7, 5)

    def forward(self, x):
        x = self.inside(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def net(dtype="float32"):
    torch.manual_seed(0)
    return Net().to(getattr(torch, dtype))


def samples(size, seed, dtype="float32"):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 6, generator=generator, dtype=torch.float64).to(getattr(torch, dtype))
    return x, torch.randint(5, (size,), generator=generator)


def shares(sizes, seed, dtype="float32"):
    """Return a batch divided among ranks; a share of size 0 is None."""
    batch = samples(sum(sizes), seed, dtype)
    parts = zip(*(tensor.split(sizes) for tensor in batch), strict=True)
    return [part if len(part[0]) else None for part in parts]


def mean_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def token_loss(model, batch):
    """Samples of class 0 are no tokens: the ranks' micro-batches weigh differently."""
    kept = batch[1] != 0
    return (F.cross_entropy(model(batch[0]), batch[1], reduction="none") * kept).sum(), kept.sum()


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def local(tensor):
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().clone()


class Seen(memfit.Callback):
    """Keeps the gradients that the optimizer sees, whole."""

    def __init__(self):
        self.gradients = []

    def on_optimizer_step_begin(self, engine):
        pairs = engine.model.named_parameters()
        self.gradients.append(
            {name.removeprefix("module."): whole(p.grad) for name, p in pairs if p.grad is not None}
        )


def sgd(parameters):
    # Adam divides by the gradient's size, which magnifies rounding where a gradient is near zero.
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def engine(model, plan, *, loss=mean_loss, **options):
    return memfit.Engine(model, plan, optimizer=options.pop("optimizer", sgd), loss=loss, **options)


def found(run, results, seen):
    named = run.model.named_parameters()
    if any(hasattr(result.grad_norm_tensor, "full_tensor") for result in results):
        raise AssertionError  # reading it would be collective
    return {
        "parameters": {name.removeprefix("module."): whole(p) for name, p in named},
        "buffers": {name.removeprefix("module."): b.clone() for name, b in run.model.named_buffers()},
        "gradients": seen.gradients,
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "updated": [result.updated for result in results],
        "scales": [result.loss_scale for result in results],
        "steps": [(result.micro_step, result.optimizer_step, result.retried) for result in results],
    }


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


def out_of_memory(rank, ranks, mode, failing, sizes, options=None):
    """Make updates during which some ranks cannot hold more than two samples at a time.

    Args:
        failing: the ranks.
        sizes: as for ``steps``.
    """

    def loss(model, batch):
        value = mean_loss(model, batch)
        if rank in failing and len(batch[0]) > 2:
            if len(batch[0]) % 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            value.register_hook(ran_out)
        return value

    plan = [memfit.Sharding(mode)] if ranks > 1 else None
    seen, results = Seen(), []
    run = engine(net(), plan, loss=loss, callbacks=[seen], **options or {})
    for seed, divided in enumerate(sizes):
        batch = samples(sum(divided), seed) if ranks == 1 else shares(divided, seed)[rank]
        results.append(run.step(batch))
    return found(run, results, seen)


def ran_out(gradient):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def failing(rank, ranks, mode, where, ends=False):
    """Return what each rank reads when rank 1 fails for good in its second step, and ends then or not."""
    if ranks == 1:
        raise AssertionError

    class Failing(memfit.Callback):
        def on_optimizer_step_begin(self, engine):
            if rank == 1 and where == "update" and engine.optimizer_step == 1:
                raise torch.OutOfMemoryError("CUDA out of memory.")

    def loss(model, batch):
        value = mean_loss(model, batch)
        if rank == 1 and run.optimizer_step == 1:
            if where == "forward":
                raise ValueError("a label is missing")
            if where == "backward":
                value.register_hook(ran_out)
        return value

    run = engine(net(), [memfit.Sharding(mode)], loss=loss, callbacks=[Failing()], protect="always")
    run.step(samples(1, rank))
    before = [local(p) for p in run.model.parameters()]
    try:
        run.step(samples(1, rank))
    except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
        if ends and rank == 1:
            os._exit(1)  # as a script does that does not catch it
        same = all(torch.equal(a, local(b)) for a, b in zip(before, run.model.parameters(), strict=True))
        return type(error).__name__, str(error), same
    return "", "", False


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


def fit(rank, ranks, mode, epochs=2):
    """Train with ``fit``, validation and early stopping; return what each rank saw of them."""
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    data = TensorDataset(*samples(22, 0))
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    order = []

    def loss(model, batch):
        order.append(batch[0][:, 0].tolist())
        return mean_loss(model, batch)

    held_out = samples(9, 1)
    part = slice(0, 6) if rank == 0 else slice(6, 9)  # ranks validate different numbers of batches
    mine = tuple(tensor[part] for tensor in held_out)
    validation = [tuple(t[i : i + 3] for t in mine) for i in range(0, len(mine[0]), 3)]
    stopping = memfit.EarlyStopping("accuracy", mode="max", patience=1)

    def accuracy(model, batch):
        return (model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[0])

    run = engine(net(), memfit.Sharding(mode), loss=loss, callbacks=[stopping])
    run.fit(loader, epochs, validate=validation, metrics={"loss": mean_loss, "accuracy": accuracy})
    return {
        "order": order,
        "metrics": run.metrics,
        "epochs": run.epoch,
        "best": stopping.best,
        "parameters": [whole(p) for p in run.model.parameters()],
    }


def refused(rank, ranks, case):
    """Return the message with which an engine is refused."""
    model = net()
    adam = torch.optim.Adam(model.parameters())
    made = {
        "nothing shards": lambda: engine(model, None),
        "sharded twice": lambda: engine(memfit.apply(model, memfit.Sharding("ddp")), memfit.Sharding("ddp")),
        "fsdp2, made before": lambda: engine(model, memfit.Sharding("fsdp2"), optimizer=adam),
        "zero1, scheduler made before": lambda: engine(
            model,
            memfit.Sharding("zero1"),
            optimizer=adam,
            scheduler=torch.optim.lr_scheduler.StepLR(adam, 1),
            scheduler_interval="update",
        ),
        "static graph": lambda: engine(model, memfit.Sharding("ddp", static_graph=True)),
        "a part in DDP": lambda: engine(nn.Sequential(nn.parallel.DistributedDataParallel(model)), None),
        "step in backward": lambda: engine(
            model, [memfit.Sharding("fsdp2"), memfit.OptimizerState(step_in_backward=True)]
        ),
        "cast afterwards": lambda: engine(
            memfit.apply(model, memfit.Sharding("ddp")), memfit.Precision("bf16", autocast=False)
        ),
        "8 bits": lambda: engine(model, [memfit.Sharding("fsdp2"), memfit.OptimizerState(bits=8)]),
        "others": lambda: engine(
            model,
            memfit.Sharding("ddp"),
            optimizer=lambda parameters: sgd([*parameters, nn.Parameter(torch.ones(3))]),
        ),
        "conflict": lambda: engine(memfit.apply(model, memfit.Sharding("fsdp2")), memfit.Offload()),
        "tensor parallel": lambda: engine(_on_a_part_of_the_ranks(model), None),
        "cuda graphs": lambda: engine(model, memfit.Sharding("ddp"), cuda_graphs=True),
        "arena": lambda: engine(model, {"sharding": "ddp", "arena": True}),
        "no sync": lambda: _without_sync(model, rank),
        "carry": lambda: engine(
            model, [memfit.Sharding("ddp"), memfit.Accumulation(batches_per_update=2, remainder="carry")]
        ).fit([samples(2, 0)] * (3 + rank)),
    }[case]
    try:
        made()
    except memfit.MemfitError as error:
        return type(error).__name__, str(error)
    return "", ""


def _on_a_part_of_the_ranks(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    return fully_shard(model, mesh=mesh["data"])


def _without_sync(model, rank):
    run = engine(model, memfit.Sharding("fsdp2"))
    run.model.set_requires_gradient_sync(False)
    run.step(samples(2, rank))


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


def learning_rates(rank, ranks):
    """Return the rate of each of four updates, of which the second is skipped because of rank 0."""
    model, calls = net(), iter(range(100))

    def loss(model, batch):
        return mean_loss(model, batch) * (float("inf") if (rank, next(calls)) == (0, 1) else 1.0)

    run = engine(
        model,
        [memfit.Sharding("ddp"), memfit.Precision("fp16", loss_scale=8.0)],
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        scheduler_interval="update",
    )
    rates = []
    for seed in range(4):
        rates.append(run.optimizer.param_groups[0]["lr"])
        run.step(samples(2, seed))
    return rates


def same_data(rank, ranks):
    """Return the warnings about a loader that every rank reads whole, and about one that is divided."""
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    data, texts = TensorDataset(*samples(8, 0)), []
    for sampler in (None, DistributedSampler(data)):
        run = engine(net(), memfit.Sharding("ddp"))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            run.fit(DataLoader(data, batch_size=4, sampler=sampler))
        texts.append("".join(str(each.message) for each in seen if "ranks" in str(each.message)))
    return texts


def progress(rank, ranks):
    """Return what a progress bar draws."""
    import io

    from rich.console import Console

    drawn = io.StringIO()
    bar = memfit.ProgressBar(Console(file=drawn, force_terminal=True, width=100))
    engine(net(), memfit.Sharding("ddp"), callbacks=[bar]).fit([samples(2, rank)])
    return drawn.getvalue()
