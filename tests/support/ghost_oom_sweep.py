"""Leave one operation of a training step without memory on the ghost, so that PyTorch's allocator fails.

    operation      0 1 2 ... at ...      before operation ``at``, release the cache, limit memory to the bytes
    free memory    ######### __ ####     still reserved and take every free block; undo it all afterwards

The failure comes from the real allocator. The ghost computes no values, so a comparison covers memory,
counters, the GPU's random-number state, and which state exists.
"""

import gc
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # where a warm process finds ``support``

from memfit.errors import TornUpdateError
from memfit.train.engine import Engine
from support.fault_injection import CASES, Fault, build, call_before_update, update, updates

_SMALL = 1 << 20
"""The largest request that small segments serve (c10/cuda/CUDACachingAllocator.cpp, kSmallSize, 2.14)."""


class NoMemory(Fault):
    """Leave one operation no memory, so that its allocation really fails; record the allocating ones."""

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
    """Allocate every free byte of the allocator's segments, and forbid it new segments."""
    torch.cuda.empty_cache()
    # Half a byte extra, because PyTorch rounds the product down; another segment would need 2 MiB.
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 0.5) / total)
    free: list[int] = []
    for segment in torch.cuda.memory_snapshot():
        largest = _SMALL if segment["segment_type"] == "small" else segment["total_size"]
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                pieces, rest = divmod(block["size"], largest)
                free += [largest] * pieces + [rest] * (rest > 0)
    return [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sorted(free, reverse=True)]


def picture(engine: Engine) -> Any:
    """Return the comparable parts of an engine's state: values of CPU tensors, shapes of GPU tensors."""
    state = engine.state_dict()
    del state["finer"]
    # Only the names: the scaler reads its values from the GPU, and the ghost computes none.
    state["scaler"] = list(state["scaler"] or ())
    return _plain([state, [parameter.grad is not None for parameter in engine.model.parameters()]])


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):  # pinned memory holds what the GPU would have copied there
        return (value.shape, value.dtype) if value.is_cuda or value.is_pinned() else value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value


def allocated(engine: Engine) -> int:
    """Return the allocated bytes after garbage collection.

    Not counted: the loss scale and the copies of buffers, which are created on first use and kept. Autograd's
    thread keeps the last failure and its frames alive until the next backward, so a small one runs first.
    """
    torch.ones(1, device="cuda", requires_grad=True).sum().backward()
    gc.collect()
    scaler = engine._ledger.update.scaler._scaler
    scales = () if scaler is None else (scaler._scale, scaler._growth_tracker)
    copies = engine._full_batch._snapshots._copies.values()
    lasting = [kept for kept in (*scales, *copies) if kept is not None and kept.is_cuda]
    return torch.cuda.memory_allocated() - 512 * len(lasting)


def sweep(case: str, step: int, protect: str = "always", every: int = 1) -> dict[str, int]:
    """Leave each allocating operation of one step without memory, one at a time; count the outcomes.

    Raises:
        AssertionError: a failure did harm that the engine did not report.
    """

    def begin() -> tuple[Engine, Any, Any]:
        engine, data = build(case, protect=protect, device="cuda")
        walk = updates(engine, data, CASES[case].get("carried", 0))
        for _ in range(step):
            update(engine, next(walk))
        return engine, walk, next(walk)

    warnings.filterwarnings("ignore", message=".*BatchNorm layers")
    gc.collect()
    gc.freeze()  # existing objects stay, and later collections skip them
    engine, walk, batch = begin()
    update_starts: list[int] = []
    with NoMemory(None) as counter:
        call_before_update(engine, lambda: update_starts.append(counter.count))
        update(engine, batch)
    after = picture(engine)
    del engine, walk, batch
    found: Counter[str] = Counter()
    for at in counter.allocating[::every]:
        engine, walk, batch = begin()
        before, bytes_before = picture(engine), allocated(engine)
        losses_before = _losses(engine, batch)
        try:
            with NoMemory(at):
                retried = update(engine, batch).retried
        except TornUpdateError:
            outcome = "torn, and says so"
        except torch.OutOfMemoryError:
            outcome = "reported"
        else:
            outcome = "recovered"
            assert at < update_starts[0], at
            assert (retried, engine.optimizer_step) == (1, step + 1), at
        if outcome == "reported":  # the exception, which kept frames alive, is gone
            assert picture(engine) == before, (at, "differs")
            kept = 512 * (len(_losses(engine, batch)) - len(losses_before))
            assert allocated(engine) == bytes_before + kept, (at, allocated(engine) - bytes_before)
            update(engine, batch)
            assert picture(engine) == after, (at, "differs afterwards")
        if outcome == "torn, and says so":
            assert protect != "always", at
            assert at >= update_starts[0], at
        found[outcome] += 1
        walk.close()
        del engine, walk, batch
    return dict(found)


def _losses(engine: Engine, batches: Any) -> set[int]:
    """Return where the losses of open windows are: a group of batches holds a window as it was."""
    windows = (engine._ledger.window, getattr(batches, "window", None))
    return {each.loss.data_ptr() for each in windows if each is not None and each.loss is not None}


def capacities(points: int = 16) -> list[tuple[int, int | None]]:
    """Run a step under ``points + 1`` memory limits; return each limit in bytes and the number of retries.

    None instead of a number: the engine reported the failure and changed nothing. The last limit is what the
    step reserves when memory is unlimited.

    Raises:
        AssertionError: a failure did harm that the engine did not report.
    """

    def begin() -> tuple[Engine, torch.Tensor]:
        model = nn.Sequential(nn.Linear(512, 4096), nn.GELU(), nn.Linear(4096, 512)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        engine = Engine(model, optimizer=optimizer, loss=lambda model, x: model(x).square().mean())
        batch = torch.randn(4096, 512, device="cuda")
        engine.step(batch[:1])  # creates the optimizer's state and the libraries' workspaces
        torch.cuda.empty_cache()
        return engine, batch

    total = torch.cuda.get_device_properties(0).total_memory
    engine, batch = begin()
    smallest = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    engine.step(batch)
    largest = torch.cuda.max_memory_reserved()
    found: list[tuple[int, int | None]] = []
    for point in range(points + 1):
        del engine, batch
        gc.collect()
        engine, batch = begin()
        before, bytes_before = picture(engine), allocated(engine)
        allowed = smallest + (largest - smallest) * point // points
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
