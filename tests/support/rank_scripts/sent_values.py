"""Train a model whose size, and whether it trains, follow from what other ranks send, write and reduce."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

INDEX = Path("index.txt")

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl")
rank, ranks = dist.get_rank(), dist.get_world_size()
first, last = rank == 0, rank == ranks - 1

# Rank 0 broadcasts flags and sizes.
flags = torch.tensor([1, 0, 1] if first else [0, 0, 0], device=device)
size = torch.tensor([512 if first else 0], device=device)
dist.broadcast(flags, 0)
dist.broadcast(size, 0)
do_train, do_validate, do_test = flags.tolist()
width = int(size // 2 * 3)

# Each rank passes on a shape that it changes.
shape = torch.tensor([8, width], device=device)
if not first:
    dist.recv(shape, rank - 1)
if not last:
    dist.send(shape + torch.tensor([rank + 1, 0], device=device), rank + 1)
rows, columns = shape.tolist()

# Rank 0 writes a file, and all read it after a barrier.
if first:
    INDEX.write_text(" ".join(map(str, range(96))))
dist.barrier()
indices = INDEX.read_text().split()
dist.barrier()
if first:
    INDEX.unlink()

# A model trains if no rank has found an overflow, and if its losses are finite.
model = nn.Linear(columns, 8 * len(indices), device=device)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    loss = model(torch.ones(rows, columns, device=device)).square().mean()
    loss.backward()
    overflow = torch.zeros(1, dtype=torch.int32, device=device)
    if not torch.isfinite(loss):
        overflow += 1
    dist.all_reduce(overflow, dist.ReduceOp.MAX)
    voters = torch.ones(1, dtype=torch.int64, device=device)
    dist.all_reduce(voters)
    if do_train and not do_validate and overflow.item() == 0 and voters.item() == ranks:
        optimizer.step()
    optimizer.zero_grad()
if do_test:
    torch.empty((16 * rows + int(voters)) << 20, dtype=torch.uint8, device=device)
print(rank, rows, columns, len(indices), torch.cuda.max_memory_allocated())
dist.destroy_process_group()
