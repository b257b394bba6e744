"""What each rank of a pool does in a test of ``fit`` and of what the engine refuses: see ``rank_cases``."""

import warnings

import torch
from torch import nn

import memfit
from support.rank_jobs import engine, mean_loss, net, samples, sgd, whole


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
    stopping = _StopsWhenWorse()

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


class _StopsWhenWorse(memfit.Callback):
    best = -1.0

    def on_validation_end(self, engine, metrics):
        if metrics["accuracy"] <= self.best:
            engine.stop()
        self.best = max(self.best, metrics["accuracy"])


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
        "frozen later": lambda: _freeze(engine(model, memfit.Sharding("ddp"))).step(samples(2, 0)),
        "tensor parallel": lambda: engine(_on_a_part_of_the_ranks(model), None),
        "arena": lambda: engine(model, {"sharding": "ddp", "arena": True}),
        "Rprop of shards": lambda: engine(
            model, memfit.Sharding("fsdp2"), optimizer=torch.optim.Rprop, protect="always"
        ).step(samples(2, rank)),
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


def _freeze(run):
    next(run.model.parameters()).requires_grad_(False)
    return run


def _without_sync(model, rank):
    run = engine(model, memfit.Sharding("fsdp2"))
    run.model.set_requires_gradient_sync(False)
    run.step(samples(2, rank))


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
    """Return the warnings about loaders that every rank reads whole, and about those that are divided."""
    from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

    class Shares(Dataset):
        """The samples of some names; what it does not hold as an attribute, it does not show."""

        def __init__(self, **attributes):
            vars(self).update(attributes)

        def __len__(self):
            return 4

        def __getitem__(self, index):
            return data[index]

    data, other = TensorDataset(*samples(8, 0)), TensorDataset(*samples(8, rank))
    names = [f"{each}.png" for each in range(8)]
    loaders = {
        "same": DataLoader(data, batch_size=4),
        "same, shuffled": DataLoader(data, batch_size=4, shuffle=True),
        "same subset": DataLoader(Subset(data, range(4)), batch_size=4),
        "same names": DataLoader(Shares(names=names[:4]), batch_size=4),
        "unknown": DataLoader(Shares(), batch_size=4),
        "sampler": DataLoader(data, batch_size=4, sampler=DistributedSampler(data)),
        "own subset": DataLoader(Subset(data, range(rank, 8, ranks)), batch_size=4),
        "own samples": DataLoader([data[each] for each in range(rank, 8, ranks)], batch_size=4),
        "own names": DataLoader(Shares(names=names[rank::ranks]), batch_size=4),
        "own part": DataLoader(Shares(of=Shares(array=other[:][0].numpy())), batch_size=4),
        "own key": DataLoader(Shares(of={"shard": f"{rank} of {ranks}"}), batch_size=4),
        "own tensors": DataLoader(other, batch_size=4),
        "own length": DataLoader([data[each] for each in range(4 + rank)], batch_size=4),
        "one reads all": DataLoader(data, batch_size=4) if rank else [samples(4, 0)] * 2,
    }
    texts = {}
    for name, loader in loaders.items():
        run = engine(net(), memfit.Sharding("ddp"))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            run.fit(loader)
        texts[name] = "".join(str(each.message) for each in seen if "ranks" in str(each.message))
    return texts


def progress(rank, ranks):
    """Return what a progress bar draws."""
    import io

    from rich.console import Console

    drawn = io.StringIO()
    bar = memfit.ProgressBar(Console(file=drawn, force_terminal=True, width=100))
    engine(net(), memfit.Sharding("ddp"), callbacks=[bar]).fit([samples(2, rank)])
    return drawn.getvalue()


def stopped(rank, ranks):
    """Return how many updates each rank makes if rank 1 ends ``fit`` after its second."""

    class Stopping(memfit.Callback):
        def on_window_end(self, run, result):
            if rank == 1 and run.optimizer_step == 2:
                run.stop()

    run = engine(net(), [memfit.Sharding("ddp")], callbacks=[Stopping()])
    run.fit([samples(2, rank)] * 4)
    return run.optimizer_step


def ambiguous_weight(rank, ranks):
    """Return the error about a batch whose weight among those of other ranks is ambiguous."""
    batch = [torch.ones(3, 4, 4)] * 2, [torch.ones(3, 4)] * 2
    try:
        engine(net(), memfit.Sharding("ddp")).step(batch)
    except Exception as error:  # noqa: BLE001 - the test names it
        return type(error).__name__, str(error)
    return None
