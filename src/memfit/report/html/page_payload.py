"""The data that the page's script reads: facts and texts as JSON, then binary columns; gzipped, in base64.

4 bytes   length of the JSON, little-endian
JSON      {"facts": ..., "words": [text, ...], "columns": {name: [type, offset, length]}}
columns   each aligned to 8 bytes; u1, u2, u4 unsigned integers, f8 floats that are whole numbers
"""

import base64
import gzip
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from memfit.analysis.block_columns import EARLIER, Numbers, block_columns_of_trace
from memfit.analysis.breakdown import CATEGORY_NAMES, ROUNDING, category_provenance, peak_event
from memfit.analysis.breakdown import EARLIER as EARLIER_NAME
from memfit.analysis.event_locations import script_line_of_event, script_location_at, training_steps_of_events
from memfit.analysis.explanation import secondary_peaks
from memfit.analysis.fold_module_paths import fold_module_paths
from memfit.analysis.peak_outside_failed_attempts import (
    failed_allocation_events,
    peak_event_outside_failed_attempts,
)
from memfit.analysis.reserved_ranges import ReservedRange, reserved_ranges_of_trace
from memfit.analysis.run_stages import stage_spans
from memfit.records import (
    Action,
    Attribution,
    Category,
    DryRun,
    HighMemoryMoment,
    Phase,
    Provenance,
    Stage,
    Timeline,
    Trace,
    worst_provenance,
)
from memfit.report.html.drawn_moments import MOST_BLOCKS, DrawnTimeline, choose_drawn_blocks
from memfit.report.html.page_text_table import PageTextTable

_COLOURS = {
    Category.PARAMETER: ("#0072b2", False),
    Category.BUFFER: ("#0072b2", True),
    Category.OPTIMIZER_STATE: ("#56b4e9", False),
    Category.COPY: ("#56b4e9", True),
    Category.HELD: ("#d55e00", True),
    Category.GRADIENT: ("#cc79a7", False),
    Category.INPUT: ("#009e73", True),
    Category.ACTIVATION: ("#009e73", False),
    Category.RECOMPUTED: ("#e69f00", True),
    Category.OUTPUT: ("#d55e00", False),
    Category.WORKSPACE: ("#f0e442", False),
    Category.COMMUNICATION: ("#f0e442", True),
    Category.TEMPORARY: ("#e69f00", False),
    Category.UNKNOWN: ("#8c8c8c", False),
}
"""Colour of each category and whether it is hatched, from the bottom of the timeline: lasting memory first.

Source: Okabe and Ito, Color Universal Design (2008); categories that share a colour differ by hatching.
"""


@dataclass(frozen=True, slots=True)
class _TimelineLayer:
    """A category of memory in the stacked timeline."""

    name: str
    provenance: Provenance
    colour: str
    hatched: bool


@dataclass(frozen=True, slots=True)
class _DrawnFailure:
    """An allocation that failed."""

    at: int
    """Its moment."""
    needed: int
    """Bytes that it requested from the device."""
    available: int
    """Bytes that the device had free."""


@dataclass(frozen=True, slots=True)
class DrawnTimelineFacts:
    """Facts about the whole run. Moments are indices into the drawn moments: see ``drawn_moments.py``."""

    layers: tuple[_TimelineLayer, ...]
    """From the bottom of the stack; rounding comes last."""
    phases: tuple[Phase, ...]
    shortcuts: tuple[int, ...]
    """The moments to look at: see the function ``shortcuts``."""
    failures: tuple[_DrawnFailure, ...]
    """Allocations that failed."""
    old: int
    """Number of blocks older than the history; they come first."""
    moments: int
    blocks: int
    """Number of blocks that are drawn individually."""
    together: int
    """Number of blocks that are drawn together."""
    room: int
    """Device memory available to PyTorch's allocator, in bytes; 0 if unknown."""


def _page_facts(
    trace: Trace, picture: DrawnTimeline, near: tuple[HighMemoryMoment, ...], summary: DryRun
) -> DrawnTimelineFacts:
    """Collect the facts for the page."""

    def moments(events: list[int]) -> tuple[int, ...]:
        return tuple(np.searchsorted(picture.events, events).tolist())

    failed = failed_allocation_events(trace)
    device = summary.device
    return DrawnTimelineFacts(
        layers=_layers(trace, picture),
        phases=tuple(Phase),
        shortcuts=moments([one.event for one in near]),
        failures=tuple(
            map(
                _DrawnFailure,
                moments(failed.tolist()),
                *(column[failed].tolist() for column in (trace.events.size, trace.events.address)),
            )
        ),
        old=picture.old,
        moments=len(picture.events),
        blocks=len(picture.blocks),
        together=picture.together,
        room=max(0, device.total.bytes - device.outside.bytes - device.in_use),
    )


