"""Every collective as scripts call it, groups and meshes, and objects."""

import datetime

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from jobs import start, variant
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def tensors(device):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = torch.ones(4, 8, device=device)
    for operation in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        dist.all_reduce(x, op=operation)
    dist.reduce(x, dst=0)
    dist.broadcast(x, src=ranks - 1)
    dist.gather(x, [torch.empty_like(x) for _ in range(ranks)] if rank == 0 else None, dst=0)
    dist.scatter(x, [torch.empty_like(x) for _ in range(ranks)] if rank == 0 else None, src=0)
    dist.all_gather([torch.empty_like(x) for _ in range(ranks)], x)
    dist.all_gather(
        [torch.empty(1 + each, 8, device=device) for each in range(ranks)],
        x[:1].expand(1 + rank, 8).contiguous(),
    )
    dist.all_gather_into_tensor(torch.empty(4 * ranks, 8, device=device), x)
    dist.reduce_scatter(x, [torch.ones_like(x) for _ in range(ranks)])
    dist.reduce_scatter_tensor(x, torch.ones(4 * ranks, 8, device=device))
    dist.all_to_all([torch.empty_like(x) for _ in range(ranks)], [x.clone() for _ in range(ranks)])
    dist.all_to_all_single(torch.empty(2 * ranks, device=device), torch.ones(2 * ranks, device=device))
    dist.barrier()
    dist.barrier(device_ids=[device.index])
    dist.monitored_barrier()


def points(device):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, y = torch.ones(8, device=device), torch.empty(8, device=device)
    if rank > 0:
        dist.recv(y, src=rank - 1)
    if rank < ranks - 1:
        dist.send(x, dst=rank + 1)
    ring = [
        dist.P2POp(dist.isend, x, (rank + 1) % ranks),
        dist.P2POp(dist.irecv, y, (rank - 1) % ranks),
    ]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    dist.irecv(y, src=(rank - 1) % ranks).wait()
    dist.isend(x, dst=(rank + 1) % ranks).wait()


def any_source(device):
    dist.recv(torch.empty(8, device=device))


def coalesced(device):
    ranks = dist.get_world_size()
    with dist._coalescing_manager(device=device, async_ops=True) as works:
        for _ in range(3):
            dist.all_reduce(torch.ones(8, device=device))
    works.wait()
    with dist._coalescing_manager(device=device):
        for _ in range(3):
            dist.all_gather_into_tensor(torch.empty(8 * ranks, device=device), torch.ones(8, device=device))


def functional(device):
    ranks = dist.get_world_size()
    x = torch.ones(2 * ranks, 8, device=device)
    group = dist.group.WORLD
    for out in (
        funcol.all_reduce(x, "sum", group),
        funcol.all_gather_tensor(x, 0, group),
        funcol.reduce_scatter_tensor(x, "sum", 0, group),
        funcol.all_to_all_single(x, None, None, group),
        funcol.broadcast(x, 0, group),
        funcol.all_gather_tensor_autograd(x.requires_grad_(), 0, group),
    ):
        print(tuple(out.shape), float(out.sum()))


def shapes_then_gather(device):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = torch.ones(3 + rank, 8, device=device)
    size = torch.tensor([mine.shape[0]], device=device)
    sizes = [torch.zeros_like(size) for _ in range(ranks)]
    dist.all_gather(sizes, size)
    longest = max(int(each) for each in sizes)
    padded = torch.zeros(longest, 8, device=device)
    padded[: mine.shape[0]] = mine
    everything = [torch.zeros_like(padded) for _ in range(ranks)]
    dist.all_gather(everything, padded)
    torch.cat([each[: int(count)] for each, count in zip(everything, sizes, strict=True)])


def objects(device):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.ones(1, device=device)
    found = [None] * ranks
    dist.all_gather_object(found, (rank, (3, 4)))
    assert None not in found
    dist.gather_object({"rank": rank}, found if rank == 0 else None, dst=0)
    received = [{"lr": 1e-3}]
    dist.broadcast_object_list(received, src=0)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"key{rank}", "1")
    store.wait([f"key{rank}"], datetime.timedelta(seconds=5))
    store.get(f"key{rank}")


def broadcast_seed(device):
    seed = torch.randint(2**31, (1,), device=device)
    dist.broadcast(seed, src=0)
    torch.manual_seed(int(seed.item()))
    shared = [None if dist.get_rank() else "run-17"]
    dist.broadcast_object_list(shared, src=0)


def groups(device):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine, _all = dist.new_subgroups(group_size=2)
    x = torch.ones(8, device=device)
    dist.all_reduce(x, group=mine)
    mine, _all = dist.new_subgroups_by_enumeration([[each, each + 1] for each in range(0, ranks, 2)])
    dist.all_reduce(x, group=mine)
    alone = dist.new_group([0])
    if rank == 0:
        dist.all_reduce(x, group=alone)
    odd = dist.new_group(range(1, ranks, 2), use_local_synchronization=True) if rank % 2 else None
    if odd is not None:
        dist.all_reduce(x, group=odd)
    dist.barrier()
    dist.destroy_process_group(mine)


def split(device):
    ranks = dist.get_world_size()
    dist.all_reduce(torch.ones(1, device=device))
    halves = [list(range(ranks // 2)), list(range(ranks // 2, ranks))]
    group = dist.split_group(split_ranks=halves)
    dist.all_reduce(torch.ones(8, device=device), group=group)


def meshes(device):
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cuda", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    flat = mesh["dp", "tp"]._flatten("all")
    dist.all_reduce(torch.ones(8, device=device), group=flat.get_group())
    dist.all_reduce(torch.ones(8, device=device), group=mesh["tp"].get_group())
    assert mesh.get_local_rank("tp") == dist.get_rank() % 2
    if ranks >= 4:
        cube = init_device_mesh("cuda", (ranks // 4, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        dist.all_reduce(torch.ones(8, device=device), group=cube["dp", "tp"]._flatten("dp_tp").get_group())
        assert cube["pp"].size() == ranks // 4
    DeviceMesh("cuda", list(range(ranks)))
    DeviceMesh.from_group(dist.new_group(range(ranks)), "cuda")


def dtensors(device):
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    x = distribute_tensor(torch.ones(64, 32, device=device), mesh, [Shard(0)])
    x.redistribute(placements=[Replicate()]).to_local().sum().item()
    x.redistribute(placements=[Shard(1)])
    DTensor.from_local(torch.ones(4, 4, device=device), mesh, [Partial()]).full_tensor()
    print((x @ x.T).full_tensor().shape, x.sum().full_tensor().item())


def cpu_and_cuda(device):
    dist.all_reduce(torch.ones(8))
    dist.all_reduce(torch.ones(8, device=device))
    group = dist.new_group(backend="gloo")
    dist.monitored_barrier(group)
    dist.all_reduce(torch.ones(8), group=group)
    received = torch.zeros(8)
    dist.broadcast(received, src=0, group=group)


def symmetric_memory(device):
    import torch.distributed._symmetric_memory as symm

    x = symm.empty(1024, device=device, dtype=torch.float32)
    symm.rendezvous(x, dist.group.WORLD)
    torch.ops.symm_mem.one_shot_all_reduce(x, "sum", dist.group.WORLD.group_name)


if __name__ == "__main__":
    chosen = variant(globals())
    chosen(start("cpu:gloo,cuda:nccl" if chosen is cpu_and_cuda else "nccl"))
