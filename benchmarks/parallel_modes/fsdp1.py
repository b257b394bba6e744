"""FullyShardedDataParallel (FSDP1) with each sharding strategy and option."""

import functools

import torch
import torch.distributed as dist
from jobs import Block, Model, batch, loss_of, run_variant, train, train_accumulated
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardedStateDictConfig,  # noqa: F401 - scripts import it
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

POLICY = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})


def wrapped(device, *, checkpointed=False, **options):
    model = FullyShardedDataParallel(Model(), device_id=device, auto_wrap_policy=POLICY, **options)
    if checkpointed:
        apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda each: isinstance(each, Block)
        )
    return model


def full_shard(device):
    train(wrapped(device), device)


def checkpointed(device):
    train(wrapped(device, checkpointed=True), device)


def shard_grad_op(device):
    train(wrapped(device, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP), device)


def no_shard(device):
    train(wrapped(device, sharding_strategy=ShardingStrategy.NO_SHARD), device)


def hybrid(device):
    mesh = init_device_mesh("cuda", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
    train(wrapped(device, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh), device)


def hybrid_without_mesh(device):
    train(wrapped(device, sharding_strategy=ShardingStrategy.HYBRID_SHARD), device)


def orig_params(device):
    train(wrapped(device, use_orig_params=True), device)


def offload(device):
    train(wrapped(device, cpu_offload=CPUOffload(offload_params=True)), device)


def unlimited(device):
    train(wrapped(device, limit_all_gathers=False, forward_prefetch=True), device)


def backward_post(device):
    train(wrapped(device, backward_prefetch=BackwardPrefetch.BACKWARD_POST), device)


def no_prefetch(device):
    train(wrapped(device, backward_prefetch=None), device)


def mixed(device):
    half = MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16
    )
    train(wrapped(device, mixed_precision=half), device)


def clip(device):
    model = wrapped(device, use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        loss_of(model, batch(device)).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()


def no_sync(device):
    train_accumulated(wrapped(device), device)


def sync_module_states(device):
    if dist.get_rank() == 0:
        model, init = Model(), None
    else:
        with torch.device("meta"):
            model = Model()
        init = lambda module: module.to_empty(device=device, recurse=False)  # noqa: E731
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
