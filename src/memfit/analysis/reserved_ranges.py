"""Reserved memory as address ranges with lifetimes."""

from dataclasses import dataclass, replace

import numpy as np

from memfit.allocator.block_and_segment_sizes import SMALL_SEGMENT
from memfit.allocator.block_tracker import BlockTracker
from memfit.allocator.config import AllocatorConfig
from memfit.allocator.free_ranges import EXPANDABLE
from memfit.allocator.reconstruct_initial_state import InitialAllocatorState, reconstruct_initial_state
from memfit.analysis.fragmentation import blocks_by_segment
from memfit.records import Action, Trace


@dataclass(frozen=True, slots=True)
class ReservedRange:
    """The addresses ``[start, stop)``, reserved after event ``born`` until event ``freed``."""

    start: int
    stop: int
    born: int
    """-1 if before the history."""
    freed: int
    """The number of events if it is never released."""
    small: bool
    """Whether it belongs to the pool for requests up to 1 MiB."""
    expandable: bool


def reserves_in_segments(trace: Trace) -> bool:
    """Return whether the allocator of the run reserved memory in segments, which its history then records."""
    return AllocatorConfig.read(trace.settings).has_segments


def reserved_ranges_of_trace(trace: Trace) -> list[ReservedRange]:
    """Return all reserved ranges by ``born``; none for an allocator without segments."""
    config = AllocatorConfig.read(trace.settings)
    if not config.has_segments:
        return []
    events, never = trace.events, len(trace.events)
    live = {one.start: one for one in _first(trace, config, reconstruct_initial_state(trace, config))}
    gone: list[ReservedRange] = []
    for event in np.flatnonzero(
        (events.action >= Action.SEGMENT_ALLOC) & (events.action <= Action.SEGMENT_UNMAP)
    ).tolist():
        action, start = Action(events.action[event]), int(events.address[event])
        stop = start + int(events.size[event])
        if action in (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP):
            live[start] = ReservedRange(
                start, stop, event, never,
                stop - start == SMALL_SEGMENT,  # segments of the large pool have at least 10 MiB
                action is Action.SEGMENT_MAP,
            )  # fmt: skip
            continue
        # cudaFree releases a whole segment; an unmap may cut through ranges mapped at different times.
        whole = live.get(start)
        if whole is not None and whole.stop == stop:
            hit = [whole]
        else:
            hit = [one for one in live.values() if one.start < stop and start < one.stop]
        for one in hit:
            del live[one.start]
            gone.append(replace(one, freed=event))
            for left in ((one.start, start), (stop, one.stop)):
                if left[0] < left[1]:
                    live[left[0]] = replace(one, start=left[0], stop=left[1], born=event)
    return sorted((*gone, *live.values()), key=lambda one: (one.born, one.start))


def _first(trace: Trace, config: AllocatorConfig, start: InitialAllocatorState) -> list[ReservedRange]:
    """Return the ranges reserved before the first event."""
    if not start.reserved:
        return []
    pieces = BlockTracker(trace.events, config, start).blocks()
    return [
        ReservedRange(
            one[0].start, one[-1].stop, -1, len(trace.events),
            one[-1].stop - one[0].start == SMALL_SEGMENT, one[0].segment == EXPANDABLE,
        )
        for one in blocks_by_segment(pieces)
    ]  # fmt: skip
