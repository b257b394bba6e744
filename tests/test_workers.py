"""How tests are shared out to the workers of pytest-xdist."""

import pytest


@pytest.mark.xdist_group("of one worker")
def test_groups_of_tests_run_on_one_worker(request):
    """pytest-xdist 3.8 ignores groups under pytest 9.2, which builds ``nodeid`` from another attribute."""
    if request.config.getoption("loadgroup", default=False):  # in a worker of make test
        assert request.node.nodeid.endswith("@of one worker")
