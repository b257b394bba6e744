"""Target functions for the fork pool's tests and benchmark: JSON arguments, JSON results."""

import os
import signal
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))


def gpt2_small(batch=4, steps=2, dtype="bfloat16"):
    """Train GPT-2 small for a few steps and return the peaks in bytes."""
    from gpt import GPT

    with torch.device("meta"):
        model = GPT()
    model = model.to_empty(device="cuda").to(getattr(torch, dtype))
    model.head.weight = model.tokens.weight
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        text = torch.randint(50257, (batch, 1025), device="cuda")
        model(text[:, :-1], text[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }


def one_tensor(size):
    """Allocate a tensor and return its size, or None if out of memory."""
    try:
        kept = torch.empty(size, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return None
    return kept.numel()


def settings():
    """Return an allocator setting and the device's name."""
    torch.ones(1, device="cuda")
    snapshot = torch.cuda.memory._snapshot()
    return {
        "expandable": snapshot["allocator_settings"]["expandable_segments"],
        "device": torch.cuda.get_device_name(),
    }


def fails():
    """Raise an exception."""
    raise ValueError("this one cannot work")


def dies():
    """Kill the process without a result."""
    os.kill(os.getpid(), signal.SIGKILL)


def process():
    """Return the process ID."""
    return os.getpid()
