"""The best packing: against every order of small problems, and against problems with a known optimum."""

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.packing import exhaustive_search
from memfit.packing.best_packing import ORDERS, greedy_packings, pack_buffers
from memfit.packing.buffer_lifetimes import Buffers, concatenate_buffers, lifetime_sections
from memfit.packing.exhaustive_search import PackingSearchResult
from memfit.packing.packing_violations import find_packing_violation
from support.known_packings import gapless_problem


def buffers(*rows: tuple[int, int, int]) -> Buffers:
    lower, upper, size = np.array(rows, np.int64).T
    return Buffers(lower.copy(), upper.copy(), size.copy(), tuple(f"b{n}" for n in range(len(rows))))


def smallest(problem: Buffers) -> int:
    """Return the height of the smallest packing: try every order, stacking each buffer on earlier ones."""
    period = problem.period or 100
    moments = [
        {moment % period for moment in range(lower, upper)}
        for lower, upper in zip(problem.lower, problem.upper, strict=True)
    ]
    best = int(problem.size.sum())
    for order in itertools.permutations(range(len(problem))):
        ends: dict[int, int] = {}
        for index in order:
            offset = max((end for placed, end in ends.items() if moments[placed] & moments[index]), default=0)
            ends[index] = offset + int(problem.size[index])
        best = min(best, max(ends.values()))
    return best


rows = st.tuples(st.integers(0, 9), st.integers(1, 5), st.integers(1, 6)).map(
    lambda row: (row[0], row[0] + row[1], row[2])
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(rows, min_size=1, max_size=6), st.sampled_from((0, 10)))
def test_the_smallest_packing_is_found_and_proved_optimal(given_rows, period):
    problem = replace(buffers(*given_rows), period=period)
    found = pack_buffers(problem, seconds=60)
    assert found.height == smallest(problem)
    assert found.height == found.bound
    below = exhaustive_search.search_packing_within_capacity(
        problem, lifetime_sections(problem), found.height - 1, time.monotonic() + 60
    )
    assert below.is_infeasible


@pytest.mark.parametrize(
    ("seed", "count"), [(1, 30), (2, 60), (3, 90), (4, 120), pytest.param(5, 150, marks=pytest.mark.slow)]
)
def test_problems_with_a_gapless_packing_are_packed_without_gaps(seed, count):
    problem = gapless_problem(seed, count)
    found = pack_buffers(problem, seconds=120)
    assert found.height == found.bound == 10_000
    assert find_packing_violation(problem, found.offset, 10_000) == ""


def test_a_problem_that_no_greedy_packer_solves_is_searched():
    problem = gapless_problem(4, 90)
    assert all(
        (offset + problem.size).max() > 10_000
        for _, offset in greedy_packings(problem, lifetime_sections(problem), float("inf"))
    )
    assert pack_buffers(problem, seconds=120).how == "by search"


def rotated(problem: Buffers) -> Buffers:
    lower = (problem.lower + 37) % 200
    return replace(problem, lower=lower, upper=lower + problem.upper - problem.lower, period=200)


@pytest.mark.parametrize(
    ("problem", "nodes"),
    [
        (gapless_problem(1, 60), 774),
        (gapless_problem(6, 60), 1_470),
        (gapless_problem(0, 70).where(np.arange(70) % 8 > 0), 237_921),  # with gaps
        (rotated(gapless_problem(0, 40)), 75),
    ],
)
def test_the_search_visits_at_most_the_recorded_number_of_nodes(problem, nodes):
    """Without one of its pruning rules, the search would find the same packing, only much later."""
    found = exhaustive_search.search_packing_within_capacity(
        problem, lifetime_sections(problem), 10_000, time.monotonic() + 60
    )
    assert found.offset is not None
    assert found.nodes <= nodes


def test_a_packing_within_the_capacity_is_not_improved():
    problem = gapless_problem(3, 90)
    easy = pack_buffers(problem, 20_000)
    assert easy.how != "by search"
    assert 10_000 < easy.height <= 20_000
    too_little = pack_buffers(problem, 9_999, seconds=120)
    assert too_little.height == too_little.bound == 10_000


