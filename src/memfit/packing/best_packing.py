"""The best packing that is found in a given time, and how good it is."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from memfit.errors import MemfitError, UsageError
from memfit.packing import exhaustive_search, greedy
from memfit.packing.buffers import Buffers, Column, Sections, sections
from memfit.packing.exhaustive_search import Answer
from memfit.packing.partition import apart, lives_always, stretched
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
    def live(self) -> int:
        """What lives at once, at most."""
        return sections(self.buffers).bound

    @property
    def unshared(self) -> int:
        """What it would be if each buffer had memory of its own."""
        return int(self.buffers.size.sum())

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

    Raises:
        UsageError: ``seconds`` is no time.

    >>> two = Buffers(np.array([0, 1]), np.array([2, 3]), np.array([4, 4]), ("a", "b"))
    >>> pack(two).height
    8
    """
    if not seconds >= 0:  # nan is none, either
        raise UsageError(f"The time to look must be 0 seconds or more, not {seconds}.")
    deadline = time.monotonic() + seconds
    cut = sections(buffers)
    always = lives_always(cut)
    is_large = len(buffers) - int(always.sum()) > exhaustive_search.MOST
    if is_large:  # to be searched at all, it has to come apart
        always = stretched(cut, buffers.size)
    base = int(buffers.size[always].sum())
    offset = np.where(always, np.cumsum(np.where(always, buffers.size, 0)) - buffers.size, base)
    best = Packing(buffers, offset, base, base, "one above the other")
    if not always.all():
        room = None if capacity is None else max(capacity - base, 0)
        above = _parts(buffers.where(~always), apart(cut, always), room, deadline, on_progress)
        offset[~always] += above.offset
        bound = cut.bound if is_large else base + above.bound
        best = Packing(buffers, offset, base + above.height, bound, above.how)
    fault = wrong(buffers, best.offset, best.height)
    if fault:  # the packers' fault, and whoever uses the offsets must not find out
        raise MemfitError(f"The packing found {best.how} is none: {fault}. Please report this.")
    return best


def _parts(
    buffers: Buffers,
    part: Column,
    capacity: int | None,
    deadline: float,
    on_progress: Callable[[str], None],
) -> Packing:
    """Pack buffers of several parts, which have the same memory one after the other."""
    cut = sections(buffers)
    bound, enough = cut.bound, max(capacity or 0, cut.bound)
    now, searchable = time.monotonic(), np.bincount(part).max() <= exhaustive_search.MOST
    fast_until = now + (deadline - now) / 2 if searchable else deadline  # and what is left is for the search
    offset, hows = _fast(buffers, cut, part, enough, fast_until, on_progress)
    heights = _heights(buffers, offset, part)
    look = _least if capacity is None else _within
    known: dict[bytes, Packing] = {}
    too_high = [one for one in np.argsort(-heights).tolist() if heights[one] > enough]
    for left, one in zip(range(len(too_high), 0, -1), too_high, strict=True):
        inside = part == one
        its = buffers.where(inside)
        if heights[one] <= enough or len(its) > exhaustive_search.MOST:
            continue
        begin = its.lower.min()
        shape = np.stack([its.lower - begin, its.upper - begin, its.size]).tobytes()
        if shape not in known:
            now = time.monotonic()
            its_cut = sections(its)
            greedy_one = _packing(its, offset[inside], its_cut.bound, str(hows[one]))
            until = now + (deadline - now) / left
            known[shape] = look(greedy_one, its_cut, enough, until, on_progress)
        found = known[shape]
        offset[inside], heights[one], hows[one] = found.offset, found.height, found.how
        bound = max(bound, found.bound)
        enough = max(enough, found.height)  # where one part needs as much, no other need be smaller
    return _packing(buffers, offset, bound, str(hows[np.argmax(heights)]))


def _fast(
    buffers: Buffers,
    cut: Sections,
    part: Column,
    enough: int,
    deadline: float,
    on_progress: Callable[[str], None],
) -> tuple[Column, npt.NDArray[np.object_]]:
    """Return for each part the best of the fast packers' packings, or the first that is good enough."""
    best = np.zeros(len(buffers), np.int64)
    heights = np.full(int(part.max()) + 1, np.iinfo(np.int64).max)
    hows = np.full(len(heights), "", object)
    for how, offset in greedy.packings(buffers, cut, deadline):
        on_progress(how)
        found = _heights(buffers, offset, part)
        better = found < heights
        best = np.where(better[part], offset, best)
        heights[better], hows[better] = found[better], how
        if heights.max() <= enough:
            break
    return best, hows


def _heights(buffers: Buffers, offset: Column, part: Column) -> Column:
    """Return where the highest buffer of each part ends."""
    heights = np.zeros(int(part.max()) + 1, np.int64)
    np.maximum.at(heights, part, offset + buffers.size)
    return heights


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

    found = exhaustive_search.find(best.buffers, cut, capacity, deadline, told)
    if found.offset is not None:
        return _packing(best.buffers, found.offset, best.bound, "by search")
    return replace(best, bound=capacity + 1) if found.answer is Answer.INFEASIBLE else best


def _packing(buffers: Buffers, offset: Column, bound: int, how: str) -> Packing:
    return Packing(buffers, offset, int((offset + buffers.size).max()), bound, how)
