"""Random number generators that a loader has of its own: ``DataLoader(shuffle=True, generator=...)``.

loader ── sampler ── batch_sampler ── dataset        generators that are attributes of these, each once

What is out of sight: generators in worker processes, and those that other objects keep.
"""

import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from memfit.errors import UsageError
from memfit.strategies.mechanisms.global_generators import with_arrays, without_arrays

_PARTS = ("sampler", "batch_sampler", "dataset")


def own_generators(loader: Any) -> list[Any]:
    """Return PyTorch's, NumPy's and Python's generators that a loader and its parts hold, in fixed order."""
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if "numpy" in sys.modules:
        import numpy as np

        kinds = (*kinds, np.random.Generator, np.random.RandomState)
    found = {
        id(value): value
        for part in _parts(loader)
        for _, value in sorted(vars(part).items())
        if isinstance(value, kinds) and not isinstance(value, random.SystemRandom)
    }
    return list(found.values())


def _parts(loader: Any) -> Iterator[Any]:
    waiting, seen = [loader], set[int]()
    while waiting:
        part = waiting.pop(0)
        if id(part) not in seen and hasattr(part, "__dict__"):
            seen.add(id(part))
            yield part
            waiting += [vars(part)[name] for name in _PARTS if name in vars(part)]


def states_of(generators: Sequence[Any]) -> list[Any]:
    """Return where generators stand, in tensors and plain values."""
    return [_state_of(generator) for generator in generators]


def set_states(generators: Sequence[Any], states: Sequence[Any]) -> None:
    """Put generators where ``states_of`` found them.

    Raises:
        UsageError: there are others than those.
    """
    try:
        for generator, state in zip(generators, states, strict=True):
            _set_state(generator, state)
    except (ValueError, TypeError, RuntimeError, KeyError, AttributeError) as error:
        raise UsageError(
            f"Cannot resume: the state has {len(states)} random number generators of the loader's own, and "
            f"this loader has {len(generators)}, or others ({error}). Give it the loader that it had."
        ) from None


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return without_arrays(generator.bit_generator.state)
    return without_arrays(generator.get_state(legacy=False))


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = with_arrays(state)
    else:
        generator.set_state(with_arrays(state))
