"""Two gloo ranks, started once for the tests of this folder that need them."""

from contextlib import closing

import pytest

from support.rank_pool import RankPool


@pytest.fixture(scope="session")
def two_ranks():
    """Return a pool of two ranks."""
    with closing(RankPool(2)) as pool:
        yield pool
