"""Run one test of pytest, as a script on the ghost: ``-m memfit.integrations.pytest_on_ghost ROOT INI NODE``.

Its failure is the script's, so that memfit sees where memory ran out. A test that was skipped did not run:
that is a failure, too.
"""

import os
import sys
from typing import Any

RUNS_HERE = "MEMFIT_TEST_ON_GHOST"
"""The environment variable that says that this process is on the ghost."""
_NOT_PASSED = 5


class _Outcome:
    """A plugin that keeps what became of the test."""

    error: BaseException | None = None
    passed = False

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        """Keep the exception of a phase of the test, and whether its call passed."""
        if call.excinfo is not None:
            self.error = self.error or call.excinfo.value
        elif call.when == "call":
            self.passed = True


def main() -> None:
    """Run the test that the command line names."""
    import pytest

    root, ini, node = sys.argv[1:]
    os.chdir(root)
    configuration = ["-c", ini] if ini else []
    without_workers = ["-p", "no:cacheprovider", *_single_process()]
    outcome = _Outcome()
    code = pytest.main([*configuration, f"--rootdir={root}", *without_workers, node], plugins=[outcome])
    if outcome.error is not None:
        raise outcome.error
    if code or not outcome.passed:
        sys.exit(int(code) or _NOT_PASSED)


def _single_process() -> list[str]:
    """Return the options that keep pytest-xdist from starting workers, if it is installed."""
    from importlib.util import find_spec

    return ["-n0"] if find_spec("xdist") else []


if __name__ == "__main__":
    main()
