"""fully_shard (FSDP2) with each option, hybrid sharding and tensor parallelism."""

from functools import partial

import torch
import torch.distributed as dist
from jobs import Model, batch, check_shards, loss_of, mesh_of_pairs, on_meta, run_variant, train, updates
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)


def shard(model, **options):
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def trained(device, *, checkpointed=False, **options):
    model = Model(checkpointed=checkpointed).to(device)
    whole = sum(each.numel() for each in model.parameters())
    optimizer = train(shard(model, **options), device)
    ranks = options["mesh"]["shard"].size() if "mesh" in options else dist.get_world_size()
    check_shards(optimizer, whole, ranks, pieces=1)


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
plain = partial(trained)
checkpointed = partial(trained, checkpointed=True)
keep_unsharded = partial(trained, reshard_after_forward=False)
reshard_to_two = partial(trained, reshard_after_forward=2)
mixed = partial(trained, mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32))
mixed_checkpointed = partial(trained, checkpointed=True, mp_policy=HALF)
no_offload = partial(trained, offload_policy=OffloadPolicy())


def offload(device):
    train(shard(Model(), offload_policy=CPUOffloadPolicy()), device)


def prefetch(device):
    model = shard(Model(4).to(device))
    blocks = list(model.blocks)
    for block, later in zip(blocks, blocks[1:], strict=False):
        block.set_modules_to_forward_prefetch([later])
        later.set_modules_to_backward_prefetch([block])
    train(model, device)


def hybrid(device):
    trained(device, mesh=mesh_of_pairs("replicate", "shard"))


def meta(device):
    model = shard(on_meta())
    model.to_empty(device=device)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    train(model, device)


def accumulation(device):
    model = shard(Model().to(device))
    for _ in updates(torch.optim.AdamW(model.parameters())):
        model.set_requires_gradient_sync(False)
        loss_of(model, batch(device)).backward()
        model.set_requires_gradient_sync(True)
        loss_of(model, batch(device)).backward()


def clip(device):
    model = shard(Model().to(device))
    for _ in updates(torch.optim.AdamW(model.parameters())):
        loss_of(model, batch(device)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if norm.item() > 1e9:
            raise ValueError("diverged")


def broadcast_full_state(device):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    full = Model().state_dict() if dist.get_rank() == 0 else {}
    model = shard(on_meta())
    model.to_empty(device=device)
    set_model_state_dict(
        model, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )
    train(model, device)


TENSOR = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
TENSOR |= {name: RowwiseParallel() for name in ("o", "down")}


def tensor_parallel_model(device, mesh, **options):
    model = Model(**options).to(device)
    for block in model.blocks:
        parallelize_module(block, mesh, TENSOR)
    return model


def tensor_parallel(device, checkpointed=False):
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    model = tensor_parallel_model(device, mesh, checkpointed=checkpointed)
    train(model, device, torch.optim.AdamW(model.parameters(), foreach=False))  # DTensors and others


tensor_parallel_checkpointed = partial(tensor_parallel, checkpointed=True)


def sequence_parallel(device):
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    model = Model().to(device)
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        },
    )
    styles = {name: SequenceParallel() for name in ("norm1", "norm2")}
    styles |= {name: ColwiseParallel(input_layouts=Shard(1)) for name in ("q", "k", "v", "up")}
    styles |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("o", "down")}
    for block in model.blocks:
        parallelize_module(block, mesh, styles)
    for _ in updates(torch.optim.AdamW(model.parameters())):
        with loss_parallel():
            loss = loss_of(model, batch(device))
            loss.backward()
    if dist.get_rank() == 0:
        print(loss.item())


def two_dimensions(device):
    mesh = mesh_of_pairs("dp", "tp")
    train(shard(tensor_parallel_model(device, mesh["tp"]), mesh=mesh["dp"]), device)


def three_dimensions(device):
    mesh = init_device_mesh(
        "cuda", (2, dist.get_world_size() // 4, 2), mesh_dim_names=("replicate", "shard", "tp")
    )
    model = tensor_parallel_model(device, mesh["tp"])
    train(shard(model, mesh=mesh["replicate", "shard"]), device)


def compiled(device, backend="aot_eager"):
    model = Model().to(device)
    for block in model.blocks:
        block.compile(backend=backend)
    train(shard(model), device)


compiled_inductor = partial(compiled, backend="inductor")


def compiled_whole(device):
    train(torch.compile(shard(Model().to(device)), backend="aot_eager"), device)


def fused_adam(device):
    model = shard(Model().to(device))
    train(model, device, torch.optim.AdamW(model.parameters(), fused=True))


def replicate(device):
    from torch.distributed._composable.replicate import replicate

    train(replicate(Model().to(device)), device)


if __name__ == "__main__":
    run_variant(globals())
