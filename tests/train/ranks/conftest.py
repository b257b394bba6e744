"""Four gloo ranks, started once for all tests of this folder."""

from contextlib import closing

import pytest

from support.rank_pool import RankPool


@pytest.fixture(scope="session")
def four_ranks():
    """Return a pool of four ranks."""
    with closing(RankPool(4)) as pool:
        yield pool