def _layers(trace: Trace, picture: DrawnTimeline) -> tuple[_TimelineLayer, ...]:
    provenances = category_provenance(trace)
    layers = [
        _TimelineLayer(CATEGORY_NAMES[one], provenances[one], *paint) for one, paint in _COLOURS.items()
    ]
    if picture.old:
        layers.append(_TimelineLayer(EARLIER_NAME, Provenance.ASSUMED, "#4d4d4d", hatched=True))
    return (
        *layers,
        _TimelineLayer(ROUNDING, worst_provenance(*provenances.values()), "#8c8c8c", hatched=True),
    )


def _layer_of_category(categories: Numbers) -> Numbers:
    """Return the layer index of each category in a column of blocks."""
    return np.argsort([*_COLOURS, EARLIER])[categories]


def _moments_to_jump_to(trace: Trace, line: Timeline) -> tuple[HighMemoryMoment, ...]:
    """Return the moments to look at: the peak, those just below it, and the peak of each phase and stage.

    A phase or stage that already contains one of these moments gets none of its own.
    """
    if not len(line.allocated):
        return ()
    found = [_at(trace, line, peak_event_outside_failed_attempts(trace, line)), *secondary_peaks(trace, line)]
    seen = {trace.labels[label].phase for label in np.unique(trace.events.label) if label >= 0}
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
        if phase in seen and phase not in {one.place.phase for one in found}:
            found.append(_at(trace, line, peak_event(trace, line, phase)))
    found += (_at(trace, line, peak_event(trace, line, stage)) for stage in _stages_without(trace, found))
    return tuple(found)


def _stages_without(trace: Trace, found: Sequence[HighMemoryMoment]) -> Iterator[Stage]:
    """Yield the stages of a run, but for its setup, that contain none of some moments."""
    spans = stage_spans(trace)
    for stage in dict.fromkeys(span.stage for span in spans if span.stage is not Stage.SETUP):
        own = [span for span in spans if span.stage is stage]
        if not any(span.begin <= one.event < span.end for span in own for one in found):
            yield stage


def _at(trace: Trace, line: Timeline, event: int) -> HighMemoryMoment:
    return HighMemoryMoment(event, script_location_at(trace, event), int(line.allocated[event]))


_MOST_FRAMES = 30
_TEXTS = ("module", "folded", "op", "line", "name", "dtype", "shape")
_OF_WORDS = (*(f"block.{name}" for name in _TEXTS), "place.module", "place.op", "place.line", "stack.frames")
"""Columns that are indices into the table of texts."""
Columns = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class PagePayload:
    """The data of a page."""

    facts: DrawnTimelineFacts
    shortcuts: tuple[HighMemoryMoment, ...]
    text: str
    """All of the data, in base64."""


def page_payload(
    trace: Trace,
    line: Timeline,
    attribution: Attribution,
    summary: DryRun,
    words: PageTextTable,
    *,
    most: int = MOST_BLOCKS,
) -> PagePayload:
    """Return the data that the page draws.

    Raises:
        FileFormatError: an address or a size is beyond what any device has.
    """
    blocks = block_columns_of_trace(trace, attribution)
    ranges = reserved_ranges_of_trace(trace)
    near = _moments_to_jump_to(trace, line)
    picture = choose_drawn_blocks(trace, line, blocks, ranges, [one.event for one in near], most)
    columns = {
        **_moments(trace, line, attribution, picture, words),
        **_blocks(trace, attribution, picture, words),
        **_rest(picture),
        **_ranges(ranges, picture),
        **_stacks(trace, words),
    }
    found = _page_facts(trace, picture, near, summary)
    table, rank = words.in_order()
    columns |= {name: rank[columns[name]] for name in _OF_WORDS}
    return PagePayload(found, near, _packed(found, table, columns))


def _moments(
    trace: Trace, line: Timeline, attribution: Attribution, picture: DrawnTimeline, words: PageTextTable
) -> Columns:
    """Return where the script was at each moment, and the memory reserved."""
    events = picture.events
    rows = trace.events
    # Events older than the history have no location: use the location where the history begins.
    where = np.maximum(events, int(np.argmax(rows.action != Action.EARLIER)) if len(rows) else 0)
    phase = attribution.phase_of_event[where].astype(np.int64)
    key = (rows.label[where].astype(np.int64) + 1) * (len(trace.stacks) + 1) + rows.stack[where] + 1
    _, first, place = np.unique(key, return_index=True, return_inverse=True)
    at = where[first].tolist()
    labels = [trace.labels[label] if (label := int(rows.label[event])) >= 0 else None for event in at]
    return {
        "moment.event": events,
        "moment.phase": phase,
        "moment.step": training_steps_of_events(trace, where, phase),
        "moment.place": place.reshape(-1),
        "moment.reserved": line.reserved[events],
        "place.module": _indices(words.index(label.module if label else "") for label in labels),
        "place.op": _indices(words.index(label.op if label else "") for label in labels),
        "place.line": _indices(words.line(script_line_of_event(trace, event)) for event in at),
    }


