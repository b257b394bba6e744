"""The same faults on the ghost: one operation of a step finds no memory, and PyTorch's allocator says so.

    operations    0 1 2 ... at ...      before one of them the cache is given back, the limit is set to what
    is free memory   ######### __ ####     reserved, and every free block is taken; after it all is as it was

What fails is the real allocator. Values are not computed here: memory, counters, random numbers of the GPU,
and what there is of state are compared.
"""

import gc
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # where a warm process looks for it

from memfit.errors import TornUpdateError
from memfit.train.engine import Engine
from support.fault_injection import Fault, _when_it_steps, build

_SMALL = 1 << 20
"""What is larger comes from segments of its own (c10/cuda/CUDACachingAllocator.cpp, kSmallSize, 2.14)."""


class NoMemory(Fault):
    """Leaves one operation no memory, so that what it allocates really fails; notes which do allocate."""

    def __init__(self, at: int | None) -> None:
        super().__init__(at)
        self.allocating: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "profiler":
            return function(*args, **(kwargs or {}))
        self.count += 1
        if self.count - 1 != self.at:
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            result = function(*args, **(kwargs or {}))
            if torch.cuda.memory_stats()["allocation.all.allocated"] > before:
                self.allocating.append(self.count - 1)
            return result
        taken = _take_all()
        try:
            return function(*args, **(kwargs or {}))
        finally:
            taken.clear()
            torch.cuda.set_per_process_memory_fraction(1.0)


def _take_all() -> list[torch.Tensor]:
    """Take every free byte that the allocator has, and let it have no more."""
    torch.cuda.empty_cache()
    # Half a byte more, for the product is rounded down; a segment more would be 2 MiB.
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 0.5) / total)
    free: list[int] = []
    for segment in torch.cuda.memory_snapshot():
        most = _SMALL if segment["segment_type"] == "small" else segment["total_size"]
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                pieces, rest = divmod(block["size"], most)
                free += [most] * pieces + [rest] * (rest > 0)
    return [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sorted(free, reverse=True)]


def picture(engine: Engine) -> Any:
    """Return what can be compared of an engine's state: values on the CPU, shapes of those on the GPU."""
    state = engine.state_dict()
    del state["finer"]
    state["scaler"] = list(
        state["scaler"] or ()
    )  # its values are read from the GPU, which does not compute them
    return _plain([state, [parameter.grad is not None for parameter in engine.model.parameters()]])


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.shape, value.dtype) if value.is_cuda else value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value


def allocated(engine: Engine) -> int:
    """Return the bytes that are allocated, when nothing is left that could be collected.

    Not counted are the loss scale and copies of buffers, which are made when they are first used, and stay.
    The thread that went backward holds the last failure, and its frames, until it goes backward again.
    """
    torch.ones(1, device="cuda", requires_grad=True).sum().backward()
    gc.collect()
    scaler = engine._ledger.update.scaler._scaler
    scales = () if scaler is None else (scaler._scale, scaler._growth_tracker)
    lasting = [one for one in (*scales, *engine._full_batch._snapshots._copies._copies) if one is not None]
    return torch.cuda.memory_allocated() - 512 * len(lasting)


def sweep(case: str, step: int, protect: str = "always", every: int = 1) -> dict[str, int]:
    """Have each operation of one step that allocates find no memory; count what became of it.

    Raises:
        AssertionError: harm was done.
    """

    def begin() -> tuple[Engine, Any, Any]:
        engine, data = build(case, protect=protect, device="cuda")
        walk = engine.through(data)
        for _ in range(step):
            engine.step(next(walk))
        return engine, walk, next(walk)

    warnings.filterwarnings("ignore", message=".*BatchNorm layers")
    gc.collect()
    gc.freeze()  # what is there stays, and need not be looked at each time
    engine, walk, batch = begin()
    began: list[int] = []
    with NoMemory(None) as counter:
        _when_it_steps(engine, lambda: began.append(counter.count))
        engine.step(batch)
    after = picture(engine)
    del engine, walk, batch
    found: Counter[str] = Counter()
    for at in counter.allocating[::every]:
        engine, walk, batch = begin()
        before, bytes_before = picture(engine), allocated(engine)
        try:
            with NoMemory(at):
                retried = engine.step(batch).retried
        except TornUpdateError:
            outcome = "torn, and says so"
        except torch.OutOfMemoryError:
            outcome = "reported"
        else:
            outcome = "recovered"
            assert at < began[0], at
            assert (retried, engine.optimizer_step) == (1, step + 1), at
        if outcome == "reported":  # the exception, which held frames, is gone
            assert picture(engine) == before, (at, "differs")
            assert allocated(engine) == bytes_before, (at, allocated(engine) - bytes_before)
            engine.step(batch)
            assert picture(engine) == after, (at, "differs afterwards")
        if outcome == "torn, and says so":
            assert protect != "always", at
            assert at >= began[0], at
        found[outcome] += 1
        walk.close()
        del engine, walk, batch
    return dict(found)


def capacities(points: int = 16) -> list[tuple[int, int | None]]:
    """Make a step with less and less memory; return bytes allowed, and how often it was begun again.

    None: it was reported, and nothing changed. The last point is what the step reserves unhindered.

    Raises:
        AssertionError: harm was done.
    """

    def begin() -> tuple[Engine, torch.Tensor]:
        model = nn.Sequential(nn.Linear(512, 4096), nn.GELU(), nn.Linear(4096, 512)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        engine = Engine(model, optimizer=optimizer, loss=lambda model, x: model(x).square().mean())
        batch = torch.randn(4096, 512, device="cuda")
        engine.step(batch[:1])  # states are there, and what libraries keep
        torch.cuda.empty_cache()
        return engine, batch

    total = torch.cuda.get_device_properties(0).total_memory
    engine, batch = begin()
    least = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    engine.step(batch)
    most = torch.cuda.max_memory_reserved()
    found: list[tuple[int, int | None]] = []
    for point in range(points + 1):
        del engine, batch
        gc.collect()
        engine, batch = begin()
        before, bytes_before = picture(engine), allocated(engine)
        allowed = least + (most - least) * point // points
        retried = None
        try:
            torch.cuda.set_per_process_memory_fraction((allowed + 0.5) / total)
            retried = engine.step(batch).retried
        except torch.OutOfMemoryError:
            pass
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert allocated(engine) == bytes_before, allowed
        assert (picture(engine) == before) == (retried is None), allowed
        found.append((allowed, retried))
    return found
