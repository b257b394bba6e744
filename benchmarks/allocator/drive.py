"""Drive PyTorch's real allocator, on the ghost, and memfit's with the same random operations, and compare.

    PYTORCH_ALLOC_CONF=... python drive.py '{"operations": 10000, "seed": 1, ...}'

Prints one JSON object: how many operations were equal in every address, in allocated, reserved and every
other statistic, and the first that was not.
"""

import json
import math
import os
import random
import sys
import time
from types import ModuleType
from typing import TYPE_CHECKING, Any

from memfit.allocator.caching import ROW, CachingAllocator, OutOfMemory
from memfit.allocator.config import AllocatorConfig
from memfit.allocator.device import DeviceMemory
from memfit.allocator.statistics import COUNTERS, NAMES, Statistics
from memfit.devices import find_device
from memfit.ghost.build import build
from memfit.ghost.load import Ghost, GhostDevice, load

if TYPE_CHECKING:
    from memfit.allocator.blocks import Block

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
EDGES = (
    512,
    KIB,
    MIB,
    2 * MIB,
    10 * MIB,
    12 * MIB,
    18 * MIB,
    19 * MIB,
    20 * MIB,
    32 * MIB,
    100 * MIB,
    128 * MIB,
)
BESIDE = (-513, -512, -1, 0, 1, 511, 512, 513, MIB, MIB + 512, MIB - 512)
FEW, OLD = 400, 0.02  # of many tensors, mostly the newest are freed
CHUNK = 500  # operations between two comparisons of all statistics

OPTIONS = {
    "operations": 10_000,
    "seed": 0,
    "total": 8 * GIB,
    "live": 0.6,  # of the device that is allocated, on average
    "streams": 1,
    "share": 0.0,  # of new tensors, also used on another stream
    "empty_cache": 0.0005,  # of operations
    "fraction": None,  # torch.cuda.set_per_process_memory_fraction
}


class DifferenceError(Exception):
    """The two differ."""


class Sizes:
    """Sizes around every threshold of the allocator, and some that come again and again."""

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
        """Return one, in bytes."""
        dice = self._dice
        kind = dice.choice(("small", "small", "middle", "large", "often", "often", "edge"))
        if kind == "small":
            return int(math.exp(dice.uniform(0, math.log(MIB))))
        if kind == "middle":
            return dice.randint(MIB, 12 * MIB)
        if kind == "large":
            return dice.randint(8 * MIB, 300 * MIB)
        if kind == "often":
            return dice.choice(self._often)
        return max(1, dice.choice(EDGES) + dice.choice(BESIDE))


