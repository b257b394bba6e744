"""Leave the process without autograd's threads tripping over the interpreter's end.

PyTorch's device threads let go of the last Python objects of a backward a moment after it returns.
If the interpreter is gone by then, CPython ends such a thread where C++ does not allow it, and the
process aborts ("terminate called without an active exception"). Real training rarely meets this: it
does not end within microseconds of a backward. Scripts on the ghost do.
"""

import time
from pathlib import Path

_POLL = 0.002  # seconds; also what lets a thread that waits for the GIL have it
_LONGEST = 1.0  # seconds


def wait_for_autograd() -> None:
    """Return once PyTorch's backward threads all sleep and did so a moment ago; at once if there are none."""
    until = time.monotonic() + _LONGEST
    before: list[str] | None = None
    while (now := _autograd_threads()) and time.monotonic() < until:
        if now == before and all("S (sleeping)" in status for status in now):
            return
        before = now
        time.sleep(_POLL)


def _autograd_threads() -> list[str]:
    """Return the kernel's account of each thread: its state, and how often it was switched."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            if (task / "comm").read_text().startswith("pt_autograd"):
                found.append((task / "status").read_text())
        except OSError:  # it has just ended
            continue
    return found
