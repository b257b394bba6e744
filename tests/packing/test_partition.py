"""Partition into parts, against a naive search; packing each part; buffers treated as always live."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.packing import best_packing, exhaustive_search
from memfit.packing.best_packing import (
    always_live_mask,
    countable_as_always_live_mask,
    independent_packing_parts,
    pack_buffers,
)
from memfit.packing.buffer_lifetimes import Buffers, concatenate_buffers, lifetime_sections
from support.known_packings import gapless_problem

lengths = st.one_of(st.integers(1, 3), st.integers(1, 10))
rows = st.tuples(st.integers(0, 9), lengths, st.integers(1, 6)).map(
    lambda row: (row[0], row[0] + row[1], row[2])
)


def buffers(given_rows, period=0):
    lower, upper, size = np.array(given_rows, np.int64).T
    names = tuple(f"b{n}" for n in range(len(given_rows)))
    return Buffers(lower.copy(), upper.copy(), size.copy(), names, period)


def moments(problem, index):
    times = range(problem.lower[index], problem.upper[index])
    return {time % problem.period if problem.period else time for time in times}


def repeat(problem, times):
    """Return a problem several times in a row."""
    length = int(problem.upper.max())
    return concatenate_buffers(
        [
            replace(problem, lower=problem.lower + n * length, upper=problem.upper + n * length)
            for n in range(times)
        ]
    )


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(rows, min_size=1, max_size=12), st.sampled_from((0, 10)))
def test_parts_are_the_connected_components_of_overlapping_buffers(given_rows, period):
    problem = buffers(given_rows, period)
    problem_sections = lifetime_sections(problem)
    always = always_live_mask(problem_sections)
    rest = np.flatnonzero(~always).tolist()
    live = [moments(problem, index) for index in range(len(problem))]
    assert all(live[index] & other for index in np.flatnonzero(always).tolist() for other in live)
    groups: list[set[int]] = []
    for index in rest:
        overlapping = [group for group in groups if any(live[index] & live[other] for other in group)]
        groups = [group for group in groups if group not in overlapping] + [{index}.union(*overlapping)]
    part = dict(zip(rest, independent_packing_parts(problem_sections, always).tolist(), strict=True))
    assert sorted(set(part.values())) == list(range(len(groups)))
    assert {frozenset(index for index in rest if part[index] == n) for n in part.values()} == {
        frozenset(group) for group in groups
    }


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(rows, min_size=1, max_size=12), st.sampled_from((0, 10)))
def test_treating_buffers_as_always_live_leaves_the_bound_unchanged(given_rows, period):
    problem = buffers(given_rows, period)
    before = lifetime_sections(problem)
    always = countable_as_always_live_mask(before, problem.size)
    length = period or int(problem.upper.max() - problem.lower.min())
    begin = 0 if period else problem.lower.min()
    lower = np.where(always, begin, problem.lower)
    longer = replace(problem, lower=lower, upper=np.where(always, begin + length, problem.upper))
    assert lifetime_sections(longer).bound == before.bound
    assert (always | ~always_live_mask(before)).all()


def test_a_long_lived_buffer_is_treated_as_always_live_if_the_bound_allows():
    problem = buffers([(0, 5, 4), (1, 9, 2), (5, 9, 1), (2, 3, 1)])
    assert countable_as_always_live_mask(lifetime_sections(problem), problem.size).tolist() == [
        False,
        True,
        False,
        False,
    ]
    full = buffers([(0, 1, 4), (1, 9, 2), (5, 9, 2)])
    assert not countable_as_always_live_mask(lifetime_sections(full), full.size).any()
    around = buffers([(5, 14, 2), (0, 2, 5), (4, 5, 1), (6, 8, 1)], period=10)
    assert countable_as_always_live_mask(lifetime_sections(around), around.size).tolist() == [
        True,
        False,
        False,
        False,
    ]


def test_many_hard_parts_are_solved_one_by_one(monkeypatch):
    """The whole is too large to search, and connected by a buffer that is nearly always live."""
    monkeypatch.setattr(exhaustive_search, "MAX_BUFFERS", 100)
    searches = []
    monkeypatch.setattr(
        best_packing,
        "_search_smallest",
        lambda *arguments, search=best_packing._search_smallest: searches.append(1) or search(*arguments),
    )
    hard = repeat(gapless_problem(4, 90), 20)
    end = int(hard.upper.max())
    weights = buffers([(0, end, 700), (10, end, 300)])
    found = pack_buffers(concatenate_buffers([hard, weights]), seconds=120)
    assert found.height == found.bound == 11_000
    assert found.how == "by search"
    assert len(searches) == 1  # the other parts reuse its packing


def test_parts_that_differ_only_in_sizes_are_solved_separately():
    hard, end = gapless_problem(4, 90), 200
    index_of = {}
    first, second = next(
        (index_of[lifetime], index)
        for index, lifetime in enumerate(zip(hard.lower.tolist(), hard.upper.tolist(), strict=True))
        if index_of.setdefault(lifetime, index) != index and hard.size[index_of[lifetime]] != hard.size[index]
    )
    size = hard.size.copy()
    size[[first, second]] = size[[second, first]]
    swapped = replace(hard, lower=hard.lower + end, upper=hard.upper + end, size=size)
    assert pack_buffers(concatenate_buffers([hard, swapped]), seconds=60).height == 10_000


def test_the_highest_part_decides_how_far_others_are_searched():
    """Memory that the other parts need beyond their own bound is available anyway."""
    low, high = gapless_problem(4, 90), buffers([(200, 300, 20_000)])
    found = pack_buffers(concatenate_buffers([low, high]))
    assert (found.height, found.bound) == (20_000, 20_000)
    assert found.how != "by search"


def test_always_live_buffers_are_stacked():
    found = pack_buffers(buffers([(0, 5, 4), (0, 5, 2), (0, 5, 1)]))
    assert (found.offset.tolist(), found.height, found.bound) == ([0, 4, 6], 7, 7)
