"""pytest: ``@pytest.mark.fits("8GiB")``, for a test that must fit so much GPU memory. It needs no GPU.

    @pytest.mark.fits("8GiB")                             or gpu="T4", and baseline="memory/step.json"
    def test_training_fits():
        train(batch_size=32)                              trains on "cuda"

The test runs on the ghost, as ``memfit check``, in a process of its own (``pytest_on_ghost.py``): with its
fixtures, which this process does not set up. It fails if it fails there, does not fit, or needs more memory
than the baseline.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memfit.devices import DEFAULT
from memfit.errors import MemfitError, UsageError
from memfit.integrations.pytest_on_ghost import RUNS_HERE
from memfit.records import MemoryCheck
from memfit.units import parse_bytes

_MODULE = "memfit.integrations.pytest_on_ghost"
_FIELDS = ("gpu", "baseline", "tolerance", "values")
_HELP = (
    "fits(budget, *, gpu, baseline, tolerance, values): run the test on the ghost; it fails unless it fits "
    '"8GiB", or the memory of gpu, and if its memory grew beyond the file baseline'
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that writes baselines."""
    group = parser.getgroup("memfit")
    group.addoption("--memfit-update", action="store_true", help="write the baselines of tests marked fits")


def pytest_configure(config: pytest.Config) -> None:
    """Document the mark."""
    config.addinivalue_line("markers", _HELP)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put a ``TestOnGhost`` in place of each marked test, unless this is the process on the ghost."""
    if RUNS_HERE in os.environ:
        return
    for position, item in enumerate(items):
        mark = item.get_closest_marker("fits")
        if mark is not None:
            items[position] = TestOnGhost.of(item, mark)


class GhostTestFailed(Exception):  # noqa: N818 - what pytest shows
    """A test did not fit, or its memory grew; the message is the report of ``memfit check``."""


class TestOnGhost(pytest.Item):
    """A marked test, as the process that collected it sees it."""

    __test__ = False
    options: Mapping[str, Any]

    @classmethod
    def of(cls, item: pytest.Item, mark: pytest.Mark) -> "TestOnGhost":
        """Return what runs a test on the ghost.

        Raises:
            UsageError: the mark's arguments are invalid.
        """
        unknown = mark.kwargs.keys() - set(_FIELDS)
        if unknown or len(mark.args) > 1 or not (mark.args or "gpu" in mark.kwargs):
            raise UsageError(
                f"{item.nodeid}: pytest.mark.fits takes a budget, such as '8GiB', or gpu='T4', and "
                f"optionally {', '.join(_FIELDS[1:])}; not {mark.args} and {mark.kwargs}."
            )
        own: TestOnGhost = cls.from_parent(item.parent, name=item.name, nodeid=item.nodeid)  # type: ignore[arg-type]
        own.own_markers, own.keywords = item.own_markers, item.keywords
        budget = parse_bytes(mark.args[0]) if mark.args else None
        own.options = {"gpu": DEFAULT, **mark.kwargs, "budget": budget}
        return own

    def runtest(self) -> None:
        """Run the test on the ghost.

        Raises:
            GhostTestFailed: it does not fit, or its memory grew.
        """
        os.environ[RUNS_HERE] = "1"
        try:
            result = self._checked()
        finally:
            del os.environ[RUNS_HERE]
        shown = replace(result, run=replace(result.run, command=(self.nodeid,)))
        print(shown)
        if not result.passed:
            raise GhostTestFailed(f"{shown}")

    def _checked(self) -> MemoryCheck:
        import memfit

        options = dict(self.options)
        baseline = options.pop("baseline", None)
        if baseline is not None:
            baseline = self.config.rootpath / baseline
        return memfit.check(
            _MODULE,
            [os.path.relpath(self.config.rootpath), *self._configuration(), self.nodeid],
            module=True,
            steps=None,
            baseline=baseline,
            update=baseline is not None and self.config.getoption("--memfit-update"),
            **options,
        )

    def _configuration(self) -> list[str]:
        file = self.config.inipath
        return [os.path.relpath(file, self.config.rootpath) if file else ""]

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *args: Any) -> Any:
        """Return memfit's own words, without a traceback through memfit."""
        if isinstance(excinfo.value, GhostTestFailed | MemfitError):
            return str(excinfo.value).replace(_MODULE, self.nodeid)
        return super().repr_failure(excinfo, *args)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Return where the test is."""
        return self.path, None, self.name
