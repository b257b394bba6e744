"""``torch.cuda.memory_stats()`` from the log of what the allocator did.

Each row of the log changes some of nine figures, of the pool that it belongs to and of all:

                        count                     bytes
    ALLOC               + allocation, active      + allocated, active; + requested
    FREE_REQUESTED      - allocation              - allocated
    FREE_COMPLETED      - active                  - active; - requested
    SEGMENT_ALLOC/FREE  +/- segment               +/- reserved
    SEGMENT_MAP/UNMAP                             +/- reserved
    ALLOC, FREE_COMPLETED also change inactive_split, by what their rows say

Kept in columns, that is a running sum, a running maximum, and the sums of what went up and down: the cost is
numpy's, and the allocator's own loop stays short.

Source: ``DeviceStats``, c10/core/CachingDeviceAllocator.h, PyTorch 2.14.1.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from memfit.allocator import caching
from memfit.allocator.caching import LARGE, CachingAllocator, Row

Int64 = npt.NDArray[np.int64]

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

_KINDS = 7
_COUNT, _SIZE, _REQUESTED, _SPLITS, _SPLIT_BYTES = range(5)


def _effects() -> npt.NDArray[np.int64]:
    """Return what a row's (1, bytes, requested, splits, bytes split) add to each figure, for each kind."""
    effects = np.zeros((_KINDS, 5, len(FIGURES)), np.int64)

    def effect(kind: int, source: int, figure: str, sign: int) -> None:
        effects[kind, source, FIGURES.index(figure)] = sign

    for kind, sign in ((caching.ALLOC, 1), (caching.FREE_REQUESTED, -1)):
        effect(kind, _COUNT, "allocation", sign)
        effect(kind, _SIZE, "allocated_bytes", sign)
    for kind, sign in ((caching.ALLOC, 1), (caching.FREE_COMPLETED, -1)):
        effect(kind, _COUNT, "active", sign)
        effect(kind, _SIZE, "active_bytes", sign)
        effect(kind, _REQUESTED, "requested_bytes", sign)
        effect(kind, _SPLITS, "inactive_split", 1)
        effect(kind, _SPLIT_BYTES, "inactive_split_bytes", 1)
    for kind, sign in ((caching.SEGMENT_ALLOC, 1), (caching.SEGMENT_FREE, -1)):
        effect(kind, _COUNT, "segment", sign)
    for kind, sign in (
        (caching.SEGMENT_ALLOC, 1),
        (caching.SEGMENT_FREE, -1),
        (caching.SEGMENT_MAP, 1),
        (caching.SEGMENT_UNMAP, -1),
    ):
        effect(kind, _SIZE, "reserved_bytes", sign)
    return effects


_EFFECTS = _effects()
_PER_POOL = [f"{figure}.{pool}" for pool in POOLS for figure in FIGURES]
NAMES = tuple(f"{name}.{field}" for field in FIELDS for name in (*_PER_POOL, *OVERSIZE))
"""Of the columns that ``Statistics.advance`` returns, as ``torch.cuda.memory_stats()`` spells them."""


class Statistics:
    """Figures that follow an allocator's log.

    Args:
        max_split_size: bytes from which on a block counts as oversize; None if none does.
    """

    def __init__(self, max_split_size: int | None = None) -> None:
        self._limit = np.iinfo(np.int64).max if max_split_size is None else max_split_size
        columns = len(_PER_POOL) + len(OVERSIZE)
        self._current = np.zeros(columns, np.int64)
        self._peak = np.zeros(columns, np.int64)
        self._allocated = np.zeros(columns, np.int64)
        self._freed = np.zeros(columns, np.int64)

    def advance(self, rows: Sequence[Row], ends: Sequence[int]) -> Int64:
        """Follow more of the log.

        Args:
            rows: what was logged since the last call.
            ends: after how many of these rows figures are wanted, ascending.

        Returns:
            One line of ``NAMES`` for each of ``ends``.
        """
        changes = self._changes(np.array(rows, np.int64).reshape(-1, 5))
        current = np.cumsum(np.vstack([self._current, changes]), axis=0)
        peak = np.maximum.accumulate(np.vstack([self._peak, current[1:]]), axis=0)
        allocated = np.cumsum(np.vstack([self._allocated, np.maximum(changes, 0)]), axis=0)
        freed = np.cumsum(np.vstack([self._freed, np.maximum(-changes, 0)]), axis=0)
        self._current, self._peak = current[-1], peak[-1]
        self._allocated, self._freed = allocated[-1], freed[-1]
        at = np.array(ends, np.int64)
        return np.concatenate([current[at], peak[at], allocated[at], freed[at]], axis=1)

    def _changes(self, rows: Int64) -> Int64:
        """Return the change of each figure by each row: ``(n, 9 x 3 + 2)``."""
        large = rows[:, 0] >= LARGE
        kind = rows[:, 0] % LARGE
        sources = rows.copy()
        sources[:, 0] = 1
        both = np.einsum("ns,nsf->nf", sources, _EFFECTS[kind])
        oversize = rows[:, 1] >= self._limit
        of_allocations = oversize * (
            (kind == caching.ALLOC).astype(np.int64) - (kind == caching.FREE_REQUESTED)
        )
        of_segments = oversize * (
            (kind == caching.SEGMENT_ALLOC).astype(np.int64) - (kind == caching.SEGMENT_FREE)
        )
        return np.concatenate(
            [
                both,
                both * ~large[:, None],
                both * large[:, None],
                of_allocations[:, None],
                of_segments[:, None],
            ],
            axis=1,
        )


def memory_stats(allocator: CachingAllocator) -> dict[str, int]:
    """Return what ``torch.cuda.memory_stats()`` would say, by the same names."""
    figures = Statistics(allocator.config.max_split_size).advance(allocator.log, [len(allocator.log)])[0]
    counters = {name: int(getattr(allocator, name)) for name in COUNTERS}
    return dict(zip(NAMES, figures.tolist(), strict=True)) | counters
