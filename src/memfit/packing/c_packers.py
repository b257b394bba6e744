"""Python bindings of the packers in C; ``c/pack.h`` describes the arguments."""

import ctypes
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from memfit.native_build import NativeLibrary
from memfit.packing.buffer_lifetimes import Buffers, Column, LifetimeSections

FOUND, INFEASIBLE, NODE_LIMIT, CANCELLED, NO_HOST_MEMORY = range(5)
_WAIT = 0.05  # seconds between two checks of the clock and of Ctrl-C


_POINTER, _INT32, _INT64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_PLACE = (*[_INT32] * 2, *[_POINTER] * 4, ctypes.c_int, *[_POINTER] * 2)
_SEARCH = (*[_INT32] * 2, *[_POINTER] * 5, _INT64, ctypes.c_char_p, _INT64, *[_POINTER] * 3)
LIBRARY = NativeLibrary(
    "packing",
    Path(__file__).with_name("c"),
    {"pack_place": (ctypes.c_int, _PLACE), "pack_search": (ctypes.c_int, _SEARCH)},
)
load = LIBRARY.load


def place_greedily(
    buffers: Buffers, cut: LifetimeSections, order: Column, *, tightest: bool, deadline: float = float("inf")
) -> Column | None:
    """Place buffers in the given order; return None if the deadline (``time.monotonic``) passed first."""
    offset = np.zeros(len(buffers), np.int64)
    columns = cut.first, cut.last, np.ascontiguousarray(buffers.size), np.ascontiguousarray(order, np.int32)
    given = len(buffers), cut.count, *columns, tightest
    return offset if _call(load().pack_place, given, (offset,), deadline) == FOUND else None


def run_exhaustive_search(
    buffers: Buffers, cut: LifetimeSections, capacity: int, preference: str, node_limit: int, deadline: float
) -> tuple[int, int, Column]:
    """Search for offsets within a capacity; return the status, the nodes visited and the offsets."""
    offset, nodes = np.zeros(len(buffers), np.int64), ctypes.c_int64()
    size, length = np.ascontiguousarray(buffers.size), (buffers.upper - buffers.lower).astype(np.float64)
    columns = cut.first, cut.last, size, size * length, length
    given = len(buffers), cut.count, *columns, capacity, preference.encode(), node_limit
    status = _call(load().pack_search, given, (offset, ctypes.byref(nodes)), deadline)
    return status, nodes.value, offset


def _as_pointer(argument: Any) -> Any:
    return argument.ctypes.data if isinstance(argument, np.ndarray) else argument


def _call(
    function: Callable[..., int], given: tuple[Any, ...], results: tuple[Any, ...], deadline: float
) -> int:
    """Call the library from another thread, so that Ctrl-C and the deadline end the call.

    A flag that they set is passed between what is given and the results. The arrays stay referenced until
    that thread has finished, because Ctrl-C may come at any point.
    """
    status, cancelled = NO_HOST_MEMORY, ctypes.c_int()

    def run() -> None:
        nonlocal status
        status = function(*map(_as_pointer, (*given, ctypes.byref(cancelled), *results)))

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
