"""PyTorch's memory snapshot, without the import of its compiler."""

import sys
from typing import Any

import torch


def memory_snapshot() -> dict[str, Any]:
    """Return ``torch.cuda.memory._snapshot()``.

    PyTorch looks ``torch._inductor`` up, for the lines of compiled code, and so imports it if nothing else
    did: more than a second for nothing. Source: ``py_symbolize`` in
    torch/csrc/profiler/python/combined_traceback.cpp, PyTorch 2.14.1.
    """
    if missing := "torch._inductor" not in sys.modules:
        torch._inductor = None  # type: ignore[assignment]
    try:
        snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
    finally:
        if missing:
            del torch._inductor
    return snapshot
