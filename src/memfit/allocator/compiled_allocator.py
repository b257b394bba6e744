"""PyTorch's caching allocator in C, for hundreds of replays.

    AllocatorConfig  ──>  struct settings  ─┐
    Requests         ──>  their columns    ─┴──>  c/*.c  ──>  figures, blocks

It is compiled on first use and kept in the cache folder. ``tests/support/reference_allocator/`` is the same
allocator in Python: tests compare the two.
"""

import ctypes
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

from memfit import records
from memfit.allocator.config import AllocatorConfig
from memfit.allocator.requests import AllocatorRequests, PoolId
from memfit.errors import UsageError
from memfit.native_build import NativeLibrary
from memfit.records import DriverCalls, FailedMalloc, ReplayResult, Segment

_NEVER = 1 << 62
"""Stands for no limit; larger numbers cannot be passed to C."""

_MOST = 1 << 60
"""Largest device in bytes: adding sizes to it stays within 64 bits."""
NUMBERED = (2, 12)
"""The first version of PyTorch that orders blocks of equal size by the age of their segment."""
FIGURES = (
    "allocation",
    "allocated_bytes",
    "active",
    "active_bytes",
    "requested_bytes",
    "inactive_split",
    "inactive_split_bytes",
    "segment",
    "reserved_bytes",
)
POOLS = ("all", "small_pool", "large_pool")
OVERSIZE = ("oversize_allocations", "oversize_segments")
FIELDS = ("current", "peak", "allocated", "freed")
COUNTERS = (
    "num_alloc_retries",
    "num_ooms",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
    "num_oom_rejections",
)
NAMES = tuple(
    f"{name}.{field}"
    for field in FIELDS
    for name in (*(f"{figure}.{pool}" for pool in POOLS for figure in FIGURES), *OVERSIZE)
)
"""Names of the figures that C counts, as ``torch.cuda.memory_stats()`` spells them; ``COUNTERS`` follow."""
_SERVED = ("ask", "block", "size", "stream", "pool")  # the columns of requests that C reads
_OUT_OF_MEMORY, _IMPOSSIBLE, _NO_HOST_MEMORY, _BEYOND_64_BITS = 1, 2, 3, 4
_NAMES = (*NAMES, *COUNTERS)
_STATES = ("inactive", "active_allocated", "active_awaiting_free")
_CALLS = len(fields(DriverCalls))
_FIGURES = 4  # of struct outcome, before its calls
_COLUMNS = 10  # of a block's row; these two are read before the row is converted:
_MAPPED, _FIRST = 5, 6


_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
LIBRARY = NativeLibrary(
    "allocator",
    Path(__file__).with_name("c"),
    {  # declared in c/allocator.h
        "allocator_new": (_POINTER, (_POINTER, _NUMBER, _NUMBER)),
        "allocator_delete": (None, (_POINTER,)),
        "allocator_serve": (ctypes.c_int, (_POINTER, _NUMBER, *(_POINTER,) * len(_SERVED))),
        "allocator_address": (_NUMBER, (_POINTER, _NUMBER)),
        "allocator_block_count": (_NUMBER, (_POINTER,)),
        "allocator_blocks": (None, (_POINTER, _POINTER)),
        "allocator_statistics": (None, (_POINTER, _POINTER)),
        "allocator_outcome": (_NUMBER, (_POINTER, _POINTER)),
    },
)
load = LIBRARY.load


