"""Count the Python functions that a thread calls: the host's time for a step follows from it."""

import inspect
import sys
from types import CodeType, FrameType
from typing import Any

_PAUSES = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""Of code that is entered once for each item, which takes much less time than a call."""


class PythonCallCounter:
    """Counts the calls of Python functions of the thread that starts it.

    >>> counter = PythonCallCounter()
    >>> counter.start()
    True
    >>> [(lambda: None)() for _ in range(3)]
    [None, None, None]
    >>> counter.stop()
    >>> counter.calls >= 3
    True
    """

    def __init__(self) -> None:
        self.calls = 0
        self._counts: dict[CodeType, bool] = {}
        """Of each function, whether it counts."""

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

    def _count(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            code = frame.f_code
            if code not in self._counts:
                self._counts[code] = not code.co_flags & _PAUSES
            self.calls += self._counts[code]
