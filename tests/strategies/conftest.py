"""Two gloo ranks, started once for the tests of this folder that need them; and fewer objects to search."""

import gc
from contextlib import closing

import pytest

from support.rank_pool import RankPool


@pytest.fixture(scope="session")
def two_ranks():
    """Return a pool of two ranks."""
    with closing(RankPool(2)) as pool:
        yield pool


@pytest.fixture(autouse=True, scope="module")
def frozen_objects():
    """Hide what exists from the garbage collector: slices search its objects for tensors."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
