"""What each rank of a pool does in a test of ranks that differ: see ``rank_cases``."""

import torch

import memfit
from support.rank_jobs import Seen, engine, found, mean_loss, net, samples, shares, token_loss

DDP = memfit.Sharding("ddp")


def differing(rank, ranks, case):
    """Return how training ends if rank 1 does one thing differently."""
    try:
        CASES[case](rank)
    except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
        return type(error).__name__, str(error)
    return "", ""


def _frozen(rank):
    model = net()
    model.head.bias.requires_grad_(rank == 0)
    return model


def _sgd(**settings):
    return lambda parameters: torch.optim.SGD(parameters, **{"lr": 0.1, **settings})


def _in_two_groups(rank):
    def optimizer(parameters):
        first, *others = parameters
        groups = [[first], others] if rank == 0 else [[first, *others[:-1]], others[-1:]]
        return torch.optim.SGD([{"params": each} for each in groups], lr=0.1)

    return optimizer


def _changes_its_rate(rank):
    run = engine(net(), DDP, optimizer=_sgd())
    run.step(samples(2, rank))
    if rank == 1:
        run.optimizer.param_groups[0]["lr"] = 0.05
    run.step(samples(2, rank))


def _loads(rank):
    run = engine(net(), DDP, optimizer=_sgd())
    if rank == 1:
        run._ledger.optimizer_step = 3
    run.step(samples(2, rank))


def _weighs(rank, mode):
    run = engine(net(), [memfit.Sharding(mode), memfit.Accumulation(batches_per_update=1)])
    run.backward(mean_loss(run.model, samples(2, rank)), *([5.0] if rank == 1 else []))


def _validates(rank):
    run = engine(net(), DDP)
    run.step(samples(2, rank))
    if rank == 1:
        run.validate([samples(2, rank)])
    run.step(samples(2, rank))


CASES = {
    "plan": lambda rank: engine(net(), [DDP, memfit.Accumulation(batches_per_update=2 + rank)]),
    "strategy": lambda rank: engine(net(), [DDP, memfit.Precision("bf16")] if rank == 1 else DDP),
    "loss scale": lambda rank: engine(net(), [DDP, memfit.Precision("fp16", loss_scale=2.0**rank)]),
    "mode": lambda rank: engine(net(), memfit.Sharding("fsdp2" if rank == 1 else "ddp")),
    "norm": lambda rank: engine(net(), DDP, max_grad_norm=1.0 if rank == 1 else None),
    "retry": lambda rank: engine(net(), DDP, retry=rank == 0),
    "dtype": lambda rank: engine(net("float64" if rank == 1 else "float32"), memfit.Sharding("fsdp2")),
    "frozen": lambda rank: engine(_frozen(rank), DDP),
    "rate": lambda rank: engine(net(), memfit.Sharding("zero1"), optimizer=_sgd(lr=0.1 + rank)),
    "momentum": lambda rank: engine(net(), memfit.Sharding("fsdp2"), optimizer=_sgd(momentum=0.5 * rank)),
    "groups": lambda rank: engine(net(), DDP, optimizer=_in_two_groups(rank)),
    "class": lambda rank: engine(
        net(), DDP, optimizer=lambda p: [torch.optim.Adam, torch.optim.AdamW][rank](p, 0.1)
    ),
    "rate, later": _changes_its_rate,
    "resumed": _loads,
    "weights, ddp": lambda rank: _weighs(rank, "ddp"),
    "weights, fsdp2": lambda rank: _weighs(rank, "fsdp2"),
    "divisor": lambda rank: engine(net(), DDP, loss=[mean_loss, token_loss][rank]).step(samples(4, rank)),
    "epochs": lambda rank: engine(net(), DDP).fit([samples(2, rank)], epochs=1 + rank),
    "validated": lambda rank: engine(net(), DDP).fit(
        [samples(2, rank)], validate=[samples(2, rank)] if rank == 1 else None
    ),
    "validates": _validates,
    "saves": lambda rank: (
        run := engine(net(), DDP),
        rank == 1 and run.save("/nowhere"),
        run.step(samples(2, rank)),
    ),
}


def own_seeds(rank, ranks, mode, precision=None):
    """Train a model that has other weights, and other running means, on each rank."""
    model = torch.nn.Sequential(net(), torch.nn.BatchNorm1d(5, affine=False).eval())
    if rank:
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.data += 1
    seen, plan = Seen(), [memfit.Sharding(mode)] if ranks > 1 else []
    run = engine(model, plan + ([memfit.Precision(**precision)] if precision else []), callbacks=[seen])
    sizes, dtype = [2, 2], next(run.model.parameters()).dtype
    results = []
    for seed in range(3):
        x, y = samples(4, seed) if ranks == 1 else shares(sizes, seed)[rank]
        results.append(run.step((x.to(dtype), y)))
    return found(run, results, seen)
