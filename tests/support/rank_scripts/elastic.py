"""Trains under torchrun and resumes after every restart: saves after each update, and loads what it finds.

    torchrun --nproc-per-node 4 tests/support/rank_scripts/elastic.py FOLDER [--mode fsdp2] [--pause 0.05]

Writes a digest of each rank's parameters, optimizer state and random numbers at the end.
"""

import argparse
import hashlib
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import memfit

options = argparse.ArgumentParser()
options.add_argument("folder", type=Path)
options.add_argument("--mode", default="fsdp2")
options.add_argument("--pause", type=float, default=0.0)
options = options.parse_args()

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 30), nn.ReLU(), nn.BatchNorm1d(30), nn.Dropout(0.2), nn.Linear(30, 3))
data = torch.randn(192, 8)
torch.manual_seed(rank)


def loss(model, batch):
    time.sleep(options.pause)
    return model(batch).square().mean()


engine = memfit.Engine(
    model,
    [memfit.Sharding(options.mode), memfit.Accumulation(parts_per_batch=2)],
    optimizer=torch.optim.AdamW,
    loss=loss,
    callbacks=[memfit.Saving(options.folder / "run")],
)
resumed_at = 0
if (options.folder / "run").exists():
    engine.load(options.folder / "run")
    resumed_at = engine.optimizer_step
engine.fit(DataLoader(data, batch_size=4, sampler=DistributedSampler(data)), epochs=2)

digest = hashlib.sha256()
state = engine.state_dict()
tensors = [*state["model"].values(), state["random"]["torch"]]
tensors += [tensor for entry in state["optimizer"]["state"].values() for tensor in entry.values()]
for tensor in tensors:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    digest.update(local.numpy().tobytes())
result = f"{ranks} {resumed_at} {engine.optimizer_step} {digest.hexdigest()}"
(options.folder / f"result-{rank}").write_text(result)
dist.destroy_process_group()