def _blocks(trace: Trace, attribution: Attribution, picture: DrawnTimeline, words: PageTextTable) -> Columns:
    blocks = picture.blocks
    tensors = trace.tensors
    shapes = [str(list(one.shape)) for one in tensors]
    folded = fold_module_paths(attribution.modules)
    # The last entry of each table serves index -1: unknown.
    texts = {
        "module": ([words.index(one) for one in (*attribution.modules, "")], blocks.module),
        "folded": ([words.index(one) for one in (*folded, "")], blocks.module),
        "op": ([words.index(one) for one in (*attribution.ops, "")], blocks.op),
        "line": ([words.line(one) for one in (*attribution.lines, "")], blocks.line),
        "name": ([words.index(one) for one in (*(one.name for one in tensors), "")], blocks.tensor),
        "dtype": ([words.index(one) for one in (*(one.dtype for one in tensors), "")], blocks.tensor),
        "shape": ([words.index(one) for one in (*shapes, "")], blocks.tensor),
    }
    return {
        "block.born": blocks.born,
        "block.life": blocks.freed - blocks.born,
        "block.wait": blocks.done - blocks.freed,
        "block.address": blocks.address,
        "block.requested": blocks.requested,
        "block.beyond": blocks.size - blocks.requested,
        "block.layer": _layer_of_category(blocks.category),
        "block.phase": blocks.phase,
        "block.stack": blocks.stack + 1,
        **{f"block.{name}": np.array(table, np.int64)[column] for name, (table, column) in texts.items()},
    }


def _rest(picture: DrawnTimeline) -> Columns:
    rest = picture.rest
    return {
        "rest.moment": rest.moment,
        "rest.layer": _layer_of_category(rest.category),
        "rest.requested": rest.requested,
        "rest.beyond": rest.size - rest.requested,
    }


def _ranges(ranges: Iterable[ReservedRange], picture: DrawnTimeline) -> Columns:
    """Return the reserved ranges, sorted by address."""
    rows = np.array(
        [(one.start, one.stop - one.start, one.born, one.freed, one.small, one.expandable)
         for one in sorted(ranges, key=lambda one: (one.start, one.born))], np.int64,
    ).reshape(-1, 6)  # fmt: skip
    names = ("address", "size", "born", "freed", "small", "expandable")
    columns = {f"range.{name}": rows[:, place] for place, name in enumerate(names)}
    for name in ("range.born", "range.freed"):
        columns[name] = np.searchsorted(picture.events, columns[name])
    return columns


def _stacks(trace: Trace, words: PageTextTable) -> Columns:
    """Return each stack's frames, innermost first. Stack 0 is empty, for blocks without a stack."""
    frames = [
        words.line(f"{frame.file}:{frame.line}  {frame.function}") for frame in trace.frames
    ]  # all empty without source
    flat = [frames[frame] for stack in trace.stacks for frame in stack[:_MOST_FRAMES]]
    ends = np.cumsum([0, 0, *(min(len(stack), _MOST_FRAMES) for stack in trace.stacks)])
    return {"stack.frames": np.array(flat, np.int64), "stack.ends": ends}


def _indices(numbers: Iterable[int]) -> Numbers:
    return np.fromiter(numbers, np.int64)


def _packed(facts: DrawnTimelineFacts, words: list[str], columns: Columns) -> str:
    body = bytearray()
    where: dict[str, tuple[str, int, int]] = {}
    for name, column in columns.items():
        kind = _kind(column)
        where[name] = (kind, len(body), len(column))
        body += column.astype(f"<{kind}").tobytes()
        body += bytes(-len(body) % 8)
    text = msgspec.json.encode({"facts": facts, "words": words, "columns": where})
    text += b" " * (-(len(text) + 4) % 8)
    return base64.b64encode(gzip.compress(struct.pack("<I", len(text)) + text + body, 6, mtime=0)).decode()


def _kind(column: npt.NDArray[Any]) -> str:
    """Return the smallest type that holds the column's integers."""
    if not len(column):
        return "u1"
    low, high = int(column.min()), int(column.max())
    if low >= 0:
        for kind in ("u1", "u2", "u4"):
            if high < 1 << 8 * int(kind[1]):
                return kind
    return "f8"
