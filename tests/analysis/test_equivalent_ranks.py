"""Which ranks of a job are run, and how those that hold the same are listed."""

from dataclasses import replace

import pytest

from memfit.analysis.equivalent_ranks import find_what_ranks_hold, group_equivalent_ranks
from memfit.records import ByteRange, EquivalentRanks, PeakRange, ScriptLocation
from memfit.report.places_in_words import format_ranks

PEAK = PeakRange(*[ByteRange(1, 2)] * 3)
ROLE = EquivalentRanks(0, (), PEAK, "fits", ScriptLocation(1, "forward", "", "", "a.py:1"))


@pytest.mark.parametrize(
    ("nproc", "nnodes", "held_by"),
    [
        (8, 1, lambda rank: rank),
        (8, 128, lambda rank: 0),
        (8, 128, lambda rank: (rank == 0) + 2 * (rank == 1023)),
        (4, 37, lambda rank: rank * 16 // 148),  # sixteen pipeline stages over 37 machines
        (2, 3, lambda rank: rank == 5),
    ],
)
def test_every_rank_has_what_it_holds_and_none_runs_twice(nproc, nnodes, held_by):
    ran = []

    def run(rank):
        ran.append(rank)
        return held_by(rank)

    assert find_what_ranks_hold(nproc, nnodes, run) == {rank: held_by(rank) for rank in range(nproc * nnodes)}
    assert len(set(ran)) == len(ran)
    assert {*range(nproc), *range(nproc * (nnodes - 1), nproc * nnodes)} <= set(ran)


def test_ranks_that_differ_only_between_equal_machines_are_missed():
    held = find_what_ranks_hold(1, 9, lambda rank: rank == 4)
    assert not any(held.values())  # the note of --all-ranks says that memfit assumes it


def test_machines_that_are_alike_are_run_once_at_each_end():
    ran = []
    find_what_ranks_hold(8, 128, ran.append)
    assert sorted(ran) == [*range(8), *range(1016, 1024)]


def test_roles_are_listed_by_what_they_need():
    more = replace(ROLE, peak=replace(PEAK, process=ByteRange(1, 3)))
    roles = group_equivalent_ranks([(0, ROLE), (1, more), (2, ROLE), (3, ROLE)])
    assert [(role.rank, role.also) for role in roles] == [(1, ()), (0, (2, 3))]


def test_neighbouring_ranks_are_written_as_a_range():
    assert format_ranks((7,)) == "7"
    assert format_ranks((0, 1, 2, 9, 11, 12)) == "0-2, 9, 11-12"