class CompiledAllocator:
    """The allocator of one device: ``handle`` in ``library``, made by ``open_compiled_allocator``."""

    def __init__(self, library: ctypes.CDLL, handle: int, pools: Sequence[PoolId]) -> None:
        self._library = library
        self._handle = handle
        self._pools = pools

    def serve(self, asked: AllocatorRequests) -> bool:
        """Serve requests; return False if a malloc failed, which ends serving.

        Raises:
            UsageError: a request is impossible: its block does not exist, or its size is invalid. Or
                addresses exceed 64 bits, because a huge device has many reservations.
            MemoryError: this machine is out of memory.
        """
        columns = (getattr(asked, name).buffer_info()[0] for name in _SERVED)
        status: int = self._library.allocator_serve(self._handle, len(asked.ask), *columns)
        if status == _NO_HOST_MEMORY:
            raise MemoryError
        if status == _BEYOND_64_BITS:
            raise UsageError(
                "Cannot replay on so large a GPU: the addresses that expandable segments reserve there "
                "exceed 64 bits. Choose one with less memory, for example --memory 24GiB."
            )
        if status == _IMPOSSIBLE:
            raise UsageError(
                f"Request {self._outcome()[0][0]} of {len(asked.ask)} cannot be served: its block does not "
                "exist, or its size is invalid."
            )
        return status != _OUT_OF_MEMORY

    def replay(self, asked: AllocatorRequests) -> ReplayResult:
        """Serve requests up to the first malloc that fails; return peaks, calls and segments.

        Raises: as ``serve``.
        """
        fits = self.serve(asked)
        (position, requested, free, most_taken, *counts), steps = self._outcome()
        all_calls, before, last = (
            DriverCalls(*counts[begin : begin + _CALLS]) for begin in range(0, 3 * _CALLS, _CALLS)
        )
        statistics = self.memory_stats()
        return ReplayResult(
            failure=None if fits else FailedMalloc(asked.event[position], requested, free),
            peak_allocated=statistics["allocated_bytes.all.peak"],
            peak_reserved=statistics["reserved_bytes.all.peak"],
            most_taken=most_taken,
            calls=all_calls,
            calls_per_step=last - before if steps > 1 else None,
            statistics=statistics,
            segments=self.snapshot(),
        )

    def _outcome(self) -> tuple[list[int], int]:
        """Return the figures of ``struct outcome``, and the number of training steps."""
        figures = (ctypes.c_int64 * (_FIGURES + 3 * _CALLS))()
        steps: int = self._library.allocator_outcome(self._handle, figures)
        return figures[:], steps

    def address(self, block: int) -> int:
        """Return the address of the block with a number; 0, as in C, if it is not in use."""
        address: int = self._library.allocator_address(self._handle, block)
        return address

    def figures(self) -> list[int]:
        """Return the values of ``NAMES`` and ``COUNTERS``."""
        figures = (ctypes.c_int64 * len(_NAMES))()
        self._library.allocator_statistics(self._handle, figures)
        return figures[:]

    def memory_stats(self) -> dict[str, int]:
        """Return the figures of ``torch.cuda.memory_stats()``, under the same names."""
        return dict(zip(_NAMES, self.figures(), strict=True))

    def snapshot(self) -> tuple[Segment, ...]:
        """Return every segment, by address, as ``torch.cuda.memory_snapshot()`` does."""
        count: int = self._library.allocator_block_count(self._handle)
        rows = ((ctypes.c_int64 * _COLUMNS) * count)()
        self._library.allocator_blocks(self._handle, rows)
        segments: list[list[list[int]]] = []
        for row in map(list, rows):
            if row[_MAPPED]:
                if row[_FIRST]:
                    segments.append([])
                segments[-1].append(row)
        return tuple(_segment(rows, self._pools) for rows in segments)


@contextmanager
def open_compiled_allocator(
    config: AllocatorConfig,
    *,
    blocks: int,
    pools: Sequence[PoolId],
    total: int,
    taken: int,
    version: tuple[int, int],
    empty_cache_each_step: bool = False,
) -> Iterator[CompiledAllocator]:
    """Yield an allocator and delete it afterwards.

    Args:
        config: the settings in force.
        blocks: upper bound of the block numbers, exclusive.
        pools: the default pool and the private ones, as requests number them.
        total: bytes of the device.
        taken: bytes of it that are in use already.
        version: of PyTorch, major and minor.
        empty_cache_each_step: empty the cache after each training step.

    Raises:
        UsageError: the device is larger than 1 EiB.
        MemfitError: no C compiler was found, or it failed.
        MemoryError: this machine is out of memory.
    """
    settings = _settings(config, total, taken, version, empty_cache_each_step)
    library = load()
    handle: int | None = library.allocator_new(settings.buffer_info()[0], blocks, len(pools))
    if handle is None:
        raise MemoryError
    try:
        yield CompiledAllocator(library, handle, pools)
    finally:
        library.allocator_delete(handle)


def _settings(
    config: AllocatorConfig, total: int, taken: int, version: tuple[int, int], empties: bool
) -> "array[int]":
    """Return the settings in the layout of ``c/allocator.h``."""
    if total > _MOST:
        raise UsageError(
            f"Cannot replay on a GPU of {total:,} bytes: the largest is {_MOST:,}. Choose one with less "
            "memory, for example --memory 24GiB."
        )
    fraction, threshold = config.per_process_memory_fraction, config.garbage_collection_threshold
    allowed = _NEVER if fraction is None else int(fraction * total)
    collects = fraction is not None and threshold > 0
    values = (
        total,
        taken,
        allowed,
        int(threshold * allowed) if collects else _NEVER,
        _NEVER if config.max_split_size is None else config.max_split_size,
        config.max_non_split_rounding,
        config.large_segment_size,
        config.expandable_segments,
        config.throw_on_cudamalloc_oom,
        version >= NUMBERED,
        empties,
        *config.roundup_power2_divisions,
    )
    return array("q", (min(value, _NEVER) for value in values))  # no request reaches ``_NEVER``


def _segment(rows: list[list[int]], pools: Sequence[PoolId]) -> Segment:
    """Build a segment from the rows of its blocks."""
    blocks = tuple(
        records.SnapshotBlock(address, size, asked, _STATES[state])
        for address, size, asked, state, *_ in rows
    )
    address, _, _, _, stream, _, _, small, expandable, pool = rows[0]
    return Segment(
        address=address,
        size=sum(block.size for block in blocks),
        stream=stream,
        kind="small" if small else "large",
        pool=pools[pool],
        expandable=bool(expandable),
        blocks=blocks,
    )
