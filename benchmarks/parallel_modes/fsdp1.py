"""FullyShardedDataParallel (FSDP1) with each sharding strategy and option."""

from functools import partial

import torch
import torch.distributed as dist
from jobs import (
    Block,
    Model,
    batch,
    check_shards,
    loss_of,
    mesh_of_pairs,
    on_meta,
    run_variant,
    train,
    train_accumulated,
    updates,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

POLICY = partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})


def wrapped(device, *, checkpointed=False, **options):
    model = FullyShardedDataParallel(Model(), device_id=device, auto_wrap_policy=POLICY, **options)
    if checkpointed:
        apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda each: isinstance(each, Block)
        )
    return model


def trained(device, **options):
    optimizer = train(wrapped(device, **options), device)
    strategy = options.get("sharding_strategy")
    ranks = 1 if strategy is ShardingStrategy.NO_SHARD else dist.get_world_size()
    ranks = 2 if "device_mesh" in options else ranks
    check_shards(optimizer, sum(each.numel() for each in Model().parameters()), ranks, pieces=3)


HALF = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
full_shard = partial(trained)
checkpointed = partial(trained, checkpointed=True)
shard_grad_op = partial(trained, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
no_shard = partial(trained, sharding_strategy=ShardingStrategy.NO_SHARD)
hybrid_without_mesh = partial(trained, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
orig_params = partial(trained, use_orig_params=True)
offload = partial(trained, cpu_offload=CPUOffload(offload_params=True))
unlimited = partial(trained, limit_all_gathers=False, forward_prefetch=True)
backward_post = partial(trained, backward_prefetch=BackwardPrefetch.BACKWARD_POST)
no_prefetch = partial(trained, backward_prefetch=None)
mixed = partial(trained, mixed_precision=HALF)


def hybrid(device):
    hybrid_without_mesh(device, device_mesh=mesh_of_pairs("replicate", "shard"))


def clip(device):
    model = wrapped(device, use_orig_params=True)
    for _ in updates(torch.optim.AdamW(model.parameters())):
        loss_of(model, batch(device)).backward()
        model.clip_grad_norm_(1.0)


def no_sync(device):
    train_accumulated(wrapped(device), device)


def sync_module_states(device):
    if dist.get_rank() == 0:
        model, init = Model(), None
    else:
        model, init = on_meta(), partial(nn.Module.to_empty, device=device, recurse=False)
    model = FullyShardedDataParallel(
        model, device_id=device, auto_wrap_policy=POLICY, sync_module_states=True, param_init_fn=init
    )
    train(model, device)


def full_state(device):
    model = wrapped(device)
    optimizer = train(model, device)
    with FullyShardedDataParallel.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
    ):
        state = model.state_dict()
        FullyShardedDataParallel.optim_state_dict(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(state, "model.pt")


def sharded_state(device):
    import torch.distributed.checkpoint as dcp

    model = wrapped(device)
    optimizer = train(model, device)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {
            "model": model.state_dict(),
            "optim": FullyShardedDataParallel.optim_state_dict(model, optimizer),
        }
        dcp.save(state, checkpoint_id="fsdp1")
        dcp.load(state, checkpoint_id="fsdp1")
        model.load_state_dict(state["model"])


def compiled(device):
    train(torch.compile(wrapped(device, use_orig_params=True), backend="aot_eager"), device)


def summon(device):
    model = wrapped(device)
    train(model, device)
    with FullyShardedDataParallel.summon_full_params(model):
        sum(each.numel() for each in model.parameters())


def frozen(device):
    model = Model()
    for block in model.blocks:
        block.requires_grad_(False)
    model = FullyShardedDataParallel(model, device_id=device, auto_wrap_policy=POLICY, use_orig_params=True)
    train(model, device)


if __name__ == "__main__":
    run_variant(globals())
