"""Wait for autograd's threads before the interpreter shuts down.

PyTorch's device threads release the last Python objects of a backward a moment after it returns. If the
interpreter has shut down by then, CPython ends such a thread where C++ does not allow it, and the process
aborts ("terminate called without an active exception"). Real training rarely meets this: it does not end
within microseconds of a backward. Scripts on the ghost do.
"""

import time
from pathlib import Path

_POLL = 0.002  # seconds; the sleep also releases the GIL to a thread that waits for it
_TIMEOUT = 1.0  # seconds


def wait_for_autograd() -> None:
    """Wait until PyTorch's backward threads have slept for two polls in a row, for at most a second.

    Without such threads, return at once.
    """
    deadline = time.monotonic() + _TIMEOUT
    previous: list[str] | None = None
    while (current := _autograd_threads()) and time.monotonic() < deadline:
        if current == previous and all("S (sleeping)" in status for status in current):
            return
        previous = current
        time.sleep(_POLL)


def _autograd_threads() -> list[str]:
    """Return the kernel's status of each autograd thread, with its state and its context switches."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            if (task / "comm").read_text().startswith("pt_autograd"):
                found.append((task / "status").read_text())
        except OSError:  # the thread has just ended
            continue
    return found
