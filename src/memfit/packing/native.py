"""The packers in C: ``c/pack.h`` says what is passed."""

import ctypes
import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.native_build import kept_library
from memfit.packing.buffers import Buffers, Column, Sections

SOURCES = Path(__file__).with_name("c")
FOUND, INFEASIBLE, NODE_LIMIT, CANCELLED, NO_HOST_MEMORY = range(5)
_WAIT = 0.05  # seconds between two looks at the clock, and for Ctrl-C


@functools.cache
def load() -> ctypes.CDLL:
    """Return the library, compiled if need be.

    Raises:
        MemfitError: there is no compiler, or it failed.
    """
    return kept_library("packing", SOURCES, opened_library)


def opened_library(path: Path) -> ctypes.CDLL:
    """Load the compiled library, and tell the types of its functions."""
    library = ctypes.CDLL(str(path))
    pointer, int32, int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    library.pack_place.argtypes = (*[int32] * 2, *[pointer] * 4, ctypes.c_int, *[pointer] * 2)
    library.pack_search.argtypes = (
        *[int32] * 2,
        *[pointer] * 5,
        int64,
        ctypes.c_char_p,
        int64,
        *[pointer] * 3,
    )
    return library


def place(
    buffers: Buffers, cut: Sections, order: Column, *, tightest: bool, deadline: float = float("inf")
) -> Column | None:
    """Place buffers in the order given; None if the deadline (``time.monotonic``) came first."""
    offset, cancelled = np.zeros(len(buffers), np.int64), ctypes.c_int()
    size = np.ascontiguousarray(buffers.size)
    columns: list[npt.NDArray[Any]] = [cut.first, cut.last, size, np.ascontiguousarray(order, np.int32)]
    status = _call(
        load().pack_place,
        (
            len(buffers),
            cut.count,
            *columns,
            tightest,
            ctypes.byref(cancelled),
            offset,
        ),
        cancelled,
        deadline,
    )
    return offset if status == FOUND else None


def search(
    buffers: Buffers, cut: Sections, capacity: int, preference: str, node_limit: int, deadline: float
) -> tuple[int, int, Column]:
    """Search for offsets within a capacity; return the status, the nodes looked at and the offsets."""
    offset, nodes, cancelled = np.zeros(len(buffers), np.int64), ctypes.c_int64(), ctypes.c_int()
    size = np.ascontiguousarray(buffers.size)
    length = (buffers.upper - buffers.lower).astype(np.float64)
    columns: list[npt.NDArray[Any]] = [cut.first, cut.last, size, size * length, length]
    status = _call(
        load().pack_search,
        (
            len(buffers),
            cut.count,
            *columns,
            capacity,
            preference.encode(),
            node_limit,
            ctypes.byref(cancelled),
            offset,
            ctypes.byref(nodes),
        ),
        cancelled,
        deadline,
    )
    return status, nodes.value, offset


def _passed(argument: Any) -> Any:
    return argument.ctypes.data if isinstance(argument, np.ndarray) else argument


def _call(
    function: Callable[..., int], arguments: tuple[Any, ...], cancelled: ctypes.c_int, deadline: float
) -> int:
    """Call into the library from another thread, so that Ctrl-C and the deadline end it.

    Arrays are passed as such, and are there until that thread is done with them: Ctrl-C may come anywhere.
    """
    status = NO_HOST_MEMORY

    def run() -> None:
        nonlocal status
        status = function(*map(_passed, arguments))

    thread = threading.Thread(target=run, name="memfit-pack")
    try:
        thread.start()
        while thread.is_alive() and time.monotonic() < deadline:
            thread.join(_WAIT)
    finally:
        cancelled.value = 1
        if thread.is_alive():
            thread.join()
    if status == NO_HOST_MEMORY:
        raise MemoryError
    return status
