"""Which ranks of a job differ: run few of them, and find those that hold the same.

    first machine   machines between                           last machine
    0 1 2 3 4 5 6 7 ....... only where the two ends differ ... 1016 .. 1023     1,024 ranks, 8 on each machine
    run             bisected, each GPU by itself               run

A rank between two ranks that hold the same, on the same GPU of its machine, is assumed to hold the same.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from memfit.records import DryRun, EquivalentRanks, PeakRange

Held = TypeVar("Held")


def find_what_ranks_hold(nproc: int, nnodes: int, run: Callable[[int], Held]) -> dict[int, Held]:
    """Return what every rank holds.

    Args:
        nproc: ranks on each machine.
        nnodes: machines.
        run: runs a rank, and returns what it holds. Called at most once for each rank.

    >>> asked = []
    >>> def first_machine_holds_more(rank):
    ...     asked.append(rank)
    ...     return rank < 2
    >>> held = find_what_ranks_hold(2, 64, first_machine_holds_more)
    >>> sum(held.values()), len(held), len(asked)
    (2, 128, 14)
    """
    held: dict[int, Held] = {}
    last = nnodes - 1
    for machine in sorted({0, last}):
        held |= {rank: run(rank) for rank in range(machine * nproc, (machine + 1) * nproc)}
    for local in range(nproc):
        pending = [(0, last)]
        while pending:
            start, end = pending.pop()
            first, between = held[start * nproc + local], range(start + 1, end)
            if between and first != held[end * nproc + local]:
                middle = (start + end) // 2
                held[middle * nproc + local] = run(middle * nproc + local)
                pending += [(start, middle), (middle, end)]
            else:
                held |= {machine * nproc + local: first for machine in between}
    return dict(sorted(held.items()))


def what_one_rank_holds(rank: int, result: DryRun) -> EquivalentRanks:
    """Return what a rank holds, from its run."""
    process = _bytes_needed(result) if result.ran_out else result.peak_process.bytes
    return EquivalentRanks(
        rank=rank,
        also=(),
        peak=result.range or PeakRange.exactly(result.peak_allocated, result.peak_reserved, process),
        verdict=result.verdict,
        place=result.peak_place,
    )


def rank_run_sort_key(result: DryRun) -> tuple[bool, int]:
    """Return what to compare the runs of two ranks by: one that failed is worse than one that needs more."""
    return result.verdict == "unknown", _bytes_needed(result)


def _bytes_needed(result: DryRun) -> int:
    """Return the bytes that a rank's process needs, as far as they are known."""
    return (result.needs or result.peak_process).bytes


def group_equivalent_ranks(ranks: Iterable[tuple[int, EquivalentRanks]]) -> tuple[EquivalentRanks, ...]:
    """Group ranks that hold the same; one that failed comes first, then the one that needs most.

    Args:
        ranks: every rank of the job with the role that was found for it, in order.
    """
    found: dict[EquivalentRanks, list[int]] = {}
    for rank, role in ranks:
        found.setdefault(replace(role, rank=0), []).append(rank)
    roles = [replace(role, rank=first, also=tuple(also)) for role, (first, *also) in found.items()]
    roles.sort(key=lambda role: (role.verdict != "unknown", -role.peak.process.most, role.rank))
    return tuple(roles)
