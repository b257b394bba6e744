"""Every global random generator has the seed that makes runs comparable."""

import random

import numpy as np
import torch

from memfit.random_state import seed_generators


def test_every_global_generator_is_seeded():
    states = []
    for _ in range(2):
        random.seed()
        np.random.seed()  # noqa: NPY002 - the global generator
        torch.seed()
        seed_generators()
        numbers = np.random.get_state()[1].tolist()  # noqa: NPY002
        states.append((random.getstate(), numbers, torch.get_rng_state().tolist()))
    assert states[0] == states[1]
