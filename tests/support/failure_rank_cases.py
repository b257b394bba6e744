"""What each rank of a pool does in a test of ranks that fail: see ``rank_cases``."""

import os

import torch

import memfit
from support.rank_jobs import Seen, engine, found, local, mean_loss, net, samples, shares


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


class Interrupted(torch.optim.SGD):
    """Runs out of memory on demand, when it has updated parameters."""

    fails = False

    def step(self, closure=None):
        super().step(closure)
        if Interrupted.fails:
            ran_out(None)


def interrupted_update(rank, ranks, mode, failing, options):
    """Make updates, let some ranks run out of memory inside the second update, and repeat it.

    Args:
        failing: the ranks; their allocators release their caches just before.
        options: of the engine.
    """
    plan, seen = [memfit.Sharding(mode)] if ranks > 1 else None, Seen()

    def optimizer(parameters):
        return Interrupted(parameters, lr=0.1, momentum=0.9)

    run = engine(net(), plan, optimizer=optimizer, callbacks=[seen], **options)
    batches = [samples(4, seed) if ranks == 1 else shares([2, 2], seed)[rank] for seed in range(2)]
    results = [run.step(batches[0]), run.step(batches[0])]
    before = [local(p) for p in run.model.parameters()]
    kind = ""
    if rank in failing:
        Interrupted.fails = True
        run._ledger.update._count_cache_releases = lambda: 1
    try:
        if ranks > 1:
            run.step(batches[1])
    except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
        kind = type(error).__name__
    Interrupted.fails = False
    same = all(torch.equal(a, local(b)) for a, b in zip(before, run.model.parameters(), strict=True))
    results.append(run.step(batches[1]))
    seen.gradients = seen.gradients[:2] + seen.gradients[-1:]
    return found(run, results, seen) | {"error": kind, "restored": same}


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


def failing_to_prepare(rank, ranks, mode, batch):
    """Return what each rank reads when rank 1 gets a batch that is empty or cannot be split, and waits.

    Afterwards all make another update.
    """
    x, y = samples(3, rank)
    bad = {"empty": (x[:0], y[:0]), "ambiguous": (x, y, torch.ones(3, 3), torch.ones(3, 3))}[batch]
    run = engine(net(), [memfit.Sharding(mode), memfit.Accumulation(micro_batch_size=2)])
    kind = said = ""
    run.step((x, y))
    try:
        run.step(bad if rank == 1 else (x, y))
    except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
        kind, said = type(error).__name__, str(error)
    run.step((x, y))
    return kind, said, run.optimizer_step


def failing_to_begin(rank, ranks):
    """Return what each rank reads when rank 1 cannot create its optimizer, and ends."""

    def optimizer(parameters):
        if rank == 1:
            raise ValueError("no learning rate")
        return torch.optim.SGD(parameters)

    try:
        engine(net(), memfit.Sharding("fsdp2"), optimizer=optimizer)
    except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
        if rank == 1:
            os._exit(1)
        return type(error).__name__, str(error)
    return "", ""


def failing_data(rank, ranks, mode):
    """Return what each rank reads when rank 1 cannot load its second batch, and ends."""
    if ranks == 1:
        raise AssertionError

    class Loader:
        def __iter__(self):
            yield samples(2, rank)
            if rank == 1:
                raise ValueError("a file is missing")
            yield samples(2, rank)

    run = engine(net(), [memfit.Sharding(mode)])
    try:
        run.fit(Loader())
    except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
        if rank == 1:
            os._exit(1)
        return type(error).__name__, str(error)
    return "", ""


def seconds_until_lost(rank, ranks):
    """Return how long an engine's ranks wait for one that does not answer."""
    control = engine(net(), [memfit.Sharding("ddp")])._ranks.control
    return control._get_backend(torch.device("cpu")).options._timeout.total_seconds()
