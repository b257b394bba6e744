"""Reserved bytes that were not requested: rounding, holes, cached segments, and the blocks that pin holes.

    segment
    |-- live: requested | rounding | unsplit --|---- hole ----|-- awaiting free --|---- hole ----|
                                               pinned by the blocks on either side
    segment
    |---------------------------------- cached -----------------------------------|

Source: ``torch.cuda.memory_snapshot()`` classifies blocks and segments in the same way; the states of a
block, and what ``empty_cache`` can release, are those of c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.14.1.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from heapq import nlargest

import numpy as np

from memfit.allocator.block_and_segment_sizes import SMALL_SEGMENT, SMALL_SIZE, round_size
from memfit.allocator.block_tracker import FREE, LIVE, PENDING, BlockSnapshot, BlockTracker
from memfit.allocator.config import AllocatorConfig
from memfit.allocator.free_ranges import EXPANDABLE
from memfit.allocator.reconstruct_initial_state import reconstruct_initial_state
from memfit.allocator.timeline import memory_timeline
from memfit.analysis.event_locations import script_location_at, worst_provenance_of_notes
from memfit.analysis.peak_outside_failed_attempts import peak_event_outside_failed_attempts
from memfit.errors import FileFormatError, UsageError
from memfit.records import (
    Action,
    Category,
    Fragmentation,
    Hole,
    Phase,
    PinningBlock,
    Provenance,
    ReservedBytes,
    ReservedMemoryUse,
    ScriptLocation,
    Timeline,
    Trace,
    worst_provenance,
)

PEAK_RESERVED, PEAK_ALLOCATED, END = "peak reserved", "peak allocated", "the end"
HOLES = 5
"""Number of holes listed at each moment."""
_BEFORE_ALL = ScriptLocation(0, Phase.SETUP, "", "", "")


def classify_unrequested_bytes(trace: Trace, at: Mapping[str, int] | None = None) -> Fragmentation:
    """Classify the reserved bytes that were not requested, at some moments of a run.

    Args:
        trace: made with any settings, on any number of streams; it may begin late.
        at: moments by name, each the number of events that have happened by then, from 0 to all of them.
            By default the first allocation after which as much was reserved as ever, the one after which as
            much was allocated as ever, and the end.

    Returns:
        For each moment, bytes that sum to the reserved bytes, and the largest holes. Without cached segments
        there is nothing to classify, and ``not_applicable`` holds the reason.
    """
    line = memory_timeline(trace)
    config = AllocatorConfig.read(trace.settings)
    if not config.has_segments:
        return Fragmentation(Provenance.EXACT, _why_not(config), ())
    moments = _moments(trace, line) if at is None else at
    for name, events in moments.items():
        if not 0 <= events <= len(trace.events):
            raise UsageError(
                f"{name}: event {events} is out of range. The trace has {len(trace.events)} events."
            )
    start = reconstruct_initial_state(trace, config)
    tracker = BlockTracker(trace.events, config, start)
    pieces: dict[int, list[BlockSnapshot]] = {}
    for events in sorted(moments.values()):
        tracker.advance_to(events)
        pieces[events] = tracker.blocks()
        reserved = int(line.reserved[events - 1]) if events else start.reserved
        if sum(piece.stop - piece.start for piece in pieces[events]) != reserved:
            raise FileFormatError(
                f"Cannot replay this trace: after {events:,} of {len(trace.events):,} events, the sizes of "
                f"all blocks do not add up to the {reserved:,} bytes reserved. Record the run again."
            )
    tracker.advance_to(len(trace.events))  # to know when blocks are freed
    classifier = _Classifier(trace, config, tracker)
    sure = worst_provenance_of_notes(note for note in trace.notes if note.sizes)
    return Fragmentation(
        worst_provenance(sure, Provenance.ASSUMED) if start.uncertain else sure,
        "",
        tuple(classifier.at(name, events, pieces[events]) for name, events in moments.items()),
    )


def _why_not(config: AllocatorConfig) -> str:
    if config.caching:
        return (
            f"With backend:{config.backend}, CUDA's own pool holds the memory. PyTorch's allocator history "
            "does not record the segments of this pool."
        )
    return (
        "With PYTORCH_NO_CUDA_MEMORY_CACHING, PyTorch calls cudaMalloc for each tensor. It neither caches "
        "nor splits memory."
    )


def _moments(trace: Trace, line: Timeline) -> dict[str, int]:
    if not len(trace.events):
        return dict.fromkeys((PEAK_RESERVED, PEAK_ALLOCATED, END), 0)
    # A new segment is free until its first allocation: the moment is that allocation's.
    most = line.reserved == line.reserved.max()
    served = most & (trace.events.action == Action.ALLOC)
    return {
        PEAK_RESERVED: int(np.argmax(served if served.any() else most)) + 1,
        PEAK_ALLOCATED: peak_event_outside_failed_attempts(trace, line) + 1,
        END: len(trace.events),
    }


class _Classifier:
    """Classifies the blocks of a moment; the tracker is at the end of the history."""

    def __init__(self, trace: Trace, config: AllocatorConfig, tracker: BlockTracker) -> None:
        self._trace = trace
        self._config = config
        self._tracker = tracker
        self._requested_at_end = {
            block.address: block.requested for segment in trace.segments for block in segment.blocks
        }

    def at(self, name: str, events: int, pieces: list[BlockSnapshot]) -> ReservedMemoryUse:
        """Classify the blocks of one moment."""
        found: dict[str, Counter[str]] = {"small": Counter(), "large": Counter()}
        holes: list[
            tuple[int, str, int, list[BlockSnapshot]]
        ] = []  # bytes, pool, index in the segment, segment
        for segment in blocks_by_segment(pieces):
            kind = self._kind(segment, events)
            rows = found[kind]
            used = any(piece.state != FREE for piece in segment)
            for index, piece in enumerate(segment):
                size = piece.stop - piece.start
                if piece.state == LIVE:
                    requested = self._requested(piece)
                    rounded = min(size, round_size(requested, self._config))
                    rows["requested"] += requested
                    rows["rounding"] += rounded - requested
                    rows["unsplit"] += size - rounded
                elif piece.state == PENDING:
                    rows["awaiting_free"] += size
                elif used:
                    rows["holes"] += size
                    holes.append((size, kind, index, segment))
                else:
                    rows["cached"] += size
        small, large = ReservedBytes(**found["small"]), ReservedBytes(**found["large"])
        return ReservedMemoryUse(
            name,
            events,
            script_location_at(self._trace, events - 1) if events else _BEFORE_ALL,
            small + large,
            small,
            large,
            tuple(self._hole(*hole) for hole in nlargest(HOLES, holes, key=lambda hole: hole[0])),
        )

    def _requested(self, piece: BlockSnapshot) -> int:
        """Return the bytes requested for a live block, and check that the block is large enough."""
        event = self._tracker.freed_old.get(piece.start) if piece.born is None else piece.born
        requested = (
            self._requested_at_end[piece.start] if event is None else int(self._trace.events.size[event])
        )
        if not 0 <= requested <= piece.stop - piece.start:
            raise FileFormatError(
                f"Cannot replay this trace: the block at {piece.start:#x} has {piece.stop - piece.start:,} "
                f"bytes, but {requested:,} bytes were requested for it. Record the run again."
            )
        return requested

    def _kind(self, segment: list[BlockSnapshot], events: int) -> str:
        """Return the pool that a segment serves."""
        start, stop = segment[0].start, segment[-1].stop
        if segment[0].segment != EXPANDABLE:
            small = stop - start == SMALL_SEGMENT  # those of the large pool have at least 10 MiB
        elif used := [piece for piece in segment if piece.state != FREE]:
            small = used[0].stop - used[0].start <= SMALL_SIZE  # nothing is left unsplit there
        else:
            small = self._mapped_for_small(start, stop, events)
        return "small" if small else "large"

    def _mapped_for_small(self, start: int, stop: int, events: int) -> bool:
        """Return whether a range without blocks in use was mapped for the small pool.

        The small pool maps 2 MiB at a time, the large one handles of ``large_segment_size``. A range that was
        mapped before the history and released in it is the large pool's if it consists of whole handles.
        """
        rows = self._trace.events
        covers = (rows.address[:events] <= start) & (start < rows.address[:events] + rows.size[:events])
        mappings = np.flatnonzero(covers & (rows.action[:events] == Action.SEGMENT_MAP))
        if len(mappings):
            return bool(rows.size[mappings[-1]] == SMALL_SEGMENT)
        for at_end in self._trace.segments:
            if at_end.address <= start < at_end.address + at_end.size:
                return at_end.kind == "small"
        return (stop - start) % self._config.large_segment_size != 0

    def _hole(self, size: int, kind: str, index: int, segment: list[BlockSnapshot]) -> Hole:
        used = [piece for piece in segment if piece.state != FREE]
        return Hole(
            address=segment[index].start,
            size=size,
            kind=kind,
            segment=segment[0].start,
            segment_size=segment[-1].stop - segment[0].start,
            expandable=segment[0].segment == EXPANDABLE,
            blocks=len(used),
            in_use=sum(piece.stop - piece.start for piece in used),
            pins=tuple(
                self._pin(piece)
                for piece in (*segment[max(0, index - 1) : index], *segment[index + 1 : index + 2])
            ),
        )

    def _pin(self, piece: BlockSnapshot) -> PinningBlock:
        born = piece.born
        category = Category.UNKNOWN if born is None else Category(self._trace.events.category[born])
        freed = self._tracker.freed_old.get(piece.start) if born is None else self._tracker.freed_by[born]
        return PinningBlock(
            address=piece.start,
            size=piece.stop - piece.start,
            category=category.name.lower(),
            state=piece.state,
            born=None if born is None else script_location_at(self._trace, born),
            freed=None
            if freed is None or freed == len(self._trace.events)
            else script_location_at(self._trace, freed),
        )


def blocks_by_segment(pieces: Iterable[BlockSnapshot]) -> Iterator[list[BlockSnapshot]]:
    """Group blocks, which come in order of address, by segment."""
    segment: list[BlockSnapshot] = []
    for piece in pieces:
        if segment and (segment[-1].segment, segment[-1].stop) != (piece.segment, piece.start):
            yield segment
            segment = []
        segment.append(piece)
    if segment:
        yield segment
