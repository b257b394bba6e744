"""Identify the workspaces that PyTorch allocates for cuBLAS, whose addresses it does not expose."""

from typing import Any

import torch

from memfit.recording.memory_snapshot import memory_snapshot


def release_cublas_workspaces(segments: list[dict[str, Any]]) -> dict[int, int]:
    """Release all cuBLAS workspaces, and return the blocks that this has freed.

    PyTorch keeps one workspace per handle and stream until the process ends, and does not expose their
    addresses. The history has been read by now: these frees are not part of it.

    Args:
        segments: of PyTorch's snapshot at the end of the run.

    Returns:
        Requested bytes by address.
    """
    before = _active_blocks(segments)
    torch._C._cuda_clearCublasWorkspaces()
    after = _active_blocks(memory_snapshot()["segments"])
    return {address: size for address, size in before.items() if address not in after}


def _active_blocks(segments: list[dict[str, Any]]) -> dict[int, int]:
    return {
        block["address"]: block.get("requested_size", block["size"])
        for segment in segments
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
