"""Train a 2 B decoder on two GPUs with one all-reduce for each gradient, written by hand; --shard-optimizer for ZeRO-1.

    memfit dry-run --nproc 2 benchmarks/accuracy/naive_ddp.py --shard-optimizer

Prints the peaks of a step before and after the optimizer's, the mean of five steps after five to warm up.
"""

import argparse
import os
import statistics

import torch
import torch.distributed as dist
from decoder import AdamW, Decoder, Size, cross_entropy

SIZE = Size(width=1600, hidden=6400, layers=48, heads=25, context=128)


class Balanced:
    """An optimizer of the parameters that are this rank's: each goes to the rank with the fewest elements."""

    def __init__(self, parameters):
        counts = [0] * dist.get_world_size()
        self.owners = {}
        for parameter in parameters:
            owner = counts.index(min(counts))
            self.owners[parameter] = owner
            counts[owner] += parameter.numel()
        self.owned = AdamW([each for each, owner in self.owners.items() if owner == dist.get_rank()])

    def zero_grad(self):
        for parameter in self.owners:
            parameter.grad = None

    def step(self):
        self.owned.step()
        for parameter, owner in self.owners.items():
            dist.broadcast(parameter.data, src=owner)


def largest_so_far():
    found = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=8, help="sequences of each rank")
    parser.add_argument("--shard-optimizer", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    dist.barrier()
    torch.cuda.reset_peak_memory_stats()
    model = Decoder(SIZE).to(device)
    found = {"after_model": [largest_so_far()], "forward_backward": [], "in_step": []}
    optimizer = (Balanced if args.shard_optimizer else AdamW)(model.parameters())
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    for _ in range(10):
        x = torch.randint(0, SIZE.vocabulary, (args.batch, SIZE.context), device=device)
        y = torch.randint(0, SIZE.vocabulary, (args.batch, SIZE.context), device=device)
        torch.cuda.synchronize()
        optimizer.zero_grad()
        logits = model(x)
        loss = cross_entropy(logits, y)
        loss.backward()
        torch.cuda.synchronize()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad.mul_(1 / dist.get_world_size())
        torch.cuda.synchronize()
        found["forward_backward"].append(largest_so_far())
        optimizer.step()
        found["in_step"].append(largest_so_far())
    for name, sizes in found.items():
        print(f"{name} {statistics.mean(sizes[-5:]) / 2**20:.11f} MiB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
