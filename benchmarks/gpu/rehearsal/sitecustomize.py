"""Load memfit's ghost in place of a GPU in every child Python: ``PYTHONPATH`` contains this folder.

So ``memfit record``, ``memfit doctor --context`` and ``validate.py`` can be rehearsed without a GPU. They
detect the ghost, and report "rehearsal" instead of "measured". ``MEMFIT_REHEARSAL`` names the GPU.
"""

import os

if gpu := os.environ.get("MEMFIT_REHEARSAL"):
    from memfit.devices import find_device
    from memfit.ghost.build.runtime_library import build
    from memfit.ghost.device import GhostDevice
    from memfit.ghost.load import load

    device = find_device(gpu)
    ghost = load(build())  # kept by this module: the runtime calls back into it
    ghost.configure(GhostDevice.of(device), in_use=device.context_bytes, context=device.context_bytes)
