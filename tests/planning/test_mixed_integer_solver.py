"""Mixed-integer programs solved by HiGHS."""

import random
import time
from itertools import product

import highspy
import pytest

from memfit.planning import mixed_integer_solver as mixed_integer_program
from memfit.planning.mixed_integer_solver import INFINITY, MixedIntegerProgram, make_highs_solver


@pytest.mark.parametrize("seed", range(5))
def test_the_solution_of_a_knapsack_is_the_best_of_all(seed):
    draw = random.Random(seed)  # noqa: S311 - no secret
    weights = [draw.randint(1, 20) for _ in range(8)]
    worth = [draw.randint(1, 20) for _ in range(8)]
    program = MixedIntegerProgram()
    left_out = [program.column(cost=value, integral=True) for value in worth]
    program.row(dict(zip(left_out, weights, strict=True)), sum(weights) - 40, INFINITY)
    found = program.minimize()
    best = min(
        sum(value for value, out in zip(worth, some, strict=True) if out)
        for some in product((0, 1), repeat=8)
        if sum(size for size, out in zip(weights, some, strict=True) if not out) <= 40
    )
    assert found.objective == pytest.approx(best)
    assert found.bound == pytest.approx(best)


def test_a_program_without_a_solution_has_none():
    program = MixedIntegerProgram()
    column = program.column(cost=1.0)
    program.row({column: 1.0}, 2.0, INFINITY)
    assert program.minimize() is None


def test_columns_can_be_fixed_and_one_minimized_alone():
    program = MixedIntegerProgram()
    cheap, dear = program.column(cost=1.0, upper=9.0), program.column(cost=5.0, upper=9.0)
    program.row({cheap: 1.0, dear: 1.0}, 6.0, INFINITY)
    assert program.minimize().values == (6.0, 0.0)
    assert program.minimize(fixed={cheap: 2.0}).values == (2.0, 4.0)
    assert program.minimize(cheap).values[0] == 0.0


def test_nothing_is_printed(capfd):
    program = MixedIntegerProgram()
    program.column(cost=1.0, integral=True)
    program.minimize()
    assert capfd.readouterr() == ("", "")


def test_one_thread_solves_so_that_every_machine_finds_the_same_plan():
    assert make_highs_solver().getOptionValue("threads")[1] == 1


def test_other_solvers_of_the_process_may_use_more_threads():
    def on_two_threads():
        other = make_highs_solver()
        other.setOptionValue("threads", 2)
        other.addVar(0.0, 5.0)
        other.changeColIntegrality(0, highspy.HighsVarType.kInteger)
        other.changeColCost(0, -1.0)
        return other.run(), other.getInfo().objective_function_value

    program = MixedIntegerProgram()
    program.row({program.column(cost=1.0, integral=True, upper=9.0): 1.0}, 2.5, INFINITY)
    for _ in range(2):
        assert on_two_threads() == (highspy.HighsStatus.kOk, -5.0)
        assert program.minimize().objective == 3.0


def hard(columns=40):
    """Return a program that takes a search: a knapsack in three dimensions."""
    draw = random.Random(1)  # noqa: S311 - no secret
    program = MixedIntegerProgram()
    items = [program.column(cost=draw.randint(90, 110), integral=True) for _ in range(columns)]
    for _ in range(3):
        program.row({each: draw.randint(50, 100) for each in items}, 1000.5, INFINITY)
    return program


def test_work_is_limited_and_the_best_solution_so_far_is_kept():
    program = hard()
    best = program.minimize()
    none, some = program.minimize(effort=0), program.minimize(effort=10 / 30_000)
    assert (none.values, none.objective) == ((), INFINITY)
    assert some.values
    assert some.bound <= best.bound <= best.objective <= some.objective
    assert some.bound < best.bound


def test_a_slow_machine_finds_the_same_solution(monkeypatch):
    effort = 30 / 30_000
    program = hard()
    quick = program.minimize(effort=effort)
    assert quick.bound < quick.objective  # the limit was reached
    assert make_highs_solver().getOptionValue("time_limit")[1] == INFINITY
    limit = mixed_integer_program._limit

    def slow(highs, *arguments):
        highs.cbMipInterrupt.subscribe(lambda _: time.sleep(0.01))
        limit(highs, *arguments)

    monkeypatch.setattr(mixed_integer_program, "_limit", slow)
    assert program.minimize(effort=effort) == quick


def test_no_solution_is_looked_for_that_is_no_better_than_a_known_one():
    program = hard()
    best = program.minimize()
    found = program.minimize(enough=0.9 * best.objective)
    assert 0.9 * best.objective <= found.bound <= best.bound
    assert found.bound < best.bound
