"""The options of a run have the same defaults in the record, in the Python API and on the command line."""

import dataclasses
import functools
import inspect
import operator

import pytest

import memfit
from memfit.cli.compare import compare as compare_command
from memfit.cli.dry_run import dry_run as dry_run_command
from memfit.cli.plan import plan as plan_command
from memfit.run.job_rank import Rank
from memfit.run.options import BATCHES, SCAN, SECONDS, RunOptions

SET_BY_MEMFIT = {"allocator", "finish_late", "objects", "preload", "own_gpu_only", "real_ranks", "unlimited"}
"""Options of which memfit decides itself."""
DEFAULTS = {
    field.name: field.default
    for field in (*dataclasses.fields(RunOptions), *dataclasses.fields(Rank))  # which has a rank of its own
    if field.name not in SET_BY_MEMFIT
}
SEVERAL = {"values": ()}
"""Defaults of options that may be repeated on the command line."""
WITH_OTHERS = {"rank": None, "steps": None, "batches": BATCHES, "seconds": SECONDS, "scan": SCAN}
"""Defaults of ``memfit dry-run`` that a launcher may set, and those that count only beside --whole or
--longest, or not beside them."""


def defaults_of(function):
    """Return the defaults of a function's parameters; of a command, those in its groups of options, too."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    groups = [vars(default) for default in defaults.values() if dataclasses.is_dataclass(default)]
    return functools.reduce(operator.or_, groups, defaults)


def test_dry_run_takes_every_option_with_its_default():
    assert DEFAULTS.items() <= defaults_of(memfit.dry_run).items()


@pytest.mark.parametrize(
    "function",
    [memfit.record, memfit.estimate, memfit.compare, dry_run_command, compare_command, plan_command],
)
def test_every_shared_option_has_the_same_default(function):
    defaults = defaults_of(function)
    expected = DEFAULTS | (SEVERAL if function in (dry_run_command, compare_command, plan_command) else {})
    expected |= WITH_OTHERS if function is dry_run_command else {}
    shared = defaults.keys() & expected.keys()
    assert {"steps"} < shared
    assert {name: defaults[name] for name in shared} == {name: expected[name] for name in shared}
