"""Count the Python functions that a thread calls: the host's time for a step follows from it."""

import inspect
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

MEMFIT = str(Path(__file__).parents[1])
_PAUSES = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""Of code that is entered once for each item, which takes much less time than a call."""
_BESIDE_HOOKS = ("Module._call_impl.<locals>.inner", "is_compiling", "is_scripting")
"""What ``nn.Module`` of PyTorch 2.14.1 calls because it has hooks, as all modules that memfit watches."""


class PythonCallCounter:
    """Counts the calls of Python functions of the thread that starts it.

    In a dry run, from the second step on: memfit calls the script's first forward itself, to fork before it.

    Args:
        without: the folder of files whose functions do not count, nor what they call; None counts all.

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
        self._left_out = 0
        """Functions of that folder that run now."""
        self._kinds: dict[CodeType, bool | None] = {}
        """Of each function, whether it counts; None for those of that folder."""

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
        if event not in {"call", "return"}:
            return
        code = frame.f_code
        if code not in self._kinds:
            own = self._without is not None and code.co_filename.startswith(self._without)
            is_call = not code.co_flags & _PAUSES and code.co_qualname not in _BESIDE_HOOKS
            self._kinds[code] = None if own else is_call
        counts = self._kinds[code]
        if counts is None:  # those that ran when counting began return, too
            self._left_out = self._left_out + 1 if event == "call" else max(0, self._left_out - 1)
        elif event == "call" and not self._left_out:
            self.calls += counts
