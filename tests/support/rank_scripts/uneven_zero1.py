"""Train under DDP a network whose parameters ZeroRedundancyOptimizer cannot deal out evenly."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

WIDTHS = (1024, 512, 64, 1536, 16)


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    layers = [nn.Linear(*pair) for pair in zip(WIDTHS[:-1], WIDTHS[1:], strict=True)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers).cuda())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    for _ in range(3):
        model(torch.randn(8, WIDTHS[0], device="cuda")).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
