"""Train a mixture of experts with expert parallelism: each rank has two experts, and ranks exchange tokens."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

WIDTH = 256


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


class Experts(nn.Module):
    def __init__(self, top=2):
        super().__init__()
        self.ranks, self.top = dist.get_world_size(), top
        self.gate = nn.Linear(WIDTH, 2 * self.ranks)
        self.own = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(2)
        )

    def forward(self, x):
        weight, chosen = self.gate(x).softmax(dim=-1).topk(self.top)
        order = chosen.flatten().argsort()  # tokens for the first expert first
        counts = torch.bincount(chosen.flatten(), minlength=2 * self.ranks)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        sent = counts.view(self.ranks, 2).sum(1).tolist()
        received = arriving.view(self.ranks, 2).sum(1).tolist()
        parts = x[order // self.top]
        tokens = all_to_all_single_autograd(parts, received, sent, dist.group.WORLD)
        pieces = tokens.split(arriving.tolist())  # of each rank: for the first own expert, for the second
        done = [self.own[index % 2](piece) for index, piece in enumerate(pieces)]
        back = all_to_all_single_autograd(torch.cat(done), sent, received, dist.group.WORLD)
        return x.index_add(0, order // self.top, back * weight.flatten()[order].unsqueeze(1))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    device = start()
    model = Experts().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    torch.manual_seed(1 + dist.get_rank())  # each rank has batches of its own
    for step in range(args.steps):
        x = torch.randn(512, WIDTH, device=device)
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        for parameter in model.gate.parameters():  # every rank has the gate
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss.item():.4f}")
    finish(device)


if __name__ == "__main__":
    main()
