"""The state of random number generators: Python's, NumPy's and PyTorch's, global ones and others.

    get_random_state, set_random_state          the global generators, as plain values and tensors
    generator_states, set_generator_states      generators that an object holds, such as a loader's
    generators_in                               the generator objects that a value is, or contains
    DrawnRandomNumbers                          what a forward drew, so that it can draw the same again

The state that ``random.setstate`` and ``numpy.random.set_state`` take costs 30 and 120 microseconds to read.
``PYTHON`` and ``NUMPY`` therefore look at the Mersenne Twister's position and a few of its 624 words first,
and read the state only if those have changed since the last call. No other state has them: all words are new
whenever the position starts over.

torch is imported on use, so that importing this module does not load it.
"""

import ctypes
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

_PYTHON: random.Random = random.random.__self__  # type: ignore[attr-defined]
"""The object whose methods the functions of ``random`` are."""
_HEAD = object.__basicsize__
_SEEN = 8 * 4
"""Bytes of the words to compare: the first word is the same after most seeds."""
_PYTHON_WORDS = (ctypes.c_char * (4 + _SEEN)).from_address(id(_PYTHON) + _HEAD)
"""After the object's head, RandomObject has a position, then the words (CPython 3.11 to 3.14,
Modules/_randommodule.c)."""
_NUMPY_POSITION = 624 * 4
"""Offset of the position in ``mt19937_state``: after the words (numpy/random/src/mt19937/mt19937.h)."""


class _PythonGenerator:
    """The generator behind the functions of ``random``."""

    def __init__(self) -> None:
        self._words: Any = None
        self._state: Any = None

    def get_state(self) -> Any:
        """Return the state; the same object as before if nothing was drawn since."""
        # gauss() computes two numbers and keeps one, which the next call returns without changing the words.
        words = (_PYTHON_WORDS.raw, _PYTHON.gauss_next)  # type: ignore[attr-defined]
        if words != self._words:
            self._words, self._state = words, random.getstate()
        return self._state

    def set_state(self, state: Any) -> None:
        """Restore a state that ``get_state`` returned."""
        random.setstate(state)


