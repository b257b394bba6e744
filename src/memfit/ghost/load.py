"""Load the ghost into this process, before PyTorch.

load(build())            the runtime, and an empty library for each of NVIDIA's SONAMEs
ghost.configure(device)  the device and how much memory it has
import torch             the real PyTorch: the loader does not search for a SONAME that is already loaded
"""

import atexit
import ctypes
import os
import sys

from memfit.errors import GhostError
from memfit.ghost.build.extension_stubs import ExtensionStubs
from memfit.ghost.build.runtime_library import Build
from memfit.ghost.ffi import Ghost
from memfit.ghost.shutdown import wait_for_autograd


def load(build: Build) -> Ghost:
    """Load the ghost into this process, before ``import torch``.

    Raises:
        GhostError: PyTorch is loaded already, or the runtime cannot be loaded.

    Example:
        >>> ghost = load(build())  # doctest: +SKIP
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
    atexit.register(wait_for_autograd)  # runs after the script's own handlers, which are registered later
    extensions = ExtensionStubs(build, runtime)
    extensions.watch()
    return Ghost(runtime, build, extensions)
