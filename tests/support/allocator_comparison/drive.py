"""Run the same random operations on PyTorch's real allocator, on the ghost, and on memfit's, and compare.

    PYTORCH_ALLOC_CONF=... python drive.py '{"operations": 10000, "seed": 1, ...}'

Prints one JSON object: how many operations gave the same addresses, allocated and reserved bytes and other
statistics on both, and the first operation that did not.
"""

import json
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from memfit.allocator.compiled_allocator import COUNTERS, NAMES
from memfit.devices import find_device
from memfit.ghost.build.runtime_library import build_ghost
from memfit.ghost.ghost_device import GhostDevice
from memfit.ghost.load_ghost import load
from memfit.ghost.runtime_bindings import GhostRuntime
from support.allocator_comparison.compiled import compiled_model
from support.allocator_comparison.model import (
    REFUSED,
    DifferenceError,
    Kind,
    Log,
    Model,
    Operation,
    Piece,
    Situation,
)
from support.allocator_comparison.sizes import size_of

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
FEW, OLD = 400, 0.02  # above FEW live tensors, all but a share OLD of the frees take the newest
DRAINED = 0.3  # share of empty_cache calls before which every tensor is freed

OPTIONS = {
    "operations": 10_000,
    "seed": 0,
    "total": 8 * GIB,
    "live": 0.6,  # share of the device that is allocated, on average
    "streams": 1,
    "share": 0.0,  # share of new tensors that another stream also uses
    "empty_cache": 0.002,  # share of operations
    "pools": 0,  # private pools (torch.cuda.MemPool) beside the default one
    "fraction": None,  # torch.cuda.set_per_process_memory_fraction
    "log": "",  # file for the operations and PyTorch's results: see model.py
}


