"""Search for the best packing within a given time, and report how close to optimal it is."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from memfit.errors import MemfitError, UsageError
from memfit.packing import exhaustive_search
from memfit.packing.buffer_lifetimes import Buffers, Column, LifetimeSections, lifetime_sections
from memfit.packing.c_packers import place_greedily
from memfit.packing.packing_violations import find_packing_violation

_CLOSE_ENOUGH = 1000
"""A packing above the bound by less than one part in this many is not improved further."""
ORDERS: dict[str, Callable[[Buffers], tuple[npt.NDArray[np.number], ...]]] = {
    "size": lambda b: (b.size, b.upper - b.lower),
    "area": lambda b: (b.size * (b.upper - b.lower).astype(np.float64), b.size),
    "length": lambda b: (b.upper - b.lower, b.size),
    "start": lambda b: (-b.lower, b.size),
}
"""Sort keys of each order in which the greedy packers place buffers, largest first."""


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Buffers with the offset of each."""

    buffers: Buffers
    offset: Column
    height: int
    """Where the highest buffer ends: the memory that the packing needs."""
    bound: int
    """No packing is smaller: the peak of what is live at once, or a higher value if that is proved."""
    how: str
    """The packer that found it."""

    @property
    def parts(self) -> tuple[tuple[Buffers, Column], ...]:
        """The buffers and their offsets, as the only part."""
        return ((self.buffers, self.offset),)

    @property
    def live(self) -> int:
        """The peak of what is live at once."""
        return lifetime_sections(self.buffers).bound

    @property
    def unshared(self) -> int:
        """The sum of all sizes: the height if no buffers shared memory."""
        return int(self.buffers.size.sum())


