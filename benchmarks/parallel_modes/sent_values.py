"""Scripts whose size, or whether they train, follows from what other ranks send, write or reduce."""

from pathlib import Path

import torch
import torch.distributed as dist
from jobs import run_variant
from torch import nn


def train(device, width, rows=8, do_step=lambda _loss: True):
    """Train a layer for three steps; each steps the optimizer if a function of its loss says so."""
    model = nn.Linear(width, width, device=device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        loss = model(torch.ones(rows, width, device=device)).square().mean()
        loss.backward()
        if do_step(loss):
            optimizer.step()
        optimizer.zero_grad()


def flags_and_sizes(device):
    first = dist.get_rank() == 0
    flags = torch.tensor([1, 1, 1] if first else [0, 0, 0], device=device)
    size = torch.tensor([4096 if first else 0], device=device)
    dist.broadcast(flags, 0)
    dist.broadcast(size, 0)
    do_train, _, _ = flags.tolist()
    if do_train:
        train(device, size.item() // 2)


def on_the_cpu(device):
    group = dist.new_group(backend="gloo")
    size = torch.tensor([2048 if dist.get_rank() == 0 else 0])
    dist.broadcast(size, 0, group=group)
    train(device, int(size))


def along_a_pipeline(device):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shape = torch.tensor([8, 2048], device=device)
    if rank > 0:
        dist.recv(shape, rank - 1)
    if rank < ranks - 1:
        dist.send(shape * torch.tensor([2, 1], device=device), rank + 1)
    rows, width = shape.tolist()
    train(device, width, rows)


def file_before_barrier(device):
    index, first = Path("index.txt"), dist.get_rank() == 0
    if first:
        index.write_text(" ".join(map(str, range(2048))))
    dist.barrier()
    width = len(index.read_text().split())
    dist.barrier()
    if first:
        index.unlink()
    train(device, width)


def overflow_flag(device):
    def all_fit(loss):
        overflow = torch.zeros(1, dtype=torch.int32, device=device)
        overflow += torch.isinf(loss).any()
        dist.all_reduce(overflow, dist.ReduceOp.MAX)
        return overflow.item() == 0

    train(device, 2048, do_step=all_fit)


def finite_checks(device):
    def is_finite(loss):
        total = loss.detach().clone()
        dist.all_reduce(total)
        return torch.isfinite(total) and not torch.isnan(loss)

    train(device, 2048, do_step=is_finite)


if __name__ == "__main__":
    run_variant(globals())
