"""PyTorch's execution trace observer: it writes operations to a file, with memfit's marks between them."""

import ctypes
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._C import _profiler as profiler

from memfit.ghost.runtime_bindings import GhostRuntime
from memfit.recording.event_labels import LabelBook

LABEL_MARK = "memfit:"
"""Before the number of a label: from here on, the calling thread does what it says."""
_STANDARD_ERROR = 2


class OperationObserver:
    """Writes operations to a file, from its creation to ``stop``. There may be only one at a time."""

    def __init__(self, ghost: GhostRuntime, book: LabelBook) -> None:
        handle, name = tempfile.mkstemp(prefix="memfit-step-", suffix=".json")
        os.close(handle)
        self.file = Path(name)
        self._ghost, self._book = ghost, book
        with _without_words_of_observer():
            profiler._add_execution_trace_observer(name)
            profiler._enable_execution_trace_observer()
        ghost.mark_streams(ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")))
        book.on_use = _mark_label
        _mark_label(book.current())

    def stop(self) -> None:
        """Complete the file."""
        self._book.on_use = None
        self._ghost.mark_streams(None)
        with _without_words_of_observer():
            profiler._disable_execution_trace_observer()
            profiler._remove_execution_trace_observer()


def _mark_label(label: int) -> None:
    with trace_node(f"{LABEL_MARK}{label}"):
        pass


@contextmanager
def trace_node(name: str) -> Iterator[None]:
    """Add a node to what is written: what runs within is inside of it."""
    handle = torch.autograd._record_function_with_args_enter(name)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.autograd._record_function_with_args_exit(handle)  # type: ignore[attr-defined]


@contextmanager
def _without_words_of_observer() -> Iterator[None]:
    """Keep from standard error what the observer writes there; what others write meanwhile passes."""
    with tempfile.TemporaryFile() as caught, _swapping:
        kept = os.dup(_STANDARD_ERROR)
        os.dup2(caught.fileno(), _STANDARD_ERROR)
        try:
            yield
        finally:
            os.dup2(kept, _STANDARD_ERROR)
            os.close(kept)
        caught.seek(0)
        others = [line for line in caught if b"execution_trace_observer" not in line]
        if others:
            os.write(_STANDARD_ERROR, b"".join(others))


_swapping = threading.Lock()
