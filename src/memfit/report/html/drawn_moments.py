"""Which moments and which blocks of a run are drawn one by one, and the sums of the rest.

A page draws so many blocks and no more. Of a longer trace it draws those that are alive at the peak and
then those with the most bytes times events; the moments are the events that move these. What all other
blocks hold is added up at each of those moments, so that no total is ever short.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memfit.records import Action, Timeline, Trace
from memfit.report.html.block_columns import EARLIER, BlockColumns, Numbers
from memfit.report.html.reserved_ranges import ReservedRange

MOST_BLOCKS = 100_000
"""How many blocks a page draws one by one."""


@dataclass(frozen=True, slots=True)
class CombinedBlocks:
    """How what is drawn together changes, as columns of equal length, by moment."""

    moment: Numbers
    category: Numbers
    requested: Numbers
    """Bytes more or, if negative, fewer."""
    size: Numbers


@dataclass(frozen=True, slots=True)
class Drawing:
    """What a page draws. A block is alive at moment ``k`` if ``born <= k < freed``, all three moments."""

    events: Numbers
    """Of each moment the event just after which it is."""
    blocks: BlockColumns
    """Born, freed and done count moments here; the number of moments stands for never."""
    old: int
    """How many of them, the first ones, are older than the history."""
    rest: CombinedBlocks
    together: int
    """How many blocks are drawn together."""


def drawn(
    trace: Trace,
    line: Timeline,
    blocks: BlockColumns,
    ranges: list[ReservedRange],
    also: Sequence[int] = (),
    most: int = MOST_BLOCKS,
) -> Drawing:
    """Choose what is drawn one by one.

    Args:
        trace: what was recorded.
        line: its timeline.
        blocks: all of its blocks.
        ranges: all of its reserved memory.
        also: events that are moments in any case.
        most: so many blocks at most.
    """
    count = len(trace.events)
    if not count:
        nothing = np.zeros(0, np.int64)
        return Drawing(nothing, blocks[nothing], 0, CombinedBlocks(nothing, nothing, nothing, nothing), 0)
    peak = int(np.argmax(line.allocated))
    chosen = _chosen(blocks, peak, most)
    kept = blocks[chosen]
    events = np.unique(
        np.concatenate((
            kept.born, kept.freed, kept.done,
            np.array([event for one in ranges for event in (one.born, one.freed)], np.int64),
            np.flatnonzero(trace.events.action == Action.OOM),
            np.array([mark.position - 1 for mark in trace.marks], np.int64),
            [peak, int(np.argmax(line.reserved)), count - 1], np.array(also, np.int64),
        ))
    )  # fmt: skip
    # What is older than the history is told before it, one event each, and is all there when it begins.
    begin = max(int((trace.events.action == Action.EARLIER).sum()) - 1, 0)
    events = np.unique(np.maximum(events[(events >= 0) & (events < count)], begin))
    return Drawing(
        events=events,
        blocks=_in_moments(kept, events),
        old=int((kept.born < 0).sum()),
        rest=_rest(_in_moments(blocks[~chosen], events)),
        together=int((~chosen).sum()),
    )


def _chosen(blocks: BlockColumns, peak: int, most: int) -> npt.NDArray[np.bool_]:
    chosen = np.ones(len(blocks), bool)
    if len(blocks) > most:
        at_peak = (blocks.born <= peak) & (peak < blocks.freed)
        weight = blocks.size * (blocks.freed - blocks.born).astype(float)
        chosen[np.lexsort((-weight, ~at_peak))[most:]] = False
    return chosen


def _in_moments(blocks: BlockColumns, events: Numbers) -> BlockColumns:
    """Count in moments: a change is seen at the first moment that is not before it."""
    columns = {name: getattr(blocks, name) for name in blocks.__slots__}
    return BlockColumns(
        **columns | {name: np.searchsorted(events, columns[name]) for name in ("born", "freed", "done")}
    )


def _rest(blocks: BlockColumns) -> CombinedBlocks:
    """Add up what blocks hold, from moment to moment."""
    seen = blocks[blocks.born < blocks.freed]  # the others come and go between two moments
    kinds = EARLIER + 1
    key = np.concatenate((seen.born, seen.freed)) * kinds + np.tile(seen.category, 2)
    keys, place = np.unique(key, return_inverse=True)
    sign = np.repeat((1, -1), len(seen))

    def summed(column: Numbers) -> Numbers:
        sums = np.zeros(len(keys), np.int64)
        np.add.at(sums, place.reshape(-1), sign * np.tile(column, 2))
        return sums

    return CombinedBlocks(
        moment=keys // kinds,
        category=keys % kinds,
        requested=summed(seen.requested),
        size=summed(seen.size),
    )