class Pair:
    """The real allocator and memfit's, given the same operations."""

    def __init__(self, options: dict[str, Any], ghost: Ghost, torch: ModuleType) -> None:
        self.options = options
        self.torch = torch
        self._ghost = ghost
        self._stats = torch._C._cuda_memoryStats
        torch.cuda.init()
        if options["fraction"] is not None:
            torch.cuda.set_per_process_memory_fraction(options["fraction"])
        self._streams = [torch.cuda.default_stream()]
        self._streams += [torch.cuda.Stream() for _ in range(options["streams"] - 1)]
        config = AllocatorConfig.of(os.environ.get("PYTORCH_ALLOC_CONF", ""))
        major, minor = torch.__version__.split(".")[:2]
        memory = DeviceMemory(torch.cuda.mem_get_info()[1])
        self.model = CachingAllocator(memory, config, (int(major), int(minor)))
        if options["fraction"] is not None:
            self.model.set_fraction(options["fraction"])
        self._names = [stream.cuda_stream for stream in self._streams]
        self.live: dict[int, tuple[Any, Block]] = {}  # number -> (the real tensor, our block)
        self.bytes = 0
        self._held = False
        self._statistics = Statistics(config.max_split_size)
        self._followed = 0
        self._expected: list[list[int]] = []
        self._ends: list[int] = []
        self._counters: list[list[int]] = []
        self.outs_of_memory = 0

    def allocate(self, number: int, size: int, stream: int) -> None:
        """Allocate with both."""
        torch = self.torch
        try:
            with torch.cuda.stream(self._streams[stream]):
                tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
            real = tensor.data_ptr()
        except torch.OutOfMemoryError:
            tensor, real = None, None
        try:
            block = self.model.malloc(size, self._names[stream])
            ours = block.address
        except OutOfMemory:
            block, ours = None, None
        if real != ours:
            raise DifferenceError(
                f"address {_hex(real)}, ours {_hex(ours)} for {size:,} bytes on stream {stream}"
            )
        if block is None:
            self.outs_of_memory += 1
        else:
            self.live[number] = tensor, block
            self.bytes += size

    def free(self, number: int) -> None:
        """Free in both."""
        tensor, block = self.live.pop(number)
        self.bytes -= block.requested
        del tensor
        self.model.free(block)
        self._finish_events()

    def use(self, number: int, stream: int) -> None:
        """Use a tensor on another stream."""
        tensor, block = self.live[number]
        tensor.record_stream(self._streams[stream])
        self.model.record_stream(block, self._names[stream])

    def hold(self) -> None:
        """Let streams stand still, or go on."""
        self._held = not self._held
        self._ghost.hold_events(self._held)
        self._finish_events()

    def empty_cache(self) -> None:
        """Empty both caches."""
        self.torch.cuda.empty_cache()
        self.model.empty_cache()

    def _finish_events(self) -> None:
        if not self._held:
            for event in self.model.outstanding():
                event.done = True

    def note(self) -> None:
        """Remember what the real allocator counts; compare in chunks."""
        model = self.model
        stats = self._stats(0)
        allocated, reserved = (
            stats["allocated_bytes"]["all"]["current"],
            stats["reserved_bytes"]["all"]["current"],
        )
        if (allocated, reserved) != (model.allocated, model.reserved):
            ours = f"{model.allocated:,}, {model.reserved:,}"
            raise DifferenceError(f"allocated {allocated:,}, reserved {reserved:,}; ours {ours}")
        self._expected.append(_line(stats))
        self._ends.append((len(model.log) - self._followed) // ROW)
        self._counters.append([getattr(model, name) for name in COUNTERS])
        if len(self._ends) == CHUNK:
            self.compare()

    def compare(self) -> None:
        """Compare every statistic after each operation since the last time."""
        if not self._ends:
            return
        import numpy as np

        ours = self._statistics.advance(self.model.log[self._followed :], self._ends)
        ours = np.concatenate([ours, np.array(self._counters)], axis=1)
        real = np.array(self._expected)
        if self.options["share"]:
            # Which of two streams that have gone on frees first is the order of a hash table in PyTorch;
            # merging in another order splits as much in the end, by another number of steps.
            ours[:, _BY_STEPS] = real[:, _BY_STEPS]
        if (ours != real).any():
            row, column = map(int, np.argwhere(ours != real)[0])
            back = len(self._ends) - row
            raise DifferenceError(
                f"{(*NAMES, *COUNTERS)[column]} is {real[row, column]:,}, ours {ours[row, column]:,} "
                f"({back} operations ago)"
            )
        self._followed = len(self.model.log)
        self._expected, self._ends, self._counters = [], [], []

    def segments(self) -> None:
        """Compare every block of every segment."""
        theirs = []
        for segment in self.torch.cuda.memory_snapshot():
            address = segment["address"]
            for block in segment["blocks"]:
                state = block["state"].replace("pending", "awaiting")
                theirs.append((address, block["size"], state, segment["total_size"]))
                address += block["size"]
        ours = [
            (block.address, block.size, block.state, segment.size)
            for segment in self.model.snapshot()
            for block in segment.blocks
        ]
        if theirs != ours:
            pairs = ((a, b) for a, b in zip(theirs, ours, strict=False) if a != b)
            raise DifferenceError(f"blocks differ: {next(pairs, (len(theirs), len(ours)))}")


_PATHS = [name.split(".") for name in NAMES]


_BY_STEPS = [
    column
    for column, name in enumerate(NAMES)
    if name.startswith("inactive_split") and not name.endswith("current")
]


def _line(stats: dict[str, Any]) -> list[int]:
    line = []
    for path in _PATHS:
        figure = stats
        for name in path:
            figure = figure[name]
        line.append(figure)
    return line + [stats.get(name, 0) for name in COUNTERS]  # not all are in PyTorch 2.8


def _hex(address: int | None) -> str:
    return "none (out of memory)" if address is None else f"{address:#x}"


def drive(options: dict[str, Any]) -> dict[str, Any]:
    """Run the operations; stop at the first difference."""
    ghost = load(build())
    ghost.configure(GhostDevice.of(find_device("A100-80GB"), options["total"]))
    import torch

    dice = random.Random(options["seed"])  # noqa: S311 - nothing secret
    sizes, pair = Sizes(dice), Pair(options, ghost, torch)
    target = options["live"] * options["total"]
    others = options["streams"] > 1 and options["share"] > 0
    begun, done, mismatch = time.perf_counter(), 0, ""
    try:
        for number in range(options["operations"]):
            roll = dice.random()
            if roll < options["empty_cache"]:
                pair.empty_cache()
            elif others and roll < options["empty_cache"] + 0.01:
                pair.hold()
            elif pair.live and dice.random() < (0.35 if pair.bytes < target else 0.62):
                few = len(pair.live) < FEW or dice.random() < OLD
                pair.free(dice.choice(list(pair.live)) if few else next(reversed(pair.live)))
            else:
                pair.allocate(number, sizes.next(), dice.randrange(options["streams"]))
                if others and number in pair.live and dice.random() < options["share"]:
                    pair.use(number, dice.randrange(options["streams"]))
            pair.note()
            done += 1
        pair.compare()
        pair.segments()
    except DifferenceError as difference:
        mismatch = f"operation {done}: {difference}"
    return {
        "operations": done,
        "mismatch": mismatch,
        "outs_of_memory": pair.outs_of_memory,
        "retries": pair.model.num_alloc_retries,
        "seconds": time.perf_counter() - begun,
    }


if __name__ == "__main__":
    print(json.dumps(drive(OPTIONS | json.loads(sys.argv[1]))))
