"""Load the ghost into this process, before PyTorch, and wait for autograd's threads at the process's end.

load(build_ghost())      the runtime, and an empty library for each of NVIDIA's SONAMEs
ghost.configure(device)  the device and how much memory it has
import torch             the real PyTorch: the loader does not search for a SONAME that is already loaded

PyTorch's device threads release the last Python objects of a backward a moment after it returns. If the
interpreter has shut down by then, CPython ends such a thread where C++ does not allow it, and the process
aborts ("terminate called without an active exception"). Real training rarely meets this: it does not end
within microseconds of a backward. Scripts on the ghost do.
"""

import atexit
import ctypes
import os
import sys
import time
from pathlib import Path

from memfit.errors import GhostError
from memfit.ghost.build.extension_stubs import ExtensionStubs
from memfit.ghost.build.runtime_library import BuiltGhost
from memfit.ghost.runtime_bindings import GhostRuntime


def load(build: BuiltGhost) -> GhostRuntime:
    """Load the ghost into this process, before ``import torch``.

    Example:
        >>> ghost = load(build_ghost())  # doctest: +SKIP
        >>> ghost.configure(GhostDevice(...))  # doctest: +SKIP
        >>> import torch  # doctest: +SKIP

    """
    if "torch" in sys.modules:
        raise GhostError(
            "Cannot load the ghost: PyTorch is already loaded. Load the ghost before importing torch."
        )
    try:
        runtime = ctypes.CDLL(str(build.library), mode=ctypes.RTLD_GLOBAL)
        for soname in build.sonames:
            ctypes.CDLL(str(build.folder / soname), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise GhostError(
            f"Cannot load the ghost: {error}. Delete {build.folder} and try again. memfit then rebuilds the "
            "ghost."
        ) from error
    # Triton links its launchers with the libcuda.so in this folder; without it, Triton asks ldconfig.
    os.environ.setdefault("TRITON_LIBCUDA_PATH", str(build.folder))
    atexit.register(
        wait_until_autograd_threads_sleep
    )  # runs after the script's own handlers, which are registered later
    extensions = ExtensionStubs(build, runtime)
    extensions.watch()
    return GhostRuntime(runtime, build, extensions)


_POLL = 0.002  # seconds; the sleep also releases the GIL to a thread that waits for it
_TIMEOUT = 1.0  # seconds


def wait_until_autograd_threads_sleep() -> None:
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
