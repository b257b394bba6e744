"""Train a small transformer with DistributedDataParallel; the script starts its ranks: python mp_spawn.py."""

import argparse

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

VOCABULARY = 1000


def build(vocabulary, width=256, layers=4):
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True),
        layers,
        enable_nested_tensor=False,
    )
    return nn.Sequential(nn.Embedding(vocabulary, width), encoder, nn.Linear(width, vocabulary))


def train(rank, ranks, steps, port):
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl" if on_gpu else "gloo", address, rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = DistributedDataParallel(build(VOCABULARY).to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    torch.manual_seed(1 + rank)  # each rank has batches of its own
    for step in range(steps):
        text = torch.randint(VOCABULARY, (4, 65), device=device)
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}  loss {loss.item():.4f}")
    if on_gpu:
        print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
        print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--port", type=int, default=29500)
    args = parser.parse_args()
    ranks = torch.cuda.device_count() or 2
    mp.spawn(train, args=(ranks, args.steps, args.port), nprocs=ranks)


if __name__ == "__main__":
    main()
