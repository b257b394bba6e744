"""Compare memfit's allocator with the results of PyTorch's for the same operations, without torch.

The results come from the real allocator as it runs (``drive.py``), or from a log of such a run.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from memfit.allocator.compiled_allocator import COUNTERS, NAMES
from memfit.allocator.config import AllocatorConfig
from memfit.records import Segment
from support.reference_allocator import caching_allocator as ours
from support.reference_allocator.change_log import ROW
from support.reference_allocator.device_memory import DeviceMemory
from support.reference_allocator.memory_stats import Statistics

if TYPE_CHECKING:
    from support.allocator_comparison.compiled import CompiledModel
    from support.reference_allocator.blocks import Block

CHUNK = 500  # operations between comparisons of all statistics
REFUSED = 0
"""Stands for an address when the allocation ran out of memory."""
_ALLOCATED, _RESERVED = NAMES.index("allocated_bytes.all.current"), NAMES.index("reserved_bytes.all.current")
# When several streams have completed, PyTorch frees their blocks in the order of a hash table. Merging in
# another order ends with the same split bytes, after a different number of steps.
BY_STEPS = [
    column
    for column, name in enumerate(NAMES)
    if name.startswith("inactive_split") and not name.endswith("current")
]


class Kind(IntEnum):
    """The kind of an operation."""

    ALLOCATE = 0
    FREE = 1
    USE = 2
    """Use a tensor on another stream."""
    HOLD = 3
    """Pause streams, or resume them."""
    EMPTY_CACHE = 4


class Operation(NamedTuple):
    """One operation; ``Situation`` lists the streams and pools."""

    kind: int
    number: int = 0
    """Number of the tensor."""
    size: int = 0
    """Bytes."""
    stream: int = 0
    """Index of the stream."""
    pool: int = -1
    """Index of the private pool; -1 for the default pool (logs hold integers)."""


Piece = tuple[int, int, str, int]
"""(address, size and state of a block, size of its segment)."""


@dataclass(frozen=True)
class Situation:
    """The settings and the device of a run of operations."""

    version: tuple[int, int]
    """PyTorch's version, major and minor."""
    conf: str
    total: int
    """Bytes of the device, as cudaMemGetInfo reports them."""
    fraction: float | None
    streams: list[int]
    """PyTorch's ids of the streams."""
    pools: list[tuple[int, int]]
    """PyTorch's ids of the private pools."""
    shares: bool
    """Whether tensors are used on several streams."""


class DifferenceError(Exception):
    """PyTorch's allocator and memfit's differ."""


