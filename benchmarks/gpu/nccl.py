"""Measure what NCCL takes of its own on this machine's GPUs, beside the rule that dry runs use.

    torchrun --nproc-per-node gpu benchmarks/gpu/nccl.py

Rank 0 prints the MiB that it holds outside PyTorch's allocator after each first use, less those before.
"""

import os
from collections.abc import Iterator
from datetime import timedelta

import torch
from torch import distributed

from memfit.card.outside_allocator import OutsideMemoryMeter
from memfit.devices import find_device
from memfit.ghost.ranks.nccl_memory import KERNELS, NcclCommunicator, nccl_memory

ELEMENTS = 1 << 24
"""64 MiB: large enough for NCCL to choose what it uses in training."""
MIB = 1 << 20


def first_uses(rank: int, ranks: int) -> Iterator[tuple[str, dict[str, int]]]:
    """Use NCCL for the first time in one way after the other; yield its name, and what has run by then."""
    device = torch.device("cuda", rank)
    small = torch.ones(ELEMENTS // ranks, device=device)
    large = torch.ones(ELEMENTS // ranks * ranks, device=device)
    swapped = torch.empty_like(large)
    yield "before", {}
    # With a device, the communicator is made now.
    distributed.init_process_group("nccl", device_id=device, timeout=timedelta(minutes=3))
    yield "communicator", {}
    distributed.all_gather(list(large.chunk(ranks)), small)
    yield "first all-gather", {"collectives": True}
    distributed.all_reduce(large)
    yield "first all-reduce", {"collectives": True, "all_reduces": True}
    distributed.all_to_all_single(swapped, large)
    others = {"sends": ranks - 1, "receives": ranks - 1}
    yield "first all-to-all", {"collectives": True, "all_reduces": True, **others}


def main() -> None:
    """Use NCCL as one rank; rank 0 prints a line for each first use."""
    rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    torch.cuda.set_device(rank)
    meter, before = OutsideMemoryMeter(), 0
    card = find_device(torch.cuda.get_device_name(rank))
    for what, used in first_uses(rank, ranks):
        torch.cuda.synchronize()
        if rank:
            continue
        held = meter.read().outside
        before = before or held
        communicator = NcclCommunicator(ranks=ranks, local_ranks=ranks, **used)
        rule = KERNELS + nccl_memory(communicator, card, os.environ).total
        if what != "before":
            print(f"{what:20} held {(held - before) / MIB:8,.1f}   assumed {rule / MIB:8,.1f}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
