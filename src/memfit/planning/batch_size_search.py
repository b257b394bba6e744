"""The largest batch that fits, found in few runs: memory is nearly a line in the number of samples."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from memfit.records import PlanRun, Term

_FIXED = ("parameters", "gradients", "optimizer state", "buffers")
"""Terms of the summary that do not depend on the batch."""
_FARTHEST = 16
"""How many times the largest batch that fits the next one may be: a line is not trusted farther."""
_FLAT = 8
"""The same, where memory did not grow with the batch."""
_PATIENT = 6
"""Runs after which every other one halves what is left, whatever the line says."""


@dataclass(frozen=True, slots=True)
class SizedRun:
    """What a run with a batch of some size needs."""

    size: int
    needs: int
    """Bytes."""
    fits: bool


def next_size(
    runs: Sequence[SizedRun], sizes: Sequence[int], room: int, *, fixed: int, proven: bool
) -> int | None:
    """Return the batch size to run next; None if the largest that fits is known.

    It lies above the largest size that fits and below the smallest that does not, where the line through
    two runs reaches the room.

    Args:
        runs: those made so far, at least one. Their sizes need not be among ``sizes``.
        sizes: what to choose from, in ascending order.
        room: bytes that a run may need.
        fixed: bytes that do not depend on the batch, for the first guess.
        proven: whether the next larger size must have run out of memory; otherwise the line's word is enough.

    >>> next_size([SizedRun(4, 500, True)], range(1, 1000), 1000, fixed=100, proven=True)
    9
    >>> runs = [SizedRun(4, 500, True), SizedRun(9, 950, True), SizedRun(10, 1040, False)]
    >>> next_size(runs, range(1, 1000), 1000, fixed=100, proven=True) is None
    True
    """
    low = max((run for run in runs if run.fits), key=_size, default=None)
    high = min(
        (run for run in runs if not run.fits and (low is None or run.size > low.size)),
        key=_size,
        default=None,
    )
    first = bisect_right(sizes, low.size) if low is not None else 0
    last = bisect_left(sizes, high.size) if high is not None else len(sizes)
    if first >= last:
        return None
    likely = bisect_right(sizes, _crossing(runs, low, high, room, fixed)) - 1
    if likely < first and low is not None and not proven:
        return None
    return sizes[min(max(likely, first), last - 1)]


def _crossing(
    runs: Sequence[SizedRun], low: SizedRun | None, high: SizedRun | None, room: int, fixed: int
) -> float:
    """Return the size at which a run likely needs all of the room."""
    if low is not None and high is not None:
        if len(runs) >= _PATIENT and len(runs) % 2 == 0:
            return (low.size + high.size) / 2
        return _line(low, high, room, flat=(low.size + high.size) / 2)
    none = SizedRun(0, fixed, fits=True)
    if low is not None:
        before = max((run for run in runs if run.size < low.size), key=_size, default=none)
        return min(_line(before, low, room, flat=_FLAT * low.size), _FARTHEST * low.size)
    smallest, *above = sorted(runs, key=_size)
    return _line(smallest, above[0], room, flat=0) if above else _line(none, smallest, room, flat=0)


def _line(one: SizedRun, other: SizedRun, room: int, *, flat: float) -> float:
    """Return where the line through two runs reaches the room; ``flat`` if it does not rise."""
    rise = other.needs - one.needs
    return one.size + (room - one.needs) * (other.size - one.size) / rise if rise > 0 else flat


def _size(run: SizedRun) -> int:
    return run.size


def fixed_bytes(terms: Sequence[Term]) -> int:
    """Return the bytes at the peak of a run that do not depend on the batch."""
    return sum(term.figure.bytes for term in terms if term.name in _FIXED)


def least_with_smaller_batches(run: PlanRun) -> int:
    """Return the bytes of the process at the peak of a run that do not depend on the batch."""
    return run.needs.bytes - run.reserved.bytes + fixed_bytes(run.terms)
