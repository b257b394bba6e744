import gc

import pytest

import memfit
from memfit.arenas import arena_library


@pytest.fixture
def empty_cpu_arena():
    """Free tensors that exceptions of earlier tests keep alive: all tests share the arena's memory."""
    with memfit.arena(device="cpu") as arena:
        pointer = arena._memory.arena
    if arena_library.load().arena_live(pointer):
        gc.collect()
    assert arena_library.load().arena_live(pointer) == 0


@pytest.fixture
def arena():
    made = memfit.arena(device="cpu")
    yield made
    made.close()
