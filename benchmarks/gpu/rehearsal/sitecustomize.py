"""Load memfit's ghost in place of a GPU in every Python process whose ``PYTHONPATH`` contains this folder.

Tests thus rehearse ``memfit record``, ``memfit doctor --context`` and ``validate.py`` without a GPU. These
commands detect the ghost and report "rehearsal" instead of "measured". ``MEMFIT_REHEARSAL`` names the GPU,
``MEMFIT_REHEARSAL_GPUS`` how many there are.
"""

import os

if gpu := os.environ.get("MEMFIT_REHEARSAL"):
    from memfit.devices import find_device
    from memfit.ghost.build.runtime_library import build_ghost
    from memfit.ghost.ghost_device import GhostDevice
    from memfit.ghost.load_ghost import load

    device = find_device(gpu)
    ghost = load(build_ghost())  # this module keeps the ghost alive, because the runtime calls back into it
    ghost.configure(
        GhostDevice.of(device),
        count=int(os.environ.get("MEMFIT_REHEARSAL_GPUS", "1")),
        in_use=device.context_bytes,
        context=device.context_bytes,
    )
