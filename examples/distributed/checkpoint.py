"""Train with fully_shard; save and load sharded state, and write a full state dict on rank 0."""

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def start():
    """Join the process group; return this rank's device."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(0)
    return device


def finish(device):
    """Print this rank's peaks and leave the process group."""
    if device.type == "cuda":
        print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
        print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")
    dist.destroy_process_group()


def build(device, width=512, layers=8):
    """Return a sharded model and its optimizer."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).to(device)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4)


def train(model, optimizer, device, steps):
    for step in range(steps):
        x = torch.randn(16, 512, device=device)
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss.item():.4f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "sharded")
    args = parser.parse_args()
    device = start()
    model, optimizer = build(device)
    train(model, optimizer, device, args.steps)

    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=args.folder)

    model, optimizer = build(device)  # as a resumed job begins
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=args.folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    del weights, state

    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))  # on the GPU
    if dist.get_rank() == 0:
        torch.save(whole, args.folder / "model.pt")
    finish(device)


if __name__ == "__main__":
    main()
