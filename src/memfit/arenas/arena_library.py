"""The arena in C: ``c/arena.h`` describes the arguments."""

import ctypes
from pathlib import Path

import numpy as np

from memfit.native_build import NativeLibrary
from memfit.packing.buffer_lifetimes import Column

IDLE, RECORDING, PLACING = range(3)
LIVES, SHARED = -1, -2
TALLY = (
    *("placed", "placed_bytes", "kept", "kept_bytes", "unplanned", "unplanned_bytes"),
    *("differing", "overlapping", "elsewhere", "skipped", "first", "first_bytes"),
)
CUDA_COUNTS = ("pages", "most_pages", "arena", "heaps", "spare", "in_heaps", "live", "most_live")


_POINTER, _INT64, _FLAG = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
LIBRARY = NativeLibrary(
    "placing",
    Path(__file__).with_name("c"),
    {
        "arena_begin": (None, (_POINTER, _FLAG, ctypes.c_size_t, _POINTER)),
        "arena_end": (None, (_POINTER,)),
        "arena_tally": (None, (_POINTER, _POINTER)),
        "arena_live": (_INT64, (_POINTER,)),
        "arena_bytes": (_INT64, (_POINTER,)),
        "arena_recorded_count": (_INT64, (_POINTER, _FLAG)),
        "arena_recorded": (None, (_POINTER, _FLAG, _POINTER)),
        "plan_new": (_POINTER, (_INT64, _POINTER, _POINTER)),
        "plan_free": (None, (_POINTER,)),
        "cpu_attach": (_POINTER, (ctypes.c_char_p,)),
        "cpu_detach": (None, ()),
        "cpu_lane": (ctypes.c_size_t, ()),
        "cpu_reserve": (_FLAG, (_INT64,)),
        "cpu_trim": (None, ()),
        "cuda_attach": (_POINTER, (_FLAG,)),
        "cuda_reserve": (_FLAG, (_INT64,)),
        "cuda_trim": (None, ()),
        "cuda_lend": (None, ()),
        "cuda_count": (None, (_FLAG, _POINTER)),
    },
)
load = LIBRARY.load


def step_tally(arena: int) -> dict[str, int]:
    """Return how the last step's allocations were served: ``TALLY``."""
    counts = np.zeros(len(TALLY), np.int64)
    load().arena_tally(arena, counts.ctypes.data)
    return dict(zip(TALLY, counts.tolist(), strict=True))


def gpu_bytes_by_use(device: int) -> dict[str, int]:
    """Return the bytes of a GPU by use: ``CUDA_COUNTS``, as ``c/cuda_heaps.h`` describes them."""
    counts = np.zeros(len(CUDA_COUNTS), np.int64)
    load().cuda_count(device, counts.ctypes.data)
    return dict(zip(CUDA_COUNTS, counts.tolist(), strict=True))


def recorded_allocations(arena: int, *, before: bool) -> Column:
    """Return the allocations of the last step, or of the one before it: rows of size, until and next.

    Raises:
        MemoryError: the host ran out of memory while recording.
    """
    count = load().arena_recorded_count(arena, before)
    if count < 0:
        raise MemoryError
    rows = np.zeros((count, 3), np.int64)
    load().arena_recorded(arena, before, rows.ctypes.data)
    return rows
