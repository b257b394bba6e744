"""One rank of a process group on this machine's GPUs: reports what NCCL takes of its own at each first use.

``main()`` takes ``NcclProbeRank`` on the command line; rank 0 prints ``NcclProbeResult``, both as JSON. The
process must see one GPU: its own.
"""

import sys
from collections.abc import Iterator

import msgspec

from memfit.card.outside_allocator import OutsideMemoryMeter

_ELEMENTS = 1 << 24  # 64 MiB: large enough for NCCL to choose what it uses in training


class NcclProbeRank(msgspec.Struct, frozen=True):
    """Which rank this process is."""

    rank: int
    ranks: int
    store: str
    """A file that all ranks can write."""


class NcclProbeResult(msgspec.Struct, frozen=True):
    """Bytes that rank 0 held outside PyTorch's allocator, in the order of ``STAGES``."""

    outside: tuple[int, ...]


STAGES = ("before", "communicator", "first all-gather", "first all-reduce", "first all-to-all")


def _use_nccl_in_stages(settings: NcclProbeRank) -> Iterator[None]:
    """Join a process group and use it; pause after each of ``STAGES``."""
    import torch
    from torch import distributed

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    small = torch.ones(_ELEMENTS // settings.ranks, device=device)
    large = torch.ones(_ELEMENTS // settings.ranks * settings.ranks, device=device)
    yield
    distributed.init_process_group(
        "nccl",
        init_method=f"file://{settings.store}",
        rank=settings.rank,
        world_size=settings.ranks,
        device_id=device,  # so that the communicator is made now
    )
    yield
    distributed.all_gather(list(large.chunk(settings.ranks)), small)
    yield
    distributed.all_reduce(large)
    yield
    distributed.all_to_all_single(torch.empty_like(large), large)
    yield
    torch.cuda.synchronize()
    distributed.destroy_process_group()


def main() -> None:
    """Run the stages; rank 0 prints what it held after each."""
    settings = msgspec.json.decode(sys.argv[1], type=NcclProbeRank)
    meter = OutsideMemoryMeter()
    import torch

    outside = []
    for _ in _use_nccl_in_stages(settings):
        torch.cuda.synchronize()
        outside.append(meter.read().outside)
    if settings.rank == 0:
        print(msgspec.json.encode(NcclProbeResult(tuple(outside))).decode())
