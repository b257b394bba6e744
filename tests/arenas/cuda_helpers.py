"""Helpers for the CUDA scenarios. Importing this module loads the ghost, so import it before torch."""

from memfit.devices import find_device
from memfit.ghost.build.runtime_library import build_ghost
from memfit.ghost.load_ghost import load

MIB = 1 << 20
TOTAL = find_device("A100-80GB").total_bytes

ghost = load(build_ghost())

import torch  # noqa: E402 - the ghost comes first
import torch._dynamo  # noqa: E402 - before the forks, in which optimizers would import it again

from memfit.arenas import arena_library  # noqa: E402


def used():
    free, total = torch.cuda.mem_get_info()
    return (total - free) / MIB


def live():
    return arena_library.gpu_bytes_by_use(0)["live"] / MIB


def mib(size):
    return torch.empty(round(size * MIB), dtype=torch.uint8, device="cuda")


def leave(left):
    """Leave this many MiB of GPU memory free."""
    ghost.take(TOTAL - left * MIB)
