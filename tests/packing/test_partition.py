"""Parts, as a naive search tells them apart, packed each for itself; lives that are stretched."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.packing import best_packing, exhaustive_search
from memfit.packing.best_packing import pack
from memfit.packing.buffers import Buffers, joined, sections
from memfit.packing.partition import apart, lives_always, stretched
from support.known_packings import cut

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


def again(problem, times):
    """Return a problem over and over, one after the other."""
    length = int(problem.upper.max())
    return joined(
        [
            replace(problem, lower=problem.lower + n * length, upper=problem.upper + n * length)
            for n in range(times)
        ]
    )


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(rows, min_size=1, max_size=12), st.sampled_from((0, 10)))
def test_parts_are_what_meets_in_the_end(given_rows, period):
    problem = buffers(given_rows, period)
    found_cut = sections(problem)
    always = lives_always(found_cut)
    rest = np.flatnonzero(~always).tolist()
    alive = [moments(problem, index) for index in range(len(problem))]
    assert all(alive[one] & other for one in np.flatnonzero(always).tolist() for other in alive)
    groups: list[set[int]] = []
    for index in rest:
        met = [group for group in groups if any(alive[index] & alive[other] for other in group)]
        groups = [group for group in groups if group not in met] + [{index}.union(*met)]
    part = dict(zip(rest, apart(found_cut, always).tolist(), strict=True))
    assert sorted(set(part.values())) == list(range(len(groups)))
    assert {frozenset(index for index in rest if part[index] == n) for n in part.values()} == {
        frozenset(group) for group in groups
    }


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(rows, min_size=1, max_size=12), st.sampled_from((0, 10)))
def test_stretched_lives_leave_the_bound_as_it_is(given_rows, period):
    problem = buffers(given_rows, period)
    before = sections(problem)
    always = stretched(before, problem.size)
    length = period or int(problem.upper.max() - problem.lower.min())
    begin = 0 if period else problem.lower.min()
    lower = np.where(always, begin, problem.lower)
    longer = replace(problem, lower=lower, upper=np.where(always, begin + length, problem.upper))
    assert sections(longer).bound == before.bound
    assert (always | ~lives_always(before)).all()


def test_what_lives_nearly_always_is_stretched_if_there_is_room():
    problem = buffers([(0, 5, 4), (1, 9, 2), (5, 9, 1), (2, 3, 1)])
    assert stretched(sections(problem), problem.size).tolist() == [False, True, False, False]
    full = buffers([(0, 1, 4), (1, 9, 2), (5, 9, 2)])
    assert not stretched(sections(full), full.size).any()
    around = buffers([(5, 14, 2), (0, 2, 5), (4, 5, 1), (6, 8, 1)], period=10)
    assert stretched(sections(around), around.size).tolist() == [True, False, False, False]


def test_many_hard_parts_are_solved_one_by_one(monkeypatch):
    """Too many to be searched at once, and held together by what lives nearly always."""
    monkeypatch.setattr(exhaustive_search, "MOST", 100)
    looked = []
    monkeypatch.setattr(
        best_packing, "_least", lambda *what, least=best_packing._least: looked.append(1) or least(*what)
    )
    hard = again(cut(4, 90), 20)
    end = int(hard.upper.max())
    weights = buffers([(0, end, 700), (10, end, 300)])
    found = pack(joined([hard, weights]), seconds=120)
    assert found.height == found.bound == 11_000
    assert found.how == "by search"
    assert len(looked) == 1  # the others are like it


def test_parts_of_other_sizes_are_not_alike():
    hard, end = cut(4, 90), 200
    lives = {}
    one, two = next(
        (lives[life], index)
        for index, life in enumerate(zip(hard.lower.tolist(), hard.upper.tolist(), strict=True))
        if lives.setdefault(life, index) != index and hard.size[lives[life]] != hard.size[index]
    )
    size = hard.size.copy()
    size[[one, two]] = size[[two, one]]
    other = replace(hard, lower=hard.lower + end, upper=hard.upper + end, size=size)
    assert pack(joined([hard, other]), seconds=60).height == 10_000


def test_the_highest_part_decides():
    """What the others need beyond their own bound is there anyway."""
    low, high = cut(4, 90), buffers([(200, 300, 20_000)])
    found = pack(joined([low, high]))
    assert (found.height, found.bound) == (20_000, 20_000)
    assert found.how != "by search"


def test_all_that_lives_always():
    found = pack(buffers([(0, 5, 4), (0, 5, 2), (0, 5, 1)]))
    assert (found.offset.tolist(), found.height, found.bound) == ([0, 4, 6], 7, 7)
