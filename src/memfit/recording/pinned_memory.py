"""Pinned host memory: buffers of loaders, and what a script or a plan offloads."""

import torch


def pinned_peak() -> int:
    """Return the most bytes of host memory that PyTorch has pinned.

    Its cache of pinned blocks included: PyTorch uses a block again once the copies from it are done.
    """
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0))
