"""Train a stack of blocks as a pipeline: each rank has a stage, and 1F1B passes micro-batches along."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


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


def block(width):
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    device = start()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    part = nn.Sequential(*(block(256) for _ in range(2))).to(device)
    shape = torch.empty(8, 256, device=device, requires_grad=True)  # of what stages pass on
    first = shape.detach()  # the input itself needs no gradient
    stage = PipelineStage(part, rank, ranks, device, input_args=shape if rank else first, output_args=shape)
    schedule = Schedule1F1B(stage, n_microbatches=2 * ranks, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(part.parameters(), lr=3e-4)
    for step in range(args.steps):
        x = torch.randn(16 * ranks, 256, device=device)  # the same on every rank
        losses = []
        if rank == 0:
            schedule.step(x)
        elif rank == ranks - 1:
            schedule.step(target=x.flip(1), losses=losses)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        if losses:
            print(f"step {step}  loss {torch.stack(losses).mean().item():.4f}")
    finish(device)


if __name__ == "__main__":
    main()
