"""A fixture that compares a script's own account of its memory with memfit's."""

import pytest

from support.attributed_runs import run_and_attribute


@pytest.fixture
def attributed(dry_run):
    """Return a function that runs a script, and returns its attributed allocations and its own figures."""

    def run(script, **options):
        found, _, truth = run_and_attribute(dry_run, script, **options)
        return found, truth

    return run
