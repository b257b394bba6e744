"""fully_shard (FSDP2) with each option, hybrid sharding and tensor parallelism."""

import torch
import torch.distributed as dist
from jobs import Model, batch, loss_of, run_variant, train
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
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)


def shard(model, **options):
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def plain(device):
    train(shard(Model().to(device)), device)


def checkpointed(device):
    train(shard(Model(checkpointed=True).to(device)), device)


def keep_unsharded(device):
    train(shard(Model().to(device), reshard_after_forward=False), device)


def reshard_to_two(device):
    train(shard(Model().to(device), reshard_after_forward=2), device)


def mixed(device):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    train(shard(Model().to(device), mp_policy=policy), device)


def mixed_checkpointed(device):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    train(shard(Model(checkpointed=True).to(device), mp_policy=policy), device)


def offload(device):
    train(shard(Model(), offload_policy=CPUOffloadPolicy()), device)


def no_offload(device):
    train(shard(Model().to(device), offload_policy=OffloadPolicy()), device)


def prefetch(device):
    model = shard(Model(4).to(device))
    blocks = list(model.blocks)
    for block, later in zip(blocks, blocks[1:], strict=False):
        block.set_modules_to_forward_prefetch([later])
        later.set_modules_to_backward_prefetch([block])
    train(model, device)


def hybrid(device):
    mesh = init_device_mesh("cuda", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
    train(shard(Model().to(device), mesh=mesh), device)


def meta(device):
    with torch.device("meta"):
        model = Model()
    shard(model)
    model.to_empty(device=device)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    train(model, device)


def accumulation(device):
    model = shard(Model().to(device))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model.set_requires_gradient_sync(False)
        loss_of(model, batch(device)).backward()
        model.set_requires_gradient_sync(True)
        loss_of(model, batch(device)).backward()
        optimizer.step()
        optimizer.zero_grad()


def clip(device):
    model = shard(Model().to(device))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        loss_of(model, batch(device)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if norm.item() > 1e9:
            raise ValueError("diverged")
        optimizer.step()
        optimizer.zero_grad()


def broadcast_full_state(device):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    full = Model().state_dict() if dist.get_rank() == 0 else {}
    with torch.device("meta"):
        model = Model()
    shard(model)
    model.to_empty(device=device)
    set_model_state_dict(
        model, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )
    train(model, device)


TENSOR = {
    "q": ColwiseParallel(),
    "k": ColwiseParallel(),
    "v": ColwiseParallel(),
    "o": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


def tensor_parallel_model(model, mesh):
    for block in model.blocks:
        parallelize_module(block, mesh, TENSOR)
        block.heads //= mesh.size()
    return model


def tensor_parallel(device, checkpointed=False):
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    model = Model(checkpointed=checkpointed).to(device)
    for block in model.blocks:
        parallelize_module(block, mesh, TENSOR)
    train(model, device, torch.optim.AdamW(model.parameters(), foreach=False))  # DTensors and others


def tensor_parallel_checkpointed(device):
    tensor_parallel(device, checkpointed=True)


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
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "norm1": SequenceParallel(),
                "norm2": SequenceParallel(),
                "q": ColwiseParallel(input_layouts=Shard(1)),
                "k": ColwiseParallel(input_layouts=Shard(1)),
                "v": ColwiseParallel(input_layouts=Shard(1)),
                "o": RowwiseParallel(output_layouts=Shard(1)),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        with loss_parallel():
            loss = loss_of(model, batch(device))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(loss.item())
    assert PrepareModuleInput


def two_dimensions(device):
    mesh = init_device_mesh("cuda", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = Model().to(device)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], TENSOR)
    train(shard(model, mesh=mesh["dp"]), device)


def three_dimensions(device):
    mesh = init_device_mesh(
        "cuda", (2, dist.get_world_size() // 4, 2), mesh_dim_names=("replicate", "shard", "tp")
    )
    model = Model().to(device)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], TENSOR)
    train(shard(model, mesh=mesh["replicate", "shard"]), device)


def compiled(device):
    model = Model().to(device)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    train(shard(model), device)


def compiled_inductor(device):
    model = Model().to(device)
    for block in model.blocks:
        block.compile()
    train(shard(model), device)


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
