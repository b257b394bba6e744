"""PyTorch's memory snapshot, without the import of its compiler."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_inductor() -> Iterator[None]:
    """Take snapshots in the block without importing ``torch._inductor``.

    PyTorch looks it up for the lines of compiled code, and so imports it if nothing else did: more than a
    second for nothing. Source: ``py_symbolize`` in torch/csrc/profiler/python/combined_traceback.cpp,
    PyTorch 2.14.1.
    """
    if "torch._inductor" in sys.modules:
        yield
        return
    torch._inductor = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del torch._inductor
