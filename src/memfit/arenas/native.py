"""The arena in C: ``c/placing.h`` says what is passed."""

import ctypes
import functools
from pathlib import Path

import numpy as np

from memfit.native_build import kept_library
from memfit.packing.buffers import Column

SOURCES = Path(__file__).with_name("c")
IDLE, RECORDING, PLACING = range(3)
LIVES, SHARED = -1, -2
FREED = -1
TALLY = (
    *("placed", "placed_bytes", "kept", "kept_bytes", "unplanned", "unplanned_bytes"),
    *("differing", "overlapping", "elsewhere", "skipped", "first", "first_bytes"),
)
CUDA_COUNTS = ("pages", "most_pages", "arena", "heaps", "spare", "in_heaps", "live", "most_live")


@functools.cache
def load() -> ctypes.CDLL:
    """Return the library, compiled if need be. It stays loaded: memory may lie in its arenas.

    Raises:
        MemfitError: there is no compiler, or it failed.
    """
    return kept_library("placing", SOURCES, opened_library)


def opened_library(path: Path) -> ctypes.CDLL:
    """Load the compiled library, and tell the types of its functions."""
    library = ctypes.CDLL(str(path))
    pointer, int64, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    for name, result, arguments in (
        ("arena_begin", None, (pointer, flag, ctypes.c_size_t, pointer)),
        ("arena_end", None, (pointer,)),
        ("arena_tally", None, (pointer, pointer)),
        ("arena_live", int64, (pointer,)),
        ("arena_bytes", int64, (pointer,)),
        ("arena_recorded_count", int64, (pointer, flag)),
        ("arena_recorded", None, (pointer, flag, pointer)),
        ("arena_log", None, (pointer, int64)),
        ("arena_logged_count", int64, (pointer,)),
        ("arena_logged", int64, (pointer, pointer, int64)),
        ("plan_new", pointer, (int64, pointer, pointer)),
        ("plan_free", None, (pointer,)),
        ("cpu_attach", pointer, (ctypes.c_char_p,)),
        ("cpu_detach", None, ()),
        ("cpu_lane", ctypes.c_size_t, ()),
        ("cpu_reserve", flag, (int64,)),
        ("cpu_trim", None, ()),
        ("cuda_attach", pointer, (flag,)),
        ("cuda_reserve", flag, (int64,)),
        ("cuda_trim", None, ()),
        ("cuda_lend", None, ()),
        ("cuda_count", None, (flag, pointer)),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def tally(arena: int) -> dict[str, int]:
    """Return what came of the last step's allocations: ``TALLY``."""
    counts = np.zeros(len(TALLY), np.int64)
    load().arena_tally(arena, counts.ctypes.data)
    return dict(zip(TALLY, counts.tolist(), strict=True))


def counted(device: int) -> dict[str, int]:
    """Return bytes of a GPU: ``CUDA_COUNTS``, as ``c/cuda.c`` says."""
    counts = np.zeros(len(CUDA_COUNTS), np.int64)
    load().cuda_count(device, counts.ctypes.data)
    return dict(zip(CUDA_COUNTS, counts.tolist(), strict=True))


def recorded(arena: int, *, before: bool) -> Column:
    """Return what the last step asked for, or the one before it: rows of size, until and next.

    Raises:
        MemoryError: there was no memory to record it.
    """
    count = load().arena_recorded_count(arena, before)
    if count < 0:
        raise MemoryError
    rows = np.zeros((count, 3), np.int64)
    load().arena_recorded(arena, before, rows.ctypes.data)
    return rows


def logged(arena: int) -> Column:
    """Return what was logged: rows of address, size (or ``FREED``), time and lane."""
    rows = np.zeros((load().arena_logged_count(arena), 4), np.int64)
    return rows[: load().arena_logged(arena, rows.ctypes.data, len(rows))]
