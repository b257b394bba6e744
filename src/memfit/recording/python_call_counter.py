"""Count the Python functions that a thread calls: the host's time for a step follows from it."""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

MEMFIT = str(Path(__file__).parents[1])
_PAUSES = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""Of code that is entered once for each item, which takes much less time than a call."""


class PythonCallCounter:
    """Counts the calls of Python functions of the thread that starts it.

    Args:
        without: the folder of files whose functions do not count; None counts all.

    >>> counter = PythonCallCounter()
    >>> counter.start()
    True
    >>> [(lambda: None)() for _ in range(3)]
    [None, None, None]
    >>> counter.stop()
    >>> counter.calls >= 3
    True
    """

    def __init__(self, without: str | None = MEMFIT) -> None:
        self.calls = 0
        self._without = without
        self._counts: dict[CodeType, bool] = {}

    def start(self) -> bool:
        """Begin to count; return whether that is possible: a profiler of the script's stays as it is."""
        if sys.getprofile() is not None:
            return False
        sys.setprofile(self._count)
        return True

    def stop(self) -> None:
        """Stop counting, on the thread that started."""
        if sys.getprofile() == self._count:
            sys.setprofile(None)

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Return a context in which nothing is counted: what memfit does among the script's own work."""
        counts = sys.getprofile() == self._count
        self.stop()
        try:
            yield
        finally:
            if counts:
                self.start()

    def _count(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            code = frame.f_code
            if code not in self._counts:
                own = self._without is not None and code.co_filename.startswith(self._without)
                self._counts[code] = not own and not code.co_flags & _PAUSES
            self.calls += self._counts[code]
