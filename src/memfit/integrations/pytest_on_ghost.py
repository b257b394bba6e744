"""Run one test of pytest, as a script on the ghost: ``-m memfit.integrations.pytest_on_ghost ROOT INI NODE``.

If memory runs out, the script ends with the test's exception, so that memfit sees it. Any other failure is in
pytest's own output. A test that was skipped did not run: that is a failure, too.
"""

import sys
from typing import Any

from memfit.temporary_folders import TemporaryFolder

RUNS_HERE = "MEMFIT_TEST_ON_GHOST"
"""The environment variable that says that this process is on the ghost."""
_NOT_PASSED = 5


class _Outcome:
    """A plugin that keeps what became of the test."""

    out_of_memory: BaseException | None = None
    passed = False

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        """Keep whether the test's call passed, and its exception if memory ran out."""
        from torch import OutOfMemoryError

        if call.excinfo is None:
            self.passed = self.passed or call.when == "call"
        elif isinstance(call.excinfo.value, OutOfMemoryError):
            own = call.excinfo.traceback.cut(path=item.path)  # without pytest's frames
            self.out_of_memory = call.excinfo.value.with_traceback(own[0]._rawentry)


def main() -> None:
    """Run the test that the command line names."""
    import pytest

    root, ini, node = sys.argv[1:]
    configuration = ["-c", f"{root}/{ini}"] if ini else []
    outcome = _Outcome()
    with TemporaryFolder() as cache:
        # The project's addopts hold here, too; but its -m and -k chose tests already, and the cache is its
        # own process's.
        chosen = ["-m", "", "-k", "", "-o", f"cache_dir={cache}", *_single_process(), f"{root}/{node}"]
        code = pytest.main([*configuration, f"--rootdir={root}", *chosen], plugins=[outcome])
    if outcome.out_of_memory is not None:
        raise outcome.out_of_memory
    if code or not outcome.passed:
        sys.exit(int(code) or _NOT_PASSED)


def _single_process() -> list[str]:
    """Return the options that keep pytest-xdist from starting workers, if it is installed."""
    from importlib.util import find_spec

    return ["-n0"] if find_spec("xdist") else []


if __name__ == "__main__":
    main()
