"""Choices that checkpoint modules of one kind alike."""

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.planning import mixed_integer_solver as mixed_integer_program
from memfit.planning.choose_checkpointing import CheckpointChooser
from memfit.planning.mixed_integer_solver import INFINITY, MixedIntegerProgram, MixedIntegerSolution
from support.planned_networks import NETWORKS, feed_forward
from support.planned_script import copy, work


@pytest.fixture(scope="module", params=NETWORKS)
def chooser(request):
    torch.manual_seed(0)
    network = request.param()
    network.gradients()
    return CheckpointChooser(network.record(), work)


@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_the_peak_of_a_selection_is_that_of_the_program(chooser, data):
    selection = {}
    for module, ways in chooser._ways.items():
        if not any(_on_one_path(module, other) for other in selection) and data.draw(st.booleans()):
            selection[module] = data.draw(st.integers(0, len(ways) - 1))
    fixed = {
        column: float(selection.get(module) == way)
        for module, columns in chooser._columns.items()
        for way, column in enumerate(columns)
    }
    least = chooser._program.minimize(chooser._budget, fixed=fixed).objective
    uniform = chooser._uniform
    assert uniform.peak(selection) == pytest.approx(least * (1 << 20), rel=1e-6)
    ordered = uniform.in_order(selection)
    assert uniform.seconds(ordered) == pytest.approx(uniform.seconds(selection))
    assert uniform.peak(ordered) <= uniform.peak(selection)
    assert not any(_on_one_path(*pair) for pair in combinations(ordered, 2))


def _on_one_path(module, other):
    first, second = sorted((module, other), key=len)
    return second.startswith(f"{first}.") or not first


def test_the_first_modules_of_a_kind_are_checkpointed_until_the_rest_fits():
    torch.manual_seed(0)
    chooser = CheckpointChooser(feed_forward(12).record(), work)
    uniform, plain = chooser._uniform, chooser.plain_peak
    assert uniform.fastest(plain) == {}
    found = {share: uniform.fastest(int(share * plain)) for share in (0.95, 0.9, 0.8, 0.7, 0.6)}
    for share, selection in found.items():
        assert uniform.peak(selection) <= share * plain
    assert sorted(map(uniform.seconds, found.values())) == [uniform.seconds(each) for each in found.values()]
    for selection in found.values():
        assert list(selection) == [str(number) for number in range(len(selection))]
        ways = list(selection.values())
        assert ways == sorted(ways, reverse=True)  # a later one holds less
    assert any(len(set(selection.values())) == 2 for selection in found.values())
    assert uniform.fastest(uniform.peak(uniform.smallest) - 1) is None


def test_of_identical_modules_the_first_have_the_slowest_ways():
    torch.manual_seed(0)
    uniform = CheckpointChooser(feed_forward(12).record(), work)._uniform
    slow, fast = sorted((0, 1), key=lambda way: -uniform.seconds({"3": way}))
    assert uniform.seconds({"3": slow}) > uniform.seconds({"3": fast})
    ordered = {"0": slow, "1": slow, "2": fast}
    assert uniform.in_order({"3": fast, "7": slow, "9": slow}) == uniform.in_order(ordered) == ordered


def nothing_found(monkeypatch):
    monkeypatch.setattr(
        MixedIntegerProgram, "minimize", lambda *_, **__: MixedIntegerSolution((), INFINITY, -INFINITY)
    )


def no_effort(monkeypatch):
    monkeypatch.setattr(mixed_integer_program, "_EFFORT", 0)
    monkeypatch.setattr(mixed_integer_program, "_LEAST", 0)


@pytest.mark.parametrize("limit", [no_effort, nothing_found])
@pytest.mark.parametrize("make", NETWORKS)
def test_there_is_a_choice_however_little_the_solver_does(monkeypatch, make, limit):
    torch.manual_seed(0)
    network = make()
    network.gradients()
    step = network.record()
    chooser = CheckpointChooser(step, work, copy)
    with monkeypatch.context() as limited:
        limit(limited)
        smallest = chooser.smallest
        budgets = [int(share * chooser.plain_peak) for share in (1.0, 0.9)] + [smallest.peak]
        found = {budget: chooser.choose(budget) for budget in budgets}
    assert smallest.peak < 0.9 * chooser.plain_peak
    for budget, choice in found.items():
        assert choice.peak <= budget
        best = chooser.choose(budget)
        assert 0.0 <= choice.bound <= best.seconds <= choice.seconds * 1.02 + 1e-9
