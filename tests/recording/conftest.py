"""A script's own account of its memory, beside memfit's."""

import pytest

from support.attribution_scripts import all_told


@pytest.fixture
def told(dry_run):
    """Return a function that runs a script: what every allocation is, and the script's own truth."""

    def run(script, **options):
        found, _, truth = all_told(dry_run, script, **options)
        return found, truth

    return run
