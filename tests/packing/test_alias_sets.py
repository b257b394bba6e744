"""Alias sets: the union-find against a naive implementation, and lifetimes and sizes of the sets."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.packing.graph_packing import UnionFind, alias_sets
from memfit.records import Dataflow, GraphValue

COUNT = 12
pairs = st.lists(st.tuples(st.integers(0, COUNT - 1), st.integers(0, COUNT - 1)), max_size=30)


def naive_sets(count, given_pairs):
    sets = [{number} for number in range(count)]
    for first, second in given_pairs:
        both = next(s for s in sets if first in s) | next(s for s in sets if second in s)
        sets = [s for s in sets if not s & both] + [both]
    return {frozenset(s) for s in sets}


def group_by_representative(count, find):
    sets = {}
    for number in range(count):
        sets.setdefault(find(number), set()).add(number)
    return {frozenset(s) for s in sets.values()}


def union_of(count, given_pairs):
    sets = UnionFind(count)
    for pair in given_pairs:
        sets.union(*pair)
    return sets


def path_to_root(sets, number):
    """Return the numbers that a search for a number's representative visits."""
    path = [number]
    while sets._parent[path[-1]] != path[-1]:
        path.append(sets._parent[path[-1]])
    return path


@settings(max_examples=300, deadline=None, derandomize=True)
@given(pairs)
def test_union_find_agrees_with_the_naive_sets(given_pairs):
    assert group_by_representative(COUNT, union_of(COUNT, given_pairs).find) == naive_sets(COUNT, given_pairs)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(pairs)
def test_paths_are_logarithmic_and_a_search_compresses_them(given_pairs):
    sets = union_of(COUNT, given_pairs)
    for number in range(COUNT):
        size = sum(sets.find(other) == sets.find(number) for other in range(COUNT))
        assert len(path_to_root(union_of(COUNT, given_pairs), number)) - 1 <= math.log2(size)
        assert len(path_to_root(sets, number)) <= 2


def test_a_search_compresses_the_path_of_every_number_it_visits():
    """Merging sets of equal size in pairs gives the longest possible paths: each merge adds one step."""
    pairs_of_equals = [(at, at + step) for step in (1, 2, 4, 8) for at in range(0, 16, 2 * step)]
    sets = union_of(16, pairs_of_equals)
    farthest = max(range(16), key=lambda number: len(path_to_root(sets, number)))
    path = path_to_root(union_of(16, pairs_of_equals), farthest)
    sets.find(farthest)
    assert all(len(path_to_root(sets, number)) <= 2 for number in path)


def chain(count, *, backwards):
    links = [(number, number + 1) for number in range(count - 1)]
    return links[::-1] if backwards else links


@pytest.mark.parametrize("backwards", [False, True])
def test_a_long_chain_is_one_set(backwards):
    count = 200_000
    sets = union_of(count, chain(count, backwards=backwards))
    assert {sets.find(number) for number in range(count)} == {sets.find(0)}


def test_a_map_to_roots_without_following_chains_is_not_enough():
    """A fork of Caffe mapped each blob to its root, which becomes stale when the root gets a root."""
    links = chain(6, backwards=True)  # 5 shares with 4, then 4 with 3, ...
    root = {}
    for first, second in links:
        root[second] = root.get(first, first)
    assert len(group_by_representative(6, lambda number: root.get(number, number))) > 1
    assert len(group_by_representative(6, union_of(6, links).find)) == 1


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


def test_the_example_of_the_module_docstring():
    own = [found for found in alias_sets(Dataflow(PICTURE, LINKS)) if not found.given]
    assert [(found.names, found.begin, found.end, found.size) for found in own] == [
        (("linear", "split[0]", "split[1]", "add_"), 1, 5, 512)
    ]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)])
def test_the_order_of_pairs_does_not_matter(order):
    reordered = Dataflow(PICTURE, tuple(LINKS[index][::-1] for index in order))
    assert alias_sets(reordered) == alias_sets(Dataflow(PICTURE, LINKS))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(pairs)
def test_alias_sets_agree_with_the_naive_sets(given_pairs):
    values = tuple(value(str(number), number, number + 1) for number in range(COUNT))
    sets = alias_sets(Dataflow(values, tuple(given_pairs)))
    assert {frozenset(map(int, found.names)) for found in sets} == naive_sets(COUNT, given_pairs)


def test_the_size_of_a_set_is_the_largest_of_its_values():
    grown = (value("a", 0, 2, 512), value("resize_", 1, 3, 2048), value("b", 2, 3, 4))
    sizes = [found.size for found in alias_sets(Dataflow(grown, ((0, 1),)))]
    assert sizes == [2048, 4]


@pytest.mark.parametrize("index", range(3))
def test_a_set_with_a_given_value_is_given(index):
    values = [value(name, at, at + 2) for at, name in enumerate("abc")]
    values[index] = replace(values[index], given=True)
    assert [found.given for found in alias_sets(Dataflow(tuple(values), ((0, 1), (1, 2))))] == [True]


def test_a_late_use_of_one_value_keeps_its_whole_set():
    values = (value("a", 0, 9), value("view", 1, 2))
    (found,) = alias_sets(Dataflow(values, ((0, 1),)))
    assert (found.begin, found.end) == (0, 9)
