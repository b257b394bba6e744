"""Placement of blocks in the CUDA heaps, compared with a search of every hole."""

import ctypes
import random
import subprocess
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.arenas.arena_library import LIBRARY
from memfit.native_build import COMPILE_FLAGS, SHARED_C, find_compiler

pytestmark = pytest.mark.process

MANY = 100_000


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("blocks") / "blocks.so"
    parts = [str(LIBRARY.sources / name) for name in ("heap_blocks.c", "sorted_pairs.c")]
    flags = [flag for flag in COMPILE_FLAGS if "visibility" not in flag]
    subprocess.run(
        [*find_compiler(), *flags, f"-I{SHARED_C}", "-shared", *parts, "-o", str(path)], check=True
    )
    found, int64 = ctypes.CDLL(str(path)), ctypes.c_int64
    found.blocks_begin.argtypes = (ctypes.c_char_p, int64)
    for name, arguments in (
        ("blocks_take", (int64,)),
        ("blocks_free", (int64,)),
        ("blocks_next_free", (int64, ctypes.c_void_p)),
    ):
        function = getattr(found, name)
        function.restype, function.argtypes = int64, (ctypes.c_char_p, *arguments)
    return found


class Blocks:
    """The blocks of the C library."""

    def __init__(self, library, size):
        self._library, self._state = library, ctypes.create_string_buffer(1024)
        assert library.blocks_begin(self._state, size)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._library.blocks_end(self._state)

    def take(self, size):
        return self._library.blocks_take(self._state, size)

    def free(self, offset):
        return self._library.blocks_free(self._state, offset)

    def holes(self):
        found, size, offset = [], ctypes.c_int64(), 0
        while (offset := self._library.blocks_next_free(self._state, offset, ctypes.byref(size))) >= 0:
            found.append((offset, size.value))
            offset += size.value
        return found


def holes_of(living, size):
    """Return the holes between live blocks, sorted by offset."""
    ends = [0, *(offset + length for offset, length in sorted(living.items()))]
    begins = [*sorted(living), size]
    return [(end, begin - end) for end, begin in zip(ends, begins, strict=True) if begin > end]


@settings(deadline=None, max_examples=300)
@given(
    size=st.integers(1, 400),
    operations=st.lists(st.one_of(st.integers(1, 60), st.integers(-40, 0)), max_size=200),
)
def test_a_block_goes_into_the_hole_that_fits_best(library, size, operations):
    living = {}
    with Blocks(library, size) as blocks:
        for operation in operations:
            if operation > 0:
                fitting = [(hole, offset) for offset, hole in holes_of(living, size) if hole >= operation]
                expected = min(fitting)[1] if fitting else -1
                assert blocks.take(operation) == expected
                if expected >= 0:
                    living[expected] = operation
            elif living:
                offset = sorted(living)[operation % len(living)]
                assert blocks.free(offset) == living.pop(offset)
                assert blocks.free(offset) == 0  # a second time
            assert blocks.holes() == holes_of(living, size)


@pytest.mark.slow
def test_a_hundred_thousand_blocks_can_be_live_at_once(library):
    dice, living, size = random.Random(0), [], 1 << 40  # noqa: S311 - reproducible
    with Blocks(library, size) as blocks:
        for _ in range(MANY):
            length = dice.randrange(1, 1 << 20)
            living.append((blocks.take(length), length))
        for _ in range(MANY):
            at = dice.randrange(len(living))
            offset, length = living[at]
            assert blocks.free(offset) == length
            length = dice.randrange(1, 1 << 20)
            living[at] = (blocks.take(length), length)
        living.sort()
        assert all(a + length <= b for (a, length), (b, _) in pairwise(living))
        assert living[-1][0] + living[-1][1] < 1.2 * sum(length for _, length in living)  # holes were reused
        for offset, _ in dice.sample(living, MANY):
            blocks.free(offset)
        assert blocks.holes() == [(0, size)]
