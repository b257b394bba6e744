"""Choose the moments and the blocks that a page draws individually, and sum up the other blocks.

A page draws a limited number of blocks. Of a longer trace, it draws the blocks live at the peak, then those
with the most bytes times events. The moments are the events that change them. All other blocks are summed
at each of those moments, so that totals are always exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memfit.analysis.block_columns import EARLIER, BlockColumns, Numbers
from memfit.analysis.peak_outside_failed_attempts import (
    failed_allocation_events,
    peak_event_outside_failed_attempts,
)
from memfit.analysis.reserved_ranges import ReservedRange
from memfit.records import Action, MarkKind, Timeline, Trace

MOST_BLOCKS = 100_000
"""Number of blocks that a page draws individually."""


@dataclass(frozen=True, slots=True)
class _CombinedBlocks:
    """Changes of the blocks that are drawn together, as columns of equal length, sorted by moment."""

    moment: Numbers
    category: Numbers
    requested: Numbers
    """Change in bytes; negative for a decrease."""
    size: Numbers


@dataclass(frozen=True, slots=True)
class DrawnTimeline:
    """What a page draws. A block is live at moment ``k`` if ``born <= k < freed``, counted in moments."""

    events: Numbers
    """For each moment, the event that it follows."""
    blocks: BlockColumns
    """Here born, freed and done count moments; the number of moments means never."""
    old: int
    """Number of blocks older than the history; they come first."""
    rest: _CombinedBlocks
    together: int
    """Number of blocks that are drawn together."""


def choose_drawn_blocks(
    trace: Trace,
    line: Timeline,
    blocks: BlockColumns,
    ranges: list[ReservedRange],
    also: Sequence[int] = (),
    most: int = MOST_BLOCKS,
) -> DrawnTimeline:
    """Choose the blocks that are drawn individually, and the moments."""
    count = len(trace.events)
    if not count:
        nothing = np.zeros(0, np.int64)
        return DrawnTimeline(
            nothing, blocks[nothing], 0, _CombinedBlocks(nothing, nothing, nothing, nothing), 0
        )
    peak = peak_event_outside_failed_attempts(trace, line)
    chosen = _chosen(blocks, peak, most)
    kept = blocks[chosen]
    events = np.unique(
        np.concatenate((
            kept.born, kept.freed, kept.done,
            np.array([event for one in ranges for event in (one.born, one.freed)], np.int64),
            failed_allocation_events(trace),
            np.array([m.position - 1 for m in trace.marks if m.kind is not MarkKind.SIZE_BOUND], np.int64),
            [peak, int(np.argmax(line.reserved)), count - 1], np.array(also, np.int64),
        ))
    )  # fmt: skip
    # EARLIER events, one for each older block, come first: the first moment is after the last of them.
    begin = max(int((trace.events.action == Action.EARLIER).sum()) - 1, 0)
    events = np.unique(np.maximum(events[(events >= 0) & (events < count)], begin))
    return DrawnTimeline(
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
    """Convert events to moments: a change shows at the first moment that is not before it."""
    columns = {name: getattr(blocks, name) for name in blocks.__slots__}
    return BlockColumns(
        **columns | {name: np.searchsorted(events, columns[name]) for name in ("born", "freed", "done")}
    )


def _rest(blocks: BlockColumns) -> _CombinedBlocks:
    """Sum the changes of blocks at each moment."""
    seen = blocks[blocks.born < blocks.freed]  # the others exist only between two moments
    kinds = EARLIER + 1
    key = np.concatenate((seen.born, seen.freed)) * kinds + np.tile(seen.category, 2)
    keys, place = np.unique(key, return_inverse=True)
    sign = np.repeat((1, -1), len(seen))

    def summed(column: Numbers) -> Numbers:
        sums = np.zeros(len(keys), np.int64)
        np.add.at(sums, place.reshape(-1), sign * np.tile(column, 2))
        return sums

    return _CombinedBlocks(
        moment=keys // kinds,
        category=keys % kinds,
        requested=summed(seen.requested),
        size=summed(seen.size),
    )
