"""What the page's script reads: facts and texts as JSON, then columns as they lie in memory; gzipped, base64.

4 bytes   length of the JSON, little-endian
JSON      {"facts": ..., "words": [text, ...], "columns": {name: [type, offset, length]}}
columns   each from a multiple of 8 bytes on; u1, u2, u4 unsigned integers, f8 floats that are whole numbers
"""

import base64
import gzip
import json
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.allocator.beginning import beginning
from memfit.allocator.config import AllocatorConfig
from memfit.analysis.attribution import Attribution
from memfit.analysis.breakdown import EARLIER as EARLIER_NAME
from memfit.analysis.breakdown import NAMES, ROUNDING, certainty
from memfit.analysis.place import line_of
from memfit.records import (
    Action,
    Category,
    DryRun,
    MarkKind,
    Phase,
    Provenance,
    Timeline,
    Trace,
    worst,
)
from memfit.report.html.blocks import EARLIER, Numbers, blocks_of
from memfit.report.html.moments import MOST_BLOCKS, Drawn, drawn
from memfit.report.html.ranges import Range, ranges_of
from memfit.report.html.words import Words

LAYERS = (
    Category.PARAMETER, Category.BUFFER, Category.OPTIMIZER_STATE, Category.GRADIENT, Category.INPUT,
    Category.ACTIVATION, Category.OUTPUT, Category.WORKSPACE, Category.TEMPORARY, Category.UNKNOWN,
)  # fmt: skip
"""The timeline from the bottom: what stays, then what comes and goes. On top: older blocks, and rounding."""
_MOST_FRAMES = 30
Columns = dict[str, npt.NDArray[Any]]


def payload(
    trace: Trace,
    line: Timeline,
    attribution: Attribution,
    summary: DryRun,
    words: Words,
    *,
    most: int = MOST_BLOCKS,
) -> str:
    """Return everything that the page draws, as text of base64's alphabet alone.

    Args:
        trace: what was recorded.
        line: its timeline.
        attribution: of its allocations.
        summary: of the run: the device's figures.
        words: where texts are made showable and kept.
        most: so many blocks are drawn one by one.

    Raises:
        FileFormatError: an address or a size is beyond what any device has.
    """
    config = AllocatorConfig.read(trace.settings)
    blocks = blocks_of(trace, attribution, beginning(trace, config))
    ranges = ranges_of(trace, config)
    picture = drawn(trace, line, blocks, ranges, most)
    columns = {
        **_moments(trace, line, attribution, picture, words),
        **_blocks(trace, attribution, picture, words),
        **{f"rest.{name}": getattr(picture.rest, name) for name in picture.rest.__slots__},
        **_ranges(ranges, picture),
        **_stacks(trace, words),
    }
    device = summary.device
    facts = {
        "layers": _layers(trace, picture),
        "phases": [str(phase) for phase in Phase],
        "marks": _marks(trace, picture),
        "failures": _failures(trace, picture),
        "events": len(trace.events),
        "old": picture.old,
        "together": picture.together,
        "segments": config.has_segments,
        "source": words.source,
        "device": device.total.bytes,
        "room": max(0, device.total.bytes - device.context.bytes - device.in_use),
    }
    return _packed(facts, words, columns)


def _layers(trace: Trace, picture: Drawn) -> list[dict[str, Any]]:
    sure = certainty(trace)
    layers = [{"name": NAMES[one], "category": int(one), "sure": sure[one]} for one in LAYERS]
    if picture.old:
        layers.append({"name": EARLIER_NAME, "category": EARLIER, "sure": Provenance.ASSUMED})
    return [*layers, {"name": ROUNDING, "category": EARLIER + 1, "sure": worst(*sure.values())}]


def _moments(trace: Trace, line: Timeline, attribution: Attribution, picture: Drawn, words: Words) -> Columns:
    """Return where the script was at each moment; what was reserved then."""
    events = picture.events
    rows = trace.events
    phase = attribution.phase_of_event[events].astype(np.int64)
    stacks, phases = len(trace.stacks) + 1, len(Phase)
    key = ((rows.label[events].astype(np.int64) + 1) * stacks + rows.stack[events] + 1) * phases + phase
    _, first, place = np.unique(key, return_index=True, return_inverse=True)
    at = events[first].tolist()
    labels = [trace.labels[label] if (label := int(rows.label[event])) >= 0 else None for event in at]
    return {
        "moment.event": events,
        "moment.place": place.reshape(-1),
        "moment.reserved": line.reserved[events],
        "place.phase": phase[first],
        "place.module": _indices(words.index(label.module if label else "") for label in labels),
        "place.op": _indices(words.index(label.op if label else "") for label in labels),
        "place.line": _indices(words.line(line_of(trace, event)) for event in at),
    }