def pack_buffers(
    buffers: Buffers,
    capacity: int | None = None,
    *,
    seconds: float = 10.0,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Packing:
    """Pack buffers into as little memory as possible.

    Args:
        buffers: at least one.
        capacity: a height that is good enough: the search stops there. None: search for the smallest.
        seconds: time limit, after which the best packing found so far is returned; at least one greedy
            packer always runs.
        on_progress: called with a description of each attempt.

    Returns:
        The best packing found, after validation. Its height may exceed the capacity: no packing fits if the
        capacity is below ``bound``; otherwise the search did not find one.

    >>> two = Buffers(np.array([0, 1]), np.array([2, 3]), np.array([4, 4]), ("a", "b"))
    >>> pack_buffers(two).height
    8
    """
    if not seconds >= 0:  # rejects NaN, too
        raise UsageError(f"The search time must be 0 seconds or more, not {seconds}.")
    deadline = time.monotonic() + seconds
    cut = lifetime_sections(buffers)
    always = always_live_mask(cut)
    is_large = len(buffers) - int(always.sum()) > exhaustive_search.MAX_BUFFERS
    if is_large:  # too large to be searched unless it splits into parts
        always = countable_as_always_live_mask(cut, buffers.size)
    base = int(buffers.size[always].sum())
    offset = np.where(always, np.cumsum(np.where(always, buffers.size, 0)) - buffers.size, base)
    best = Packing(buffers, offset, base, base, "one above the other")
    if not always.all():
        room = None if capacity is None else max(capacity - base, 0)
        above = _pack_parts(
            buffers.where(~always), independent_packing_parts(cut, always), room, deadline, on_progress
        )
        offset[~always] += above.offset
        bound = cut.bound if is_large else base + above.bound
        best = Packing(buffers, offset, base + above.height, bound, above.how)
    violation = find_packing_violation(buffers, best.offset, best.height)
    if violation:  # a bug in a packer, which must not corrupt the memory of those who use the offsets
        raise MemfitError(
            f"Internal error: packer {best.how!r} returned an invalid packing ({violation}). "
            "Please report this."
        )
    return best


def _pack_parts(
    buffers: Buffers,
    part: Column,
    capacity: int | None,
    deadline: float,
    on_progress: Callable[[str], None],
) -> Packing:
    """Pack the buffers of several parts, which use the same memory one after another."""
    cut = lifetime_sections(buffers)
    bound, enough = cut.bound, max(capacity or 0, cut.bound)
    now, searchable = time.monotonic(), np.bincount(part).max() <= exhaustive_search.MAX_BUFFERS
    greedy_until = now + (deadline - now) / 2 if searchable else deadline  # the rest is for the search
    offset, hows = _pack_greedily(buffers, cut, part, enough, greedy_until, on_progress)
    heights = _heights(buffers, offset, part)
    search = _search_smallest if capacity is None else _search_capacity
    solved: dict[bytes, Packing] = {}
    too_high = [index for index in np.argsort(-heights).tolist() if heights[index] > enough]
    for left, index in zip(range(len(too_high), 0, -1), too_high, strict=True):
        inside = part == index
        members = buffers.where(inside)
        if heights[index] <= enough or len(members) > exhaustive_search.MAX_BUFFERS:
            continue
        begin = members.lower.min()
        shape = np.stack([members.lower - begin, members.upper - begin, members.size]).tobytes()
        if shape not in solved:
            now = time.monotonic()
            part_cut = lifetime_sections(members)
            greedy_packing = _packing(members, offset[inside], part_cut.bound, str(hows[index]))
            until = now + (deadline - now) / left
            solved[shape] = search(greedy_packing, part_cut, enough, until, on_progress)
        found = solved[shape]
        offset[inside], heights[index], hows[index] = found.offset, found.height, found.how
        bound = max(bound, found.bound)
        enough = max(enough, found.height)  # no part need be smaller than the highest one
    return _packing(buffers, offset, bound, str(hows[np.argmax(heights)]))


def _pack_greedily(
    buffers: Buffers,
    cut: LifetimeSections,
    part: Column,
    enough: int,
    deadline: float,
    on_progress: Callable[[str], None],
) -> tuple[Column, npt.NDArray[np.object_]]:
    """Return the best greedy packing of each part, stopping once all parts are within ``enough``."""
    best = np.zeros(len(buffers), np.int64)
    heights = np.full(int(part.max()) + 1, np.iinfo(np.int64).max)
    hows = np.full(len(heights), "", object)
    for how, offset in greedy_packings(buffers, cut, deadline):
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


def _search_smallest(
    best: Packing, cut: LifetimeSections, bound: int, deadline: float, on_progress: Callable[[str], None]
) -> Packing:
    """Search for the smallest packing: first at the bound, then by bisection between the bound and the best.

    Each search gets half of the time left: at the bound it may never end, and slightly above it be easy.
    """
    target, out_of_reach = bound, bound
    while best.height > target and time.monotonic() < deadline:
        now = time.monotonic()
        best = _search_capacity(best, cut, target, now + (deadline - now) / 2, on_progress)
        if best.height > target:
            out_of_reach = target
        if (best.height - out_of_reach - 1) * _CLOSE_ENOUGH <= out_of_reach:
            break
        target = max(bound, (out_of_reach + best.height) // 2)
    return best


def _search_capacity(
    best: Packing, cut: LifetimeSections, capacity: int, deadline: float, on_progress: Callable[[str], None]
) -> Packing:
    """Search for a packing within a capacity; return the best one known, with the bound raised if proved."""

    def report(nodes: int) -> None:
        on_progress(f"search for {capacity:,} · {nodes:,} nodes")

    found = exhaustive_search.search_packing_within_capacity(best.buffers, cut, capacity, deadline, report)
    if found.offset is not None:
        return _packing(best.buffers, found.offset, best.bound, "by search")
    return replace(best, bound=capacity + 1) if found.is_infeasible else best


def _packing(buffers: Buffers, offset: Column, bound: int, how: str) -> Packing:
    return Packing(buffers, offset, int((offset + buffers.size).max()), bound, how)


def greedy_packings(buffers: Buffers, cut: LifetimeSections, deadline: float) -> Iterator[tuple[str, Column]]:
    """Yield the name and the offsets of the packing for each order and each choice of gap.

    Buffers are placed one after another into gaps between those already placed. Real graphs are easy: on
    nearly all of them, one of these packings is within half a percent of the bound.

    The first packing is yielded whatever the deadline (``time.monotonic``).
    """
    first = True
    for name, keys in ORDERS.items():
        order = np.lexsort([-key for key in reversed(keys(buffers))])
        for gap in ("lowest", "tightest"):
            until = float("inf") if first else deadline
            offset = place_greedily(buffers, cut, order, tightest=gap == "tightest", deadline=until)
            if offset is None:
                return
            yield f"by {name}, {gap} gap", offset
            first = False


def independent_packing_parts(cut: LifetimeSections, always: npt.NDArray[np.bool_]) -> Column:
    """Return the part, from 0, of each buffer that is not always live: parts are packed independently.

        │ part 0  │ part 1 │ part 2  │     no buffer is live in two parts
        ├─────────┴────────┴─────────┤
        │ always live                │     can be placed at the bottom, because it overlaps every other buffer
        └────────────────────────────┘

    Consecutive forward passes share only the weights: each pass is a part, and all parts look alike. So are
    the micro-batches of a step that accumulates gradients, once the gradients are treated as always live: see
    ``countable_as_always_live_mask``.

    Args:
        cut: the sections of the buffers.
        always: mask of the buffers at the bottom: from ``always_live_mask``, or
            ``countable_as_always_live_mask``.

    >>> from memfit.packing.buffer_lifetimes import Buffers, lifetime_sections
    >>> rows = Buffers(np.array([0, 0, 3, 4]), np.array([9, 3, 5, 9]), np.array([4, 2, 1, 1]), tuple("abcd"))
    >>> cut = lifetime_sections(rows)
    >>> independent_packing_parts(cut, always_live_mask(cut)).tolist()
    [0, 1, 1]
    """
    first, last = cut.first[~always], cut.last[~always]
    # A buffer connects each of its sections, but the first, with the section before. In circular time it may
    # extend beyond the last section: it is then counted in the second half, which is folded onto the first.
    change = np.zeros(2 * cut.count + 1, np.int64)
    np.add.at(change, first + 1, 1)
    np.add.at(change, last, -1)
    connections = np.cumsum(change)[:-1].reshape(2, cut.count).sum(axis=0)
    begins = np.flatnonzero(connections == 0)
    # A buffer that begins before the first part does belongs to the last one, which wraps around.
    inside = (np.searchsorted(begins, first, "right") - 1) % max(len(begins), 1)
    return np.unique(inside, return_inverse=True)[1]


def always_live_mask(cut: LifetimeSections) -> npt.NDArray[np.bool_]:
    """Return a mask of the buffers that are live in every section."""
    return cut.last - cut.first >= cut.count


def countable_as_always_live_mask(cut: LifetimeSections, size: Column) -> npt.NDArray[np.bool_]:
    """Return a mask of the buffers that are always live, or can count as such without raising the bound.

    A packing for extended lifetimes is valid for the real ones, too; that no such packing exists proves
    nothing. Buffers live in more than half of all sections are tried, the longest-lived first.
    """
    always, live = always_live_mask(cut), cut.live.copy()
    length = cut.last - cut.first
    for index in np.argsort(-length, kind="stable").tolist():
        first, last = int(cut.first[index]), int(cut.last[index])
        if always[index]:
            continue
        if 2 * (last - first) <= cut.count:
            break
        absent = (slice(max(last - cut.count, 0), first), slice(last, None))
        if all(live[span].max(initial=0) + size[index] <= cut.bound for span in absent):
            always[index] = True
            for span in absent:
                live[span] += size[index]
    return always
