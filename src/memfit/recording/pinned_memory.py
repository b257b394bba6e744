"""Pinned host memory: buffers of loaders, and what a script or a plan offloads."""

import torch


def pinned_peak() -> int:
    """Return the most bytes of host memory that PyTorch has pinned; 0 where it does not count them.

    Its cache of pinned blocks included: PyTorch uses a block again once the copies from it are done.
    """
    statistics: dict[str, int] = getattr(torch.cuda, "host_memory_stats", dict)()
    return statistics.get("allocated_bytes.peak", 0)