def _blocks(trace: Trace, attribution: Attribution, picture: Drawn, words: Words) -> Columns:
    blocks = picture.blocks
    tensors = trace.tensors
    shapes = [str(list(one.shape)) for one in tensors]
    requested, of_requested = np.unique(blocks.requested, return_inverse=True)
    beyond, of_beyond = np.unique(blocks.size - blocks.requested, return_inverse=True)
    # The last of each table is for what index -1 stands for: nothing is known.
    texts = {
        "module": ([words.index(one) for one in (*attribution.modules, "")], blocks.module),
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
        "block.requested": of_requested.reshape(-1),
        "block.beyond": of_beyond.reshape(-1),
        "block.category": blocks.category,
        "block.phase": blocks.phase,
        "block.stack": blocks.stack + 1,
        **{f"block.{name}": np.array(table, np.int64)[column] for name, (table, column) in texts.items()},
        "sizes.requested": requested,
        "sizes.beyond": beyond,
    }


def _ranges(ranges: Iterable[Range], picture: Drawn) -> Columns:
    """Return reserved ranges, by address."""
    rows = np.array(
        [(one.start, one.stop - one.start, one.born, one.freed, one.small, one.expandable, one.stream)
         for one in sorted(ranges, key=lambda one: (one.start, one.born))], np.int64,
    ).reshape(-1, 7)  # fmt: skip
    names = ("address", "size", "born", "freed", "small", "expandable", "stream")
    columns = {f"range.{name}": rows[:, place] for place, name in enumerate(names)}
    for name in ("range.born", "range.freed"):
        columns[name] = np.searchsorted(picture.events, columns[name])
    return columns


def _stacks(trace: Trace, words: Words) -> Columns:
    """Return each stack's frames, innermost first; the first stack is the empty one, for none."""
    frames = [
        words.line(f"{frame.file}:{frame.line}  {frame.function}") for frame in trace.frames
    ]  # without source all of them are the empty text
    flat = [frames[frame] for stack in trace.stacks for frame in stack[:_MOST_FRAMES]]
    ends = np.cumsum([0, 0, *(min(len(stack), _MOST_FRAMES) for stack in trace.stacks)])
    return {"stack.frames": np.array(flat, np.int64), "stack.ends": ends}


def _marks(trace: Trace, picture: Drawn) -> list[tuple[int, str]]:
    """Return marks and the moments that they follow: the first moment of the step after a step's end."""
    wanted = (MarkKind.FORWARD, MarkKind.BACKWARD, MarkKind.OPTIMIZER_STEP, MarkKind.TRAINING_STEP)
    marks = [mark for mark in trace.marks if mark.kind in wanted]
    at = np.searchsorted(picture.events, [mark.position for mark in marks])
    return [(int(moment), str(mark.kind)) for moment, mark in zip(at.tolist(), marks, strict=True)]


def _failures(trace: Trace, picture: Drawn) -> list[tuple[int, int]]:
    """Return the moments at which an allocation failed, and the bytes that were asked for."""
    failed = np.flatnonzero(trace.events.action == Action.OOM)
    moments = np.searchsorted(picture.events, failed)
    return list(zip(moments.tolist(), trace.events.size[failed].tolist(), strict=True))


def _indices(numbers: Iterable[int]) -> Numbers:
    return np.fromiter(numbers, np.int64)


def _packed(facts: Mapping[str, Any], words: Words, columns: Columns) -> str:
    body = bytearray()
    where: dict[str, tuple[str, int, int]] = {}
    for name, column in columns.items():
        kind = _kind(column)
        where[name] = (kind, len(body), len(column))
        body += column.astype(f"<{kind}").tobytes()
        body += bytes(-len(body) % 8)
    head = {"facts": facts, "words": words.table, "columns": where}
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 4) % 8)
    return base64.b64encode(gzip.compress(struct.pack("<I", len(text)) + text + body, 6, mtime=0)).decode()


def _kind(column: npt.NDArray[Any]) -> str:
    """Return the smallest type that holds whole numbers."""
    if not len(column):
        return "u1"
    low, high = int(column.min()), int(column.max())
    if low >= 0:
        for kind in ("u1", "u2", "u4"):
            if high < 1 << 8 * int(kind[1]):
                return kind
    return "f8"