class Model:
    """Memfit's allocator in a situation.

    Args:
        situation: the real allocator's settings and device.
        caching: the module that provides the allocator; the mutation tests pass a mutated one.
    """

    def __init__(self, situation: Situation, caching: ModuleType = ours) -> None:
        self._situation = situation
        self._out_of_memory = caching.SimulatedOutOfMemoryError
        config = AllocatorConfig.of(situation.conf)
        self.allocator = caching.CachingAllocator(DeviceMemory(situation.total), config, situation.version)
        if situation.fraction is not None:
            self.allocator.set_fraction(situation.fraction)
        for pool in situation.pools:  # a MemPool counts as one use of its pool
            self.allocator.begin_allocate_to_pool(pool)
            self.allocator.end_allocate_to_pool(pool)
        self._live: dict[int, Block] = {}
        self._held = False
        self._statistics = Statistics(config.max_split_size)
        self._followed = 0
        self._expected: list[Sequence[int]] = []
        self._ends: list[int] = []
        self._counters: list[list[int]] = []

    def do(self, operation: Operation, address: int, figures: Sequence[int]) -> None:
        """Repeat an operation of the real allocator and compare the results.

        Args:
            operation: the operation.
            address: the address that ``ALLOCATE`` returned.
            figures: ``NAMES`` and ``COUNTERS`` after the operation.

        Raises:
            DifferenceError: an address, allocated or reserved differs (checked at once), or another statistic
                does (checked every ``CHUNK`` operations).
        """
        if operation.kind == Kind.ALLOCATE:
            self._allocate(operation, address)
        elif operation.kind == Kind.FREE:
            self.allocator.free(self._live.pop(operation.number))
        elif operation.kind == Kind.USE:
            stream = self._situation.streams[operation.stream]
            self.allocator.record_stream(self._live[operation.number], stream)
        elif operation.kind == Kind.HOLD:
            self._held = not self._held
        else:
            self.allocator.empty_cache()
        if not self._held:
            self.allocator.all_streams_are_done()
        self._note(figures)

    def _allocate(self, operation: Operation, address: int) -> None:
        allocator = self.allocator
        stream = self._situation.streams[operation.stream]
        pool = self._situation.pools[operation.pool] if operation.pool >= 0 else None
        if pool is not None:
            allocator.begin_allocate_to_pool(pool)
        try:
            block = allocator.malloc(operation.size, stream)
        except self._out_of_memory:
            block = None
        if pool is not None:
            allocator.end_allocate_to_pool(pool)
            allocator.release_pool(pool)
        got = REFUSED if block is None else block.address
        if got != address:
            raise DifferenceError(
                f"address {_hex(address)}, ours {_hex(got)} for {operation.size:,} bytes, stream {stream}"
            )
        if block is not None:
            self._live[operation.number] = block

    def _note(self, figures: Sequence[int]) -> None:
        allocator = self.allocator
        real = figures[_ALLOCATED], figures[_RESERVED]
        if real != (allocator.allocated, allocator.reserved):
            mine = f"{allocator.allocated:,}, {allocator.reserved:,}"
            raise DifferenceError(f"allocated {real[0]:,}, reserved {real[1]:,}; ours {mine}")
        self._expected.append(figures)
        self._ends.append((len(allocator.log) - self._followed) // ROW)
        self._counters.append([getattr(allocator, name) for name in COUNTERS])
        if len(self._ends) == CHUNK:
            self._compare()

    def _compare(self) -> None:
        import numpy as np

        mine = self._statistics.advance(self.allocator.log[self._followed :], self._ends)
        mine = np.concatenate([mine, np.array(self._counters)], axis=1)
        real = np.array(self._expected)
        if self._situation.shares:
            mine[:, BY_STEPS] = real[:, BY_STEPS]
        if (mine != real).any():
            row, column = map(int, np.argwhere(mine != real)[0])
            back = len(self._ends) - row
            raise DifferenceError(
                f"{(*NAMES, *COUNTERS)[column]} is {real[row, column]:,}, ours {mine[row, column]:,} "
                f"({back} operations ago)"
            )
        self._followed = len(self.allocator.log)
        self._expected, self._ends, self._counters = [], [], []

    def finish(self, pieces: list[Piece]) -> None:
        """Compare the remaining statistics, and every block of every segment.

        Raises:
            DifferenceError: a statistic, block or segment differs.
        """
        if self._ends:
            self._compare()
        compare_pieces(pieces, self.allocator.snapshot())


def compare_pieces(pieces: list[Piece], segments: Sequence[Segment]) -> None:
    """Compare PyTorch's blocks with those of memfit's segments.

    Raises:
        DifferenceError: a block differs.
    """
    mine = [
        (block.address, block.size, block.state, segment.size)
        for segment in segments
        for block in segment.blocks
    ]
    if pieces != mine:
        pairs = ((a, b) for a, b in zip(pieces, mine, strict=False) if a != b)
        raise DifferenceError(f"blocks differ: {next(pairs, (len(pieces), len(mine)))}")


class Log:
    """A recorded run of the real allocator: its situation, operations and results."""

    def __init__(self, situation: Situation) -> None:
        self.situation = situation
        self.operations: list[Operation] = []
        self.addresses: list[int] = []
        self.figures: list[Sequence[int]] = []
        self.pieces: list[Piece] = []

    def write(self, path: Path) -> None:
        """Write the log to a file."""
        import numpy as np

        np.savez_compressed(
            path,
            head=json.dumps({"situation": asdict(self.situation), "pieces": self.pieces}),
            operations=np.array(self.operations, np.int64),
            addresses=np.array(self.addresses, np.int64),
            figures=np.array(self.figures, np.int64),
        )

    @classmethod
    def read(cls, path: Path) -> "Log":
        """Read a log that ``write`` wrote."""
        import numpy as np

        with np.load(path) as file:
            head: dict[str, Any] = json.loads(str(file["head"]))
            situation = head["situation"]
            situation["version"] = tuple(situation["version"])
            situation["pools"] = [tuple(pool) for pool in situation["pools"]]
            log = cls(Situation(**situation))
            log.operations = [Operation(*row) for row in file["operations"].tolist()]
            log.addresses = file["addresses"].tolist()
            log.figures = file["figures"].tolist()
        log.pieces = [(address, size, state, whole) for address, size, state, whole in head["pieces"]]
        return log

    def replay(self, model: "Model | CompiledModel") -> None:
        """Repeat the operations with one of memfit's allocators.

        Raises:
            DifferenceError: a result differs from the real allocator's.
        """
        for answered in zip(self.operations, self.addresses, self.figures, strict=True):
            model.do(*answered)
        model.finish(self.pieces)


def _hex(address: int) -> str:
    return "none (out of memory)" if address == REFUSED else f"{address:#x}"
