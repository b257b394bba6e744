"""``torch.cuda.memory_stats()`` from the log of an allocator.

Each row of the log changes some of nine figures, for its own pool and for both pools together:

                        count                     bytes
    ALLOC               + allocation, active      + allocated, active; + requested
    FREE                - allocation, active      - allocated, active; - requested
    FREE_REQUESTED      - allocation              - allocated
    FREE_COMPLETED      - active                  - active; - requested
    SEGMENT_ALLOC/FREE  +/- segment               +/- reserved
    SEGMENT_MAP/UNMAP                             +/- reserved
    ALLOC, FREE, FREE_COMPLETED also change inactive_split, by the figures in their rows

``FREE`` is a free that is complete at once. Over columns all this is a running sum, a running maximum, and
the sums of increases and decreases: numpy computes them, and the allocator's own loop stays short.

Source: ``DeviceStats``, c10/core/CachingDeviceAllocator.h, PyTorch 2.14.1.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from memfit.allocator.compiled_allocator import COUNTERS, FIELDS, FIGURES, NAMES, OVERSIZE, POOLS
from support.reference_allocator.caching_allocator import CachingAllocator
from support.reference_allocator.change_log import (
    ALLOC,
    FREE,
    FREE_COMPLETED,
    FREE_REQUESTED,
    LARGE,
    ROW,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
)

Int64 = npt.NDArray[np.int64]

_COUNT, _SIZE, _REQUESTED, _SPLITS, _SPLIT_BYTES = range(ROW)
_IN_USE = {ALLOC: 1, FREE: -1, FREE_REQUESTED: -1}
_ACTIVE = {ALLOC: 1, FREE: -1, FREE_COMPLETED: -1}
_SEGMENT = {SEGMENT_ALLOC: 1, SEGMENT_FREE: -1}
_RESERVED = _SEGMENT | {SEGMENT_MAP: 1, SEGMENT_UNMAP: -1}
_EFFECTS = (  # of each figure: the column that changes it, and the sign by kind
    (_COUNT, _IN_USE),
    (_SIZE, _IN_USE),
    (_COUNT, _ACTIVE),
    (_SIZE, _ACTIVE),
    (_REQUESTED, _ACTIVE),
    (_SPLITS, dict.fromkeys(_ACTIVE, 1)),
    (_SPLIT_BYTES, dict.fromkeys(_ACTIVE, 1)),
    (_COUNT, _SEGMENT),
    (_SIZE, _RESERVED),
)


def _signs(by_kind: dict[int, int]) -> Int64:
    """Return the sign of every kind, of the small pool and then of the large one."""
    return np.array([by_kind.get(kind, 0) for kind in range(LARGE)] * 2, np.int64)


_PER_POOL = [f"{figure}.{pool}" for pool in POOLS for figure in FIGURES]


class Statistics:
    """Figures that follow an allocator's log.

    Args:
        max_split_size: bytes from which a block counts as oversize; None if no block does.
    """

    def __init__(self, max_split_size: int | None = None) -> None:
        self._limit = np.iinfo(np.int64).max if max_split_size is None else max_split_size
        columns = len(_PER_POOL) + len(OVERSIZE)
        self._current = np.zeros(columns, np.int64)
        self._peak = np.zeros(columns, np.int64)
        self._allocated = np.zeros(columns, np.int64)
        self._freed = np.zeros(columns, np.int64)

    def advance(self, log: Sequence[int], ends: Sequence[int]) -> Int64:
        """Follow more of the log.

        Args:
            log: the rows added since the last call.
            ends: numbers of rows after which to return figures, ascending.

        Returns:
            One line of ``NAMES`` for each of ``ends``.
        """
        lines = np.empty((len(FIELDS), len(ends), len(self._current)), np.int64)
        for column, changes in enumerate(self._changes(log)):
            lines[:, :, column] = self._follow(column, changes, ends)
        return np.concatenate(lines, axis=1)

    def _follow(self, column: int, changes: Int64, ends: Sequence[int]) -> Int64:
        """Return current, peak, allocated and freed of one figure at each of ``ends``."""
        bounds = np.array([0, *ends, len(changes)], np.int64)
        spans = [slice(begin, end) for begin, end in itertools.pairwise(bounds.tolist())]
        lines = np.empty((len(FIELDS), len(spans)), np.int64)
        current, peak = int(self._current[column]), int(self._peak[column])
        allocated, freed = int(self._allocated[column]), int(self._freed[column])
        levels = current + np.cumsum(changes)
        falls = np.minimum(changes, 0)
        for index, span in enumerate(spans):
            if span.stop > span.start:
                peak = max(peak, int(levels[span].max()))
                before, current = current, int(levels[span.stop - 1])
                fallen = -int(falls[span].sum())
                freed += fallen
                allocated += current - before + fallen
            lines[:, index] = current, peak, allocated, freed
        self._current[column], self._peak[column] = current, peak
        self._allocated[column], self._freed[column] = allocated, freed
        return lines[:, : len(ends)]

    def _changes(self, log: Sequence[int]) -> Iterator[Int64]:
        """Return the change by each row of each figure: of both pools, of each, and of what is oversize."""
        rows = np.fromiter(log, np.int64, len(log)).reshape(-1, ROW)
        kinds, sizes = rows[:, 0], rows[:, _SIZE]
        large = kinds >= LARGE
        both = []
        for source, by_kind in _EFFECTS:
            signs = _signs(by_kind)[kinds]
            both.append(signs if source == _COUNT else signs * rows[:, source])
        yield from both
        yield from (np.where(large, 0, changes) for changes in both)
        yield from (np.where(large, changes, 0) for changes in both)
        oversize = sizes >= self._limit
        yield from (_signs(by_kind)[kinds] * oversize for by_kind in (_IN_USE, _SEGMENT))


def memory_stats(allocator: CachingAllocator) -> dict[str, int]:
    """Return the figures of ``torch.cuda.memory_stats()``, under the same names."""
    rows = len(allocator.log) // ROW
    figures = Statistics(allocator.config.max_split_size).advance(allocator.log, [rows])[0]
    counters = {name: int(getattr(allocator, name)) for name in COUNTERS}
    return dict(zip(NAMES, figures.tolist(), strict=True)) | counters
