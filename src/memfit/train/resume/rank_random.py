"""Random numbers of the ranks: each rank saves its own, and a rank that is new is seeded.

After a restart, a rank may use another GPU of its machine: the state of the GPU that it uses is saved, and
restored on the GPU that it uses then.
"""

import hashlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from memfit.random_state import arrays_to_tensors

_Change = Callable[[dict[str, Any]], dict[str, Any]]


def change_random(run: dict[str, Any], change: _Change) -> dict[str, Any]:
    """Return a saved run with each of its random states changed."""
    position = dict(run["position"])
    for name in ("began", "before"):
        if position[name] is not None:
            position[name] = change(position[name])
    return run | {"position": position, "random": change(run["random"])}


def with_own_gpu(state: dict[str, Any]) -> dict[str, Any]:
    """Return a random state with that of the GPU that this rank uses, and no other GPU's."""
    if "cuda" not in state:
        return state
    return state | {"cuda": [state["cuda"][torch.cuda.current_device()]]}


def with_all_gpus(state: dict[str, Any]) -> dict[str, Any]:
    """Undo ``with_own_gpu``; the other GPUs of this machine keep their current states."""
    if "cuda" not in state or not torch.cuda.is_available():
        return state
    states = torch.cuda.get_rng_state_all()
    states[torch.cuda.current_device()] = state["cuda"][0]
    return state | {"cuda": states}


def seeded(state: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return the random state of a new rank: seeds drawn from rank 0's state and the rank's number.

    The loader's own generators keep rank 0's state: ranks that shuffle must draw the same order.
    """
    digest = hashlib.sha256(state["torch"].numpy().tobytes() + rank.to_bytes(4, "little")).digest()
    seed = int.from_bytes(digest[:8], "little") >> 1
    new = state | {
        "python": random.Random(seed).getstate(),  # noqa: S311 - training, not cryptography
        "torch": torch.Generator().manual_seed(seed).get_state(),
    }
    if "numpy" in state:
        numpy = np.random.RandomState(seed & 0xFFFFFFFF)
        new["numpy"] = arrays_to_tensors(numpy.get_state(legacy=False))
    if "cuda" in state and torch.cuda.is_available():
        new["cuda"] = [torch.Generator("cuda").manual_seed(seed).get_state()]
    return new
