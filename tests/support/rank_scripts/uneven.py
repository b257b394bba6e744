"""Train under FSDP2 a network of which no dimension is a multiple of the number of ranks."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

WIDTH, HIDDEN, LAYERS, VOCABULARY = 1000, 2731, 3, 32767


def block():
    return nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH, bias=False)
    )


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), *(block() for _ in range(LAYERS)), nn.Linear(WIDTH, VOCABULARY)
    ).cuda()
    for layer in model[1:-1]:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        tokens = torch.randint(VOCABULARY, (2, 16), device="cuda")
        model(tokens).float().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
