"""Two pools of gloo ranks, started once for all tests of this folder."""

import pytest

from support.rank_pool import RankPool


@pytest.fixture(scope="session")
def two_ranks():
    """Return a pool of two ranks."""
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def four_ranks():
    """Return a pool of four ranks."""
    pool = RankPool(4)
    yield pool
    pool.close()
