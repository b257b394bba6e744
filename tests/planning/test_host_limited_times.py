"""Plans where the host limits a step: what an operation takes there."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from memfit.devices import find_device
from memfit.planning.host_limited_times import with_time_of_host
from memfit.planning.run_changes_on_ghost import PlannedScript, kernel_time_estimator
from memfit.records import ASSUMED_HOST_TIMES, EventLabel, HostUnits, Operand, Operation, Phase, WholeStep

CARD = find_device("H100-80GB")


def product(size):
    fields = "aten.mm.default", -1, -1, (), (), (), 2 * size**3, 0, "float32", False, 0.0, 0
    operand = Operand((size, size), "float32")
    return Operation(*fields, operands=(operand, operand), results=(operand,), launches=1)


def planned(operation, count=100):
    """Return a script whose step runs an operation so many times, with ten Python calls each."""
    host = HostUnits(python_calls=10 * count, operations=count, launches=count)
    step = WholeStep((operation,), (0,) * count, (0,) * count, host)
    labels = (EventLabel(Phase.FORWARD, "", "", -1),)
    versions = {"torch": "0"}  # nobody measured a host with it
    trace = SimpleNamespace(
        step=step, labels=labels, device=SimpleNamespace(name=CARD.name), versions=versions, rank=None
    )
    script = PlannedScript(None, kernel_time_estimator(CARD), lambda _: 0.0, "a rule")
    return with_time_of_host(script, SimpleNamespace(trace=trace)), script


def test_an_operation_takes_what_the_host_needs_where_that_limits_the_step():
    small = product(64)
    limited, script = planned(small)
    one = ASSUMED_HOST_TIMES.one
    issue = 10 * one.python_calls + one.operations + one.launches
    assert script.seconds(small) < issue
    assert limited.seconds(small) == pytest.approx(issue)
    assert limited.host == one
    large = product(8192)
    assert limited.seconds(large) == script.seconds(large)  # longer than the host needs
    view = replace(small, name="aten.t.default", launches=0, flops=0)
    assert limited.seconds(view) == script.seconds(view)


def test_where_the_gpu_limits_the_step_kernels_decide():
    large = product(8192)
    same, script = planned(large)
    assert same is script
    assert script.host == HostUnits()
