"""Alias sets: the union-find next to sets that are joined by hand, and what becomes of lives and sizes."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.packing.alias_sets import UnionFind, alias_sets
from memfit.records import Dataflow, GraphValue

COUNT = 12
pairs = st.lists(st.tuples(st.integers(0, COUNT - 1), st.integers(0, COUNT - 1)), max_size=30)


def by_hand(count, given_pairs):
    sets = [{number} for number in range(count)]
    for one, other in given_pairs:
        both = next(s for s in sets if one in s) | next(s for s in sets if other in s)
        sets = [s for s in sets if not s & both] + [both]
    return {frozenset(s) for s in sets}


def found_by(count, find):
    sets = {}
    for number in range(count):
        sets.setdefault(find(number), set()).add(number)
    return {frozenset(s) for s in sets.values()}


def joined(count, given_pairs):
    sets = UnionFind(count)
    for pair in given_pairs:
        sets.union(*pair)
    return sets


def way(sets, number):
    """Return what a search for a number's set would pass."""
    passed = [number]
    while sets._above[passed[-1]] != passed[-1]:
        passed.append(sets._above[passed[-1]])
    return passed


@settings(max_examples=300, deadline=None, derandomize=True)
@given(pairs)
def test_it_finds_what_joining_by_hand_gives(given_pairs):
    assert found_by(COUNT, joined(COUNT, given_pairs).find) == by_hand(COUNT, given_pairs)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(pairs)
def test_the_way_is_short_and_each_search_shortens_it(given_pairs):
    sets = joined(COUNT, given_pairs)
    for number in range(COUNT):
        size = sum(sets.find(other) == sets.find(number) for other in range(COUNT))
        assert len(way(joined(COUNT, given_pairs), number)) - 1 <= math.log2(size)
        assert len(way(sets, number)) <= 2


def test_a_search_shortens_the_way_of_all_that_it_passes():
    """Sets of equal size, joined two by two, give the longest way there is: one more at each joining."""
    pairs_of_equals = [(at, at + step) for step in (1, 2, 4, 8) for at in range(0, 16, 2 * step)]
    sets = joined(16, pairs_of_equals)
    far = max(range(16), key=lambda number: len(way(sets, number)))
    passed = way(joined(16, pairs_of_equals), far)
    sets.find(far)
    assert all(len(way(sets, number)) <= 2 for number in passed)


def chain(count, *, backwards):
    links = [(number, number + 1) for number in range(count - 1)]
    return links[::-1] if backwards else links


@pytest.mark.parametrize("backwards", [False, True])
def test_a_long_chain_is_one_set(backwards):
    count = 200_000
    sets = joined(count, chain(count, backwards=backwards))
    assert {sets.find(number) for number in range(count)} == {sets.find(0)}


def test_one_hop_is_not_enough():
    """What Caffe's fork did: a map from each blob to its root, which a later root makes stale."""
    links = chain(6, backwards=True)  # 5 shares with 4, then 4 with 3, ...
    root = {}
    for one, other in links:
        root[other] = root.get(one, one)
    assert len(found_by(6, lambda number: root.get(number, number))) > 1
    assert len(found_by(6, joined(6, links).find)) == 1


def value(name, begin, end, size=512, device="cpu", *, given=False):
    return GraphValue(name, begin, end, size, device, given)


PICTURE = (
    value("x", 0, 2, given=True),
    value("linear", 1, 4),
    value("split[0]", 2, 4),
    value("split[1]", 2, 4),
    value("add_", 3, 5),
)
LINKS = ((1, 2), (2, 3), (3, 4))


def test_the_picture_in_the_docstring():
    own = [found for found in alias_sets(Dataflow(PICTURE, LINKS)) if not found.given]
    assert [(found.names, found.begin, found.end, found.size) for found in own] == [
        (("linear", "split[0]", "split[1]", "add_"), 1, 5, 512)
    ]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)])
def test_the_order_in_which_pairs_are_told_does_not_matter(order):
    told = Dataflow(PICTURE, tuple(LINKS[which][::-1] for which in order))
    assert alias_sets(told) == alias_sets(Dataflow(PICTURE, LINKS))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(pairs)
def test_sets_are_those_that_joining_by_hand_gives(given_pairs):
    values = tuple(value(str(number), number, number + 1) for number in range(COUNT))
    found = {frozenset(map(int, one.names)) for one in alias_sets(Dataflow(values, tuple(given_pairs)))}
    assert found == by_hand(COUNT, given_pairs)


def test_a_set_is_as_large_as_its_memory_ever_is():
    grown = (value("a", 0, 2, 512), value("resize_", 1, 3, 2048), value("b", 2, 3, 4))
    sizes = [found.size for found in alias_sets(Dataflow(grown, ((0, 1),)))]
    assert sizes == [2048, 4]


@pytest.mark.parametrize("which", range(3))
def test_what_lies_in_given_memory_is_given(which):
    values = [value(name, at, at + 2) for at, name in enumerate("abc")]
    values[which] = replace(values[which], given=True)
    assert [found.given for found in alias_sets(Dataflow(tuple(values), ((0, 1), (1, 2))))] == [True]


def test_a_value_that_is_used_again_late_keeps_its_set():
    values = (value("a", 0, 9), value("view", 1, 2))
    (found,) = alias_sets(Dataflow(values, ((0, 1),)))
    assert (found.begin, found.end) == (0, 9)
