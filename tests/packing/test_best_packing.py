"""The best packing: against every order of small problems, and against problems whose answer is known."""

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.packing import exhaustive_search
from memfit.packing.best_packing import pack
from memfit.packing.buffers import Buffers, joined, sections
from memfit.packing.exhaustive_search import Answer
from memfit.packing.greedy import ORDERS, packings
from memfit.packing.validator import wrong
from support.known_packings import cut


def buffers(*rows: tuple[int, int, int]) -> Buffers:
    lower, upper, size = np.array(rows, np.int64).T
    return Buffers(lower.copy(), upper.copy(), size.copy(), tuple(f"b{n}" for n in range(len(rows))))


def smallest(problem: Buffers) -> int:
    """Return the height of the smallest packing: in some order, each buffer falls onto those before it."""
    period = problem.period or 100
    moments = [
        {moment % period for moment in range(lower, upper)}
        for lower, upper in zip(problem.lower, problem.upper, strict=True)
    ]
    best = int(problem.size.sum())
    for order in itertools.permutations(range(len(problem))):
        ends: dict[int, int] = {}
        for index in order:
            at = max((end for other, end in ends.items() if moments[other] & moments[index]), default=0)
            ends[index] = at + int(problem.size[index])
        best = min(best, max(ends.values()))
    return best


rows = st.tuples(st.integers(0, 9), st.integers(1, 5), st.integers(1, 6)).map(
    lambda row: (row[0], row[0] + row[1], row[2])
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(rows, min_size=1, max_size=6), st.sampled_from((0, 10)))
def test_it_finds_the_smallest_and_proves_it(given_rows, period):
    problem = replace(buffers(*given_rows), period=period)
    found = pack(problem, seconds=60)
    assert found.height == smallest(problem)
    assert found.is_smallest
    below = exhaustive_search.find(problem, sections(problem), found.height - 1, time.monotonic() + 60)
    assert below.answer is Answer.INFEASIBLE


@pytest.mark.parametrize(("seed", "count"), [(1, 30), (2, 60), (3, 90), (4, 120), (5, 150)])
def test_it_packs_without_a_gap_what_was_cut_without_one(seed, count):
    problem = cut(seed, count)
    found = pack(problem, seconds=120)
    assert found.height == found.bound == 10_000
    assert wrong(problem, found.offset, 10_000) == ""


def test_what_no_fast_packer_solves_is_searched():
    problem = cut(4, 90)
    assert all(
        (offset + problem.size).max() > 10_000
        for _, offset in packings(problem, sections(problem), float("inf"))
    )
    assert pack(problem, seconds=120).how == "by search"


def rotated(problem: Buffers) -> Buffers:
    lower = (problem.lower + 37) % 200
    return replace(problem, lower=lower, upper=lower + problem.upper - problem.lower, period=200)


@pytest.mark.parametrize(
    ("problem", "nodes"),
    [
        (cut(1, 60), 774),
        (cut(6, 60), 1_470),
        (cut(0, 70).where(np.arange(70) % 8 > 0), 237_921),  # with gaps
        (rotated(cut(0, 40)), 75),
    ],
)
def test_the_search_looks_at_no_more_than_it_did(problem, nodes):
    """Each thing that keeps it small can be left out and the answer is the same, some day."""
    found = exhaustive_search.find(problem, sections(problem), 10_000, time.monotonic() + 60)
    assert found.answer is Answer.FOUND
    assert found.nodes <= nodes


def test_a_capacity_is_enough():
    problem = cut(3, 90)
    easy = pack(problem, 20_000)
    assert easy.how != "by search"
    assert 10_000 < easy.height <= 20_000
    too_little = pack(problem, 9_999, seconds=120)
    assert too_little.height == too_little.bound == 10_000


def test_what_no_packing_reaches_is_proved():
    """Each two of three meet, and never all three: two live at once, and there must be room for three."""
    three = replace(buffers((0, 2, 1), (1, 3, 1), (2, 4, 1)), period=3)
    assert sections(three).bound == 2
    for capacity in (None, 2, 3):
        found = pack(three, capacity)
        assert (found.height, found.is_smallest or capacity == 3) == (3, True)


def test_what_is_between_the_bound_and_the_fast_packers_is_found():
    dice = np.random.default_rng(17)
    lower, length, size = dice.integers(0, 10, 10), dice.integers(3, 8, 10), dice.integers(1, 30, 10)
    problem = Buffers(lower, lower + length, size, tuple("abcdefghij"), 10)
    cut_up = sections(problem)
    fast = min((offset + size).max() for _, offset in packings(problem, cut_up, float("inf")))
    found = pack(problem, seconds=60)
    assert cut_up.bound < found.height < fast
    assert found.is_smallest


def test_one_above_the_bound_is_searched_as_well():
    problem = cut(0, 16, length=30, height=12)
    heights = [
        (offset + problem.size).max() for _, offset in packings(problem, sections(problem), float("inf"))
    ]
    assert min(heights) == 13
    assert pack(problem, seconds=60).height == 12


def test_what_lives_always_takes_its_part_of_a_capacity():
    hard = cut(4, 90)
    weight = buffers((0, 200, 1_000))
    problem = joined([hard, weight])
    assert pack(problem, 20_000).how != "by search"
    assert pack(problem, 11_000, seconds=60).height == 11_000


def test_each_fast_packer_packs():
    problem = cut(6, 400)
    names = []
    for name, offset in packings(problem, sections(problem), float("inf")):
        assert wrong(problem, offset, int((offset + problem.size).max())) == ""
        names.append(name)
    assert len(names) == len(set(names)) == 2 * len(ORDERS)


def test_time_ends_the_search_with_the_best_there_is():
    problem = cut(7, 3000)
    begun = time.monotonic()
    found = pack(problem, seconds=0.2)
    assert time.monotonic() - begun < 60  # far from the hours that the search would take
    assert wrong(problem, found.offset, found.height) == ""
    assert found.bound == 10_000 < found.height


def test_a_search_that_is_too_large_is_not_begun(monkeypatch):
    monkeypatch.setattr(exhaustive_search, "MOST", 29)
    problem = cut(1, 30)
    answer = exhaustive_search.find(problem, sections(problem), 10_000, time.monotonic() + 60)
    assert (answer.answer, answer.nodes) == (Answer.UNKNOWN, 0)


def test_sections_are_the_moments_that_matter():
    found = sections(buffers((0, 3, 4), (3, 9, 4), (0, 9, 4), (9, 21, 4), (0, 21, 4)))
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
def test_the_bound_is_the_peak_of_what_lives(given_rows, period):
    live = [0] * (period or 20)
    for lower, upper, size in given_rows:
        for moment in range(lower, upper):
            live[moment % len(live)] += size
    assert sections(replace(buffers(*given_rows), period=period)).bound == max(live)
