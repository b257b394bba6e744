"""Run small operations on one thread: on a busy machine, several threads would wait for each other.

Two gloo ranks are started once for all tests of this folder.
"""

from contextlib import closing

import pytest
import torch

from support.rank_pool import RankPool


@pytest.fixture(scope="session")
def two_ranks():
    """Return a pool of two ranks."""
    with closing(RankPool(2)) as pool:
        yield pool


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