class _NumpyGenerator:
    """The generator behind ``numpy.random.rand`` and NumPy's other legacy functions."""

    def __init__(self) -> None:
        self._generator: Any = None
        self._position, self._head = ctypes.c_int(), (ctypes.c_char * _SEEN)()
        self._words: Any = None
        self._state: dict[str, Any] = {}

    def get_state(self) -> dict[str, Any]:
        """Return the state, arrays as tensors; the same object as before if nothing was drawn since."""
        generator = np.random.mtrand.get_bit_generator()
        if generator is not self._generator:
            self._generator, self._words = generator, None
            if isinstance(generator, np.random.MT19937):
                address = generator.ctypes.state_address
                self._position = ctypes.c_int.from_address(address + _NUMPY_POSITION)
                self._head = (ctypes.c_char * _SEEN).from_address(address)
        words = self._position.value, self._head.raw
        if words == self._words:
            return self._state
        state: dict[str, Any] = arrays_to_tensors(np.random.get_state(legacy=False))  # noqa: NPY002 - the global one
        # A second Gaussian number that NumPy keeps is drawn without changing the words, and the layout of
        # other kinds of generators is not known: in both cases the state is read again each time.
        comparable = isinstance(generator, np.random.MT19937) and not state["has_gauss"]
        self._words, self._state = (words, state) if comparable else (None, {})
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a state that ``get_state`` returned."""
        np.random.set_state(_tensors_to_arrays(state))  # noqa: NPY002 - the global one


PYTHON, NUMPY = _PythonGenerator(), _NumpyGenerator()


def seed_generators(seed: int = 0) -> None:
    """Seed the global generators: runs, or ranks, of a script that seeds none draw the same."""
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the global one
    torch.manual_seed(seed)


@contextmanager
def preserve_python_random_state() -> Iterator[None]:
    """Restore Python's global generator after the context: for imports that draw, such as rich's."""
    before = PYTHON.get_state()
    try:
        yield
    finally:
        PYTHON.set_state(before)


def get_random_state() -> dict[str, Any]:
    """Return the state of every global generator that training draws from: Python's, NumPy's, PyTorch's."""
    import torch

    state: dict[str, Any] = {
        "python": PYTHON.get_state(),
        "numpy": NUMPY.get_state(),
        "torch": torch.default_generator.get_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore what ``get_random_state`` returned."""
    import torch

    PYTHON.set_state(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        NUMPY.set_state(state["numpy"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])


def generator_states(generators: Sequence[Any]) -> list[Any]:
    """Return the states of PyTorch's, NumPy's or Python's generator objects, as tensors and plain values."""
    return [_state_of(generator) for generator in generators]


def set_generator_states(generators: Sequence[Any], states: Sequence[Any]) -> None:
    """Restore what ``generator_states`` returned for the same kinds of generators.

    Raises:
        ValueError, TypeError, RuntimeError, KeyError, AttributeError: the states belong to other kinds, or to
            a different number of generators.
    """
    for generator, state in zip(generators, states, strict=True):
        _set_state(generator, state)


def generators_in(value: Any) -> Iterator[Any]:
    """Yield the generators of PyTorch's, NumPy's and Python's that a value is, or a container directly holds.

    >>> list(generators_in([3, random.Random(1)]))  # doctest: +ELLIPSIS
    [<random.Random object at ...>]
    """
    import torch

    kinds = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        value = (value,)
    yield from (each for each in value if isinstance(each, kinds))


def _state_of(generator: Any) -> Any:
    import torch

    if isinstance(generator, torch.Generator | _PythonGenerator | _NumpyGenerator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return arrays_to_tensors(generator.bit_generator.state)
    return arrays_to_tensors(generator.get_state(legacy=False))


def _set_state(generator: Any, state: Any) -> None:
    import torch

    if isinstance(generator, torch.Generator | _PythonGenerator | _NumpyGenerator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = _tensors_to_arrays(state)
    else:
        generator.set_state(_tensors_to_arrays(state))


@dataclass(slots=True)
class DrawnRandomNumbers:
    """Random numbers that a forward drew from Python, NumPy and the GPUs' global generators, and from others.

    A CUDA generator is a seed and an offset, both on the host: reading them does not synchronise.
    """

    before: list[tuple[Any, Any]]
    """Generators with their states before the forward; after ``keep_drawn``, only those drawn from."""

    @classmethod
    def start(cls, others: Iterable[Any] = ()) -> "DrawnRandomNumbers":
        """Record the states of these and the global generators before a forward."""
        import torch

        generators: list[Any] = [PYTHON, NUMPY, *others]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            generators += torch.cuda.default_generators
        return cls(list(zip(generators, generator_states(generators), strict=True)))

    def keep_drawn(self) -> None:
        """Drop the generators that the forward did not draw from."""
        self.before = [
            (generator, state)
            for generator, state in self.before
            if not _same_generator_state(state, _state_of(generator))
        ]

    def rewind(self) -> None:
        """Set the generators back to where they were before the forward."""
        set_generator_states([each for each, _ in self.before], [state for _, state in self.before])

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Draw the same numbers inside the context; restore the generators after it."""
        generators = [each for each, _ in self.before]
        now = generator_states(generators)
        try:
            self.rewind()
            yield
        finally:
            set_generator_states(generators, now)


def torch_generator_positions() -> tuple[Any, ...]:
    """Return where PyTorch's global generators are, to be compared."""
    import torch

    state = torch.get_rng_state()
    # .numpy() would dispatch operations, and an operation counter would add them to the forward.
    own = ctypes.string_at(state.data_ptr(), state.nbytes)
    return own, *(each.get_offset() for each in torch.cuda.default_generators)


def _same_generator_state(one: Any, other: Any) -> bool:
    """Return whether two states of a generator, PyTorch's included, are equal."""
    if one is other:
        return True
    import torch

    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            _same_generator_state(value, other[name]) for name, value in one.items()
        )
    return bool(one == other)


def arrays_to_tensors(value: Any) -> Any:
    """Return NumPy's description of a generator with its arrays as tensors, which saved files can hold.

    >>> arrays_to_tensors({"key": np.zeros(2, np.int64), "pos": 3})
    {'key': tensor([0, 0]), 'pos': 3}
    """
    import torch
    from torch.utils._pytree import tree_map_only

    return tree_map_only(np.ndarray, torch.from_numpy, value)


def _tensors_to_arrays(value: Any) -> Any:
    """Undo ``arrays_to_tensors``."""
    import torch
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, torch.Tensor.numpy, value)
