"""Where the global generators of Python and NumPy stand.

    words     its position and a few of its 624 words: no other state has them, for all words are new whenever
              the position begins anew. Reading all would be as slow as a step's smaller kernels
    state     what ``random.setstate`` and ``numpy.random.set_state`` take: 30 and 120 microseconds

A state is asked for only where the words have moved since the last one. Generators of one's own
(``random.Random()``, ``numpy.random.default_rng()``) are not looked at.
"""

import ctypes
import random
from typing import Any

import numpy as np
import torch

_PYTHON: random.Random = random.random.__self__  # type: ignore[attr-defined]
"""What the functions of ``random`` are methods of."""
_HEAD = object.__basicsize__
_SEEN = 8 * 4
"""Bytes of the words that are looked at: the first is the same after most seeds."""
_PYTHON_WORDS = (ctypes.c_char * (4 + _SEEN)).from_address(id(_PYTHON) + _HEAD)
"""What RandomObject has besides an object's head begins with a position, and words follow (CPython 3.11 to
3.14, Modules/_randommodule.c)."""
_NUMPY_POSITION = 624 * 4
"""Where in ``mt19937_state`` the position stands: after the words (numpy/random/src/mt19937/mt19937.h)."""


class Python:
    """The generator behind ``random.random`` and its like."""

    def __init__(self) -> None:
        self._words: Any = None
        self._state: Any = None

    def get_state(self) -> Any:
        """Return where it stands; the same object as before, if it has not moved."""
        # gauss() makes two numbers and keeps one, which is given out without moving the words.
        words = (_PYTHON_WORDS.raw, _PYTHON.gauss_next)  # type: ignore[attr-defined]
        if words != self._words:
            self._words, self._state = words, random.getstate()
        return self._state

    def set_state(self, state: Any) -> None:
        """Put it where ``get_state`` found it."""
        random.setstate(state)


class Numpy:
    """The generator behind ``numpy.random.rand`` and its like."""

    def __init__(self) -> None:
        self._generator: Any = None
        self._position, self._head = ctypes.c_int(), (ctypes.c_char * _SEEN)()
        self._words: Any = None
        self._state: dict[str, Any] = {}

    def get_state(self) -> dict[str, Any]:
        """Return where it stands, arrays as tensors; the same object as before, if it has not moved."""
        generator = np.random.mtrand.get_bit_generator()
        if generator is not self._generator:
            self._generator, self._words = generator, None
            if isinstance(generator, np.random.MT19937):
                place = generator.ctypes.state_address
                self._position = ctypes.c_int.from_address(place + _NUMPY_POSITION)
                self._head = (ctypes.c_char * _SEEN).from_address(place)
        words = self._position.value, self._head.raw
        if words == self._words:
            return self._state
        state: dict[str, Any] = without_arrays(np.random.get_state(legacy=False))  # noqa: NPY002 - the global one
        # Where it kept back a second Gaussian number, that can be drawn without moving the words; of other
        # kinds of generators they are not known.
        fixed = isinstance(generator, np.random.MT19937) and not state["has_gauss"]
        self._words, self._state = (words, state) if fixed else (None, {})
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Put it where ``get_state`` found it."""
        np.random.set_state(with_arrays(state))  # noqa: NPY002 - the global one


PYTHON, NUMPY = Python(), Numpy()


def same_state(one: Any, other: Any) -> bool:
    """Whether two states of a generator are one, PyTorch's included."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            same_state(value, other[name]) for name, value in one.items()
        )
    return bool(one == other)


def without_arrays(value: Any) -> Any:
    """Return NumPy's account of a generator with tensors in place of arrays: those are read from files."""
    if isinstance(value, dict):
        return {name: without_arrays(inner) for name, inner in value.items()}
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def with_arrays(value: Any) -> Any:
    """Take ``without_arrays`` back."""
    if isinstance(value, dict):
        return {name: with_arrays(inner) for name, inner in value.items()}
    return value.numpy() if isinstance(value, torch.Tensor) else value
