"""What each rank of a pool does in a test of sharding: it trains one model under each kind, and measures."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import memfit
from memfit.errors import UsageError
from support.rank_jobs import Net, local, sgd, whole

BATCH, STEPS = 6, 3
PLANS = {
    "ddp": memfit.Sharding("ddp"),
    "ddp, gradients beside their buckets": memfit.Sharding("ddp", gradient_as_bucket_view=False),
    "ddp, static graph": memfit.Sharding("ddp", static_graph=True),
    "ddp, checkpointed": [memfit.Checkpointing("layers.*"), memfit.Sharding("ddp")],
    "zero1": memfit.Sharding("zero1"),
    "fsdp2": memfit.Sharding("fsdp2"),
    "fsdp2, one part": memfit.Sharding("fsdp2", modules="head"),
    "fsdp2, kept gathered": memfit.Sharding("fsdp2", modules="Block", reshard_after_forward=False),
    "fsdp2, checkpointed": [memfit.Sharding("fsdp2", modules="layers.*"), memfit.Checkpointing("layers.*")],
    "fsdp2, offloaded": memfit.Sharding("fsdp2", offload=True),
    "fsdp2, replicated": memfit.Sharding("fsdp2", dp_replicate=2),
}


class Model(Net):
    def __init__(self):
        super().__init__()
        self.inside = nn.Embedding(13, 7)


def build(dtype):
    torch.manual_seed(0)
    return Model().to(dtype)


def train(model, optimizer, share):
    """Return the gradients of the first backward, and the parameters after the last step."""
    torch.manual_seed(1)
    first = {}
    for step in range(STEPS):
        ids, wanted = torch.randint(13, (BATCH,)), torch.randint(5, (BATCH,))
        nn.functional.cross_entropy(model(ids[share]), wanted[share]).backward()
        if not step:
            first = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return first, {name: whole(parameter) for name, parameter in model.named_parameters()}


def compared(rank, ranks, plan, dtype):
    """Train under a plan and as one process; return the differences, and what this rank holds."""
    plan, dtype = PLANS[plan], getattr(torch, dtype)
    alone = build(dtype)
    expected = train(alone, sgd(alone.parameters()), slice(None))
    parts = plan if isinstance(plan, list) else [plan]
    (sharding,) = (part for part in parts if isinstance(part, memfit.Sharding))
    model = memfit.apply(build(dtype), plan)
    optimizer = sgd(model.parameters())
    optimizer = sharding.optimizer(optimizer, model)
    each = BATCH // ranks
    found = train(model, optimizer, slice(rank * each, (rank + 1) * each))
    errors = [
        max((mine[name] - theirs[name.removeprefix("module.")]).abs().max().item() for name in mine)
        for mine, theirs in zip(found, expected, strict=True)
    ]
    inner = getattr(optimizer, "optim", optimizer)
    state = sum(
        local(value).numel()
        for each in inner.state.values()
        for value in each.values()
        if torch.is_tensor(value)
    )
    return {
        "gradients": errors[0],
        "parameters": errors[1],
        "names": sorted(found[1]),
        "held": sum(local(parameter).numel() for parameter in model.parameters()),
        "state": state,
    }


def refused(model, plan):
    try:
        memfit.apply(model, plan)
    except UsageError as error:
        return str(error)
    return ""


def bucket_views():
    model = memfit.apply(build(torch.float32), memfit.Sharding("ddp"))
    model(torch.randint(13, (2,))).sum().backward()
    return len({parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()})


def mixed_precision():
    plan = memfit.Sharding("fsdp2", param_dtype="bf16", reduce_dtype="fp32", output_dtype="fp32")
    model, seen = build(torch.float32), []
    model.layers[0].up.register_forward_hook(lambda _, args, out: seen.extend((args[0].dtype, out.dtype)))
    result = memfit.apply(model, plan)(torch.randint(13, (2,)))
    result.sum().backward()
    kinds = [*seen, result.dtype, model.head.weight.dtype, model.head.weight.grad.dtype]
    return [str(kind).removeprefix("torch.") for kind in kinds]


def gathered_after_forward(reshard_after_forward):
    """Return how many blocks hold whole parameters between forward and backward."""
    plan = memfit.Sharding("fsdp2", reshard_after_forward=reshard_after_forward)
    model = memfit.apply(build(torch.float32), plan)
    result = model(torch.randint(13, (2,)))
    whole = sum(not isinstance(layer.up.weight, DTensor) for layer in model.layers)
    result.sum().backward()
    return whole


def refusals(rank, ranks):
    """Return the message of each refusal."""
    sharded = memfit.apply(build(torch.float32), memfit.Sharding("fsdp2"))
    stale = torch.optim.SGD(build(torch.float32).parameters(), lr=1.0)
    try:
        memfit.Sharding("fsdp2").optimizer(stale, sharded)
        created_before = ""
    except UsageError as error:
        created_before = str(error)
    return {
        "container": refused(build(torch.float32), memfit.Sharding("fsdp2", modules="layers")),
        "again": refused(sharded, memfit.Sharding("fsdp2")),
        "indivisible": refused(build(torch.float32), memfit.Sharding("fsdp2", dp_replicate=3)),
        "created before": created_before,
        "offload of fsdp2": refused(sharded, memfit.Offload()),
    }


def options(rank, ranks):
    """Return what options did: dtypes, gradients' storages, and blocks that are whole after a forward."""
    return {
        "kinds": mixed_precision(),
        "storages": bucket_views(),
        "gathered": [gathered_after_forward(choice) for choice in (None, True, False)],
    }
