"""The best packing that is found in a given time, and how good it is."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from memfit.errors import MemfitError
from memfit.packing import exact, greedy
from memfit.packing.buffers import Buffers, Column, Sections, sections
from memfit.packing.exact import Answer
from memfit.packing.validator import wrong

_CLOSE = 1000
"""A packing that is above the bound by less than this part of it is not improved upon."""


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Offsets for buffers."""

    buffers: Buffers
    offset: Column
    height: int
    """Where the highest buffer ends: the arena's size."""
    bound: int
    """No packing is below: the peak of what lives at once, or more where that is proved."""
    how: str
    """What found it."""

    @property
    def parts(self) -> tuple[tuple[Buffers, Column], ...]:
        """Buffers and their offsets."""
        return ((self.buffers, self.offset),)

    @property
    def is_smallest(self) -> bool:
        """Whether it is proved that none is smaller."""
        return self.height == self.bound


def pack(
    buffers: Buffers,
    capacity: int | None = None,
    *,
    seconds: float = 10.0,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Packing:
    """Pack buffers into as little as is found.

    Args:
        buffers: at least one.
        capacity: that is enough; less is not looked for. None: as little as there can be.
        seconds: after which it ends with the best it has; one fast packer is always run.
        on_progress: called with what is being tried.

    Returns:
        The best packing found, and checked. It may be above the capacity: there is none within it if that is
        below ``bound``, and otherwise none was found.

    >>> two = Buffers(np.array([0, 1]), np.array([2, 3]), np.array([4, 4]), ("a", "b"))
    >>> pack(two).height
    8
    """
    deadline = time.monotonic() + seconds
    cut = sections(buffers)
    enough = max(capacity or 0, cut.bound)
    best = _fast(buffers, cut, enough, deadline, on_progress)
    if best.height > enough and len(buffers) <= exact.MOST:
        look = _within if capacity is not None else _least
        best = look(best, cut, enough, deadline, on_progress)
    fault = wrong(buffers, best.offset, best.height)
    if fault:  # the packers' fault, and whoever uses the offsets must not find out
        raise MemfitError(f"The packing found {best.how} is none: {fault}. Please report this.")
    return best


def _fast(
    buffers: Buffers, cut: Sections, enough: int, deadline: float, on_progress: Callable[[str], None]
) -> Packing:
    """Return the best of the fast packers' packings, or the first that is good enough."""
    found: list[Packing] = []
    for how, offset in greedy.packings(buffers, cut, deadline):
        on_progress(how)
        found.append(_packing(buffers, offset, cut.bound, how))
        if found[-1].height <= enough:
            break
    return min(found, key=lambda packing: packing.height)


def _least(
    best: Packing, cut: Sections, bound: int, deadline: float, on_progress: Callable[[str], None]
) -> Packing:
    """Search for the smallest packing: at the bound, then halfway to it again and again.

    Each search has half of the time that is left: at the bound it may be endless, and a little above it easy.
    """
    target, out_of_reach = bound, bound
    while best.height > target and time.monotonic() < deadline:
        now = time.monotonic()
        best = _within(best, cut, target, now + (deadline - now) / 2, on_progress)
        if best.height > target:
            out_of_reach = target
        if (best.height - out_of_reach - 1) * _CLOSE <= out_of_reach:
            break
        target = max(bound, (out_of_reach + best.height) // 2)
    return best


def _within(
    best: Packing, cut: Sections, capacity: int, deadline: float, on_progress: Callable[[str], None]
) -> Packing:
    """Search for a packing within a capacity; return the best one known, and what was proved."""

    def told(nodes: int) -> None:
        on_progress(f"search for {capacity:,} · {nodes:,} nodes")

    found = exact.find(best.buffers, cut, capacity, deadline, told)
    if found.offset is not None:
        return _packing(best.buffers, found.offset, best.bound, "by search")
    return replace(best, bound=capacity + 1) if found.answer is Answer.INFEASIBLE else best


def _packing(buffers: Buffers, offset: Column, bound: int, how: str) -> Packing:
    return Packing(buffers, offset, int((offset + buffers.size).max()), bound, how)
