"""What cuBLAS works in: memory from PyTorch's allocator, of which PyTorch says nowhere where it is."""

from typing import Any

import torch


def workspaces(segments: list[dict[str, Any]]) -> dict[int, int]:
    """Give back what cuBLAS works in, and see which blocks that were.

    PyTorch keeps one for each handle and stream, until the process ends, and says nowhere where they are. The
    history is over by now: what is freed here is no part of it.

    Args:
        segments: those at the end, of PyTorch's snapshot.

    Returns:
        Addresses, and the bytes that were asked for.
    """
    before = _active(segments)
    torch._C._cuda_clearCublasWorkspaces()
    after = _active(torch.cuda.memory._snapshot()["segments"])
    return {address: size for address, size in before.items() if address not in after}


def _active(segments: list[dict[str, Any]]) -> dict[int, int]:
    return {
        block["address"]: block.get("requested_size", block["size"])
        for segment in segments
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