def test_a_bound_above_the_peak_is_proved():
    """Each pair overlaps, but never all three: two are live at once, yet each needs an offset of its own."""
    three = replace(buffers((0, 2, 1), (1, 3, 1), (2, 4, 1)), period=3)
    assert lifetime_sections(three).bound == 2
    for capacity in (None, 2, 3):
        found = pack_buffers(three, capacity)
        assert (found.height, found.height == found.bound or capacity == 3) == (3, True)


def test_an_optimum_between_the_bound_and_the_greedy_packings_is_found():
    rng = np.random.default_rng(17)
    lower, length, size = rng.integers(0, 10, 10), rng.integers(3, 8, 10), rng.integers(1, 30, 10)
    problem = Buffers(lower, lower + length, size, tuple("abcdefghij"), 10)
    problem_sections = lifetime_sections(problem)
    greedy = min(
        (offset + size).max() for _, offset in greedy_packings(problem, problem_sections, float("inf"))
    )
    found = pack_buffers(problem, seconds=60)
    assert problem_sections.bound < found.height < greedy
    assert found.height == found.bound


def test_a_greedy_packing_one_above_the_bound_is_improved():
    problem = gapless_problem(0, 16, length=30, height=12)
    heights = [
        (offset + problem.size).max()
        for _, offset in greedy_packings(problem, lifetime_sections(problem), float("inf"))
    ]
    assert min(heights) == 13
    assert pack_buffers(problem, seconds=60).height == 12


def test_always_live_buffers_use_up_part_of_the_capacity():
    hard = gapless_problem(4, 90)
    weight = buffers((0, 200, 1_000))
    problem = concatenate_buffers([hard, weight])
    assert pack_buffers(problem, 20_000).how != "by search"
    assert pack_buffers(problem, 11_000, seconds=60).height == 11_000


def test_every_greedy_packing_is_valid():
    problem = gapless_problem(6, 400)
    names = []
    for name, offset in greedy_packings(problem, lifetime_sections(problem), float("inf")):
        assert find_packing_violation(problem, offset, int((offset + problem.size).max())) == ""
        names.append(name)
    assert len(names) == len(set(names)) == 2 * len(ORDERS)


def test_when_the_time_is_up_the_best_packing_so_far_is_returned():
    problem = gapless_problem(7, 3000)
    found = pack_buffers(problem, seconds=0.2)  # the full search would take hours
    assert find_packing_violation(problem, found.offset, found.height) == ""
    assert found.bound == 10_000 < found.height


def test_a_problem_with_too_many_buffers_is_not_searched(monkeypatch):
    monkeypatch.setattr(exhaustive_search, "MAX_BUFFERS", 29)
    problem = gapless_problem(1, 30)
    found = exhaustive_search.search_packing_within_capacity(
        problem, lifetime_sections(problem), 10_000, time.monotonic() + 60
    )
    assert found == PackingSearchResult()


def test_sections_are_the_moments_with_maximal_sets_of_live_buffers():
    found = lifetime_sections(buffers((0, 3, 4), (3, 9, 4), (0, 9, 4), (9, 21, 4), (0, 21, 4)))
    assert found.count == 3
    assert found.live.tolist() == [12, 12, 8]
    assert found.bound == 12
    assert list(zip(found.first.tolist(), found.last.tolist(), strict=True)) == [
        (0, 1),
        (1, 2),
        (0, 2),
        (2, 3),
        (0, 3),
    ]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(rows, min_size=1, max_size=20), st.sampled_from((0, 10)))
def test_the_bound_of_the_sections_is_the_peak_of_live_bytes(given_rows, period):
    live = [0] * (period or 20)
    for lower, upper, size in given_rows:
        for moment in range(lower, upper):
            live[moment % len(live)] += size
    assert lifetime_sections(replace(buffers(*given_rows), period=period)).bound == max(live)