class Sizes:
    """Random sizes: around every threshold of the allocator, and some that recur."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._often = [self._any() for _ in range(40)]

    def _any(self) -> int:
        dice = self._dice
        return dice.choice(
            (
                dice.randint(1, 4 * KIB),
                dice.randint(1, MIB),
                dice.randint(MIB, 10 * MIB),
                dice.randint(10 * MIB, 200 * MIB),
                2 * MIB * dice.randint(1, 100),
                512 * dice.randint(1, 4096),
            )
        )

    def next(self) -> int:
        """Return a size in bytes."""
        dice = self._dice
        kind = dice.choice(("small", "small", "middle", "large", "often", "often", "edge"))
        return dice.choice(self._often) if kind == "often" else size_of(kind, dice)


class Real:
    """PyTorch's allocator on the ghost."""

    def __init__(self, options: dict[str, Any], ghost: GhostRuntime, torch: ModuleType) -> None:
        self._torch = torch
        self._ghost = ghost
        self._held = False
        self._stats = torch._C._cuda_memoryStats
        torch.cuda.init()
        if options["fraction"] is not None:
            torch.cuda.set_per_process_memory_fraction(options["fraction"])
        self._streams = [torch.cuda.default_stream()]
        self._streams += [torch.cuda.Stream() for _ in range(options["streams"] - 1)]
        version = tuple(map(int, torch.__version__.split(".")[:2]))
        # memfit models the private pools of PyTorch 2.14; those of 2.11 and 2.12 behaved differently.
        pools = options["pools"] if version >= (2, 14) else 0
        self._pools = [torch.cuda.MemPool() for _ in range(pools)]
        self.live: dict[int, tuple[Any, int]] = {}  # number -> (tensor, bytes)
        self.bytes = 0
        self.situation = Situation(
            version=(version[0], version[1]),
            conf=os.environ.get("PYTORCH_ALLOC_CONF", ""),
            total=torch.cuda.mem_get_info()[1],
            fraction=options["fraction"],
            streams=[stream.cuda_stream for stream in self._streams],
            pools=[pool.id for pool in self._pools],
            shares=options["share"] > 0,
        )

    def do(self, operation: Operation) -> int:
        """Perform an operation; return the address of the allocation, if it made one."""
        if operation.kind == Kind.ALLOCATE:
            return self._allocate(operation)
        if operation.kind == Kind.FREE:
            tensor, size = self.live.pop(operation.number)
            self.bytes -= size
            del tensor
        elif operation.kind == Kind.USE:
            self.live[operation.number][0].record_stream(self._streams[operation.stream])
        elif operation.kind == Kind.HOLD:
            self._held = not self._held
            self._ghost.hold_events(self._held)
        else:
            self._torch.cuda.empty_cache()
        return REFUSED

    def _allocate(self, operation: Operation) -> int:
        torch = self._torch
        with ExitStack() as stack:
            stack.enter_context(torch.cuda.stream(self._streams[operation.stream]))
            if operation.pool >= 0:
                stack.enter_context(torch.cuda.use_mem_pool(self._pools[operation.pool]))
            try:
                tensor = torch.empty(operation.size, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError:
                return REFUSED
        self.live[operation.number] = tensor, operation.size
        self.bytes += operation.size
        return int(tensor.data_ptr())

    def figures(self) -> list[int]:
        """Return the current values of ``NAMES`` and ``COUNTERS``."""
        stats = self._stats(0)
        line = []
        for path in _PATHS:
            figure = stats
            for name in path:
                figure = figure[name]
            line.append(figure)
        return line + [stats.get(name, 0) for name in COUNTERS]  # 2.12 added num_oom_rejections

    def pieces(self) -> list[Piece]:
        """Return every block of every segment."""
        found = []
        for segment in self._torch.cuda.memory_snapshot():
            address = segment["address"]
            for block in segment["blocks"]:
                state = block["state"].replace("pending", "awaiting")
                found.append((address, block["size"], state, segment["total_size"]))
                address += block["size"]
        return found


_PATHS = [name.split(".") for name in NAMES]


def operations(options: dict[str, Any], real: Real) -> Iterator[Operation]:
    """Yield random operations; the caller performs each before it requests the next."""
    dice = random.Random(options["seed"])  # noqa: S311 - nothing secret
    sizes = Sizes(dice)
    target = options["live"] * options["total"]
    others = options["streams"] > 1 and options["share"] > 0
    for number in range(options["operations"]):
        roll = dice.random()
        if roll < options["empty_cache"]:
            for last in list(real.live) if dice.random() < DRAINED else ():
                yield Operation(Kind.FREE, last)
            yield Operation(Kind.EMPTY_CACHE)
        elif others and roll < options["empty_cache"] + 0.01:
            yield Operation(Kind.HOLD)
        elif real.live and dice.random() < (0.35 if real.bytes < target else 0.62):
            few = len(real.live) < FEW or dice.random() < OLD
            yield Operation(Kind.FREE, dice.choice(list(real.live)) if few else next(reversed(real.live)))
        else:
            size, stream = sizes.next(), dice.randrange(options["streams"])
            pools = len(real.situation.pools)
            pool = dice.randrange(-1, pools) if pools else -1
            yield Operation(Kind.ALLOCATE, number, size, stream, pool)
            uses = dice.choice((1, 2)) if others and dice.random() < options["share"] else 0
            for _ in range(uses if number in real.live else 0):
                yield Operation(Kind.USE, number, stream=dice.randrange(options["streams"]))


def drive(options: dict[str, Any]) -> dict[str, Any]:
    """Run the operations; stop at the first difference, and write the log if the options name one."""
    ghost = load(build_ghost())
    ghost.configure(GhostDevice.of(find_device("A100-80GB"), options["total"]))
    import torch

    real = Real(options, ghost, torch)
    log, model = Log(real.situation), Model(real.situation)
    begun, done, mismatch = time.perf_counter(), 0, ""
    with compiled_model(real.situation, options["operations"]) as compiled:
        try:
            for operation in operations(options, real):
                address = real.do(operation)
                figures = real.figures()
                if options["log"]:
                    log.operations.append(operation)
                    log.addresses.append(address)
                    log.figures.append(figures)
                model.do(operation, address, figures)
                compiled.do(operation, address, figures)
                done += operation.kind != Kind.USE  # a use counts with its allocation
            log.pieces = real.pieces()
            model.finish(log.pieces)
            compiled.finish(log.pieces)
        except DifferenceError as difference:
            mismatch = f"operation {done}: {difference}"
    if options["log"]:
        log.write(Path(options["log"]))
    return {
        "operations": done,
        "mismatch": mismatch,
        "outs_of_memory": model.allocator.num_ooms + model.allocator.num_oom_rejections,
        "retries": model.allocator.num_alloc_retries,
        "seconds": time.perf_counter() - begun,
    }


if __name__ == "__main__":
    print(json.dumps(drive(OPTIONS | json.loads(sys.argv[1]))))
