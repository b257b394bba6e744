"""How large a trace may be. Beyond these limits memfit neither writes nor reads one.

                      most         GPT-2 small, 330 steps
events               16,777,216    970,473
rows of a table       1,048,576      1,320 (marks)
bytes of the header  67,108,864    236,589
characters of a text      4,096        183 (a note)

They bound what a file from an untrusted source costs its reader: a few kilobytes may expand to any size.
"""

from collections.abc import Iterator

from memfit.records import Trace

MAX_EVENTS = 1 << 24
MAX_ROWS = 1 << 20
MAX_SCANS = 1 << 10
"""Loaders whose batches were looked through."""
MAX_HEADER_BYTES = 1 << 26
MAX_TEXT = 1 << 12
"""Longer texts are cut when they are written: a module's name, an exception's message."""
MAX_BYTES = 1 << 30
"""Of the file: its columns and its header, not compressed, take less."""
_TABLES = (
    "labels",
    "stacks",
    "frames",
    "marks",
    "segments",
    "notes",
    "pools",
    "tensors",
    "shortened",
    "cudnn_workspaces",
)


def exceeded_trace_limit(trace: Trace) -> str:
    """Return what a trace has too many of; empty if nothing."""
    if len(trace.events) > MAX_EVENTS:
        return f"{len(trace.events):,} events, but a trace can have at most {MAX_EVENTS:,}"
    for name in _TABLES:
        if (rows := len(getattr(trace, name))) > MAX_ROWS:
            return f"{rows:,} {name}, but a trace can have at most {MAX_ROWS:,}"
    if len(trace.scans) > MAX_SCANS:
        return f"{len(trace.scans):,} scans, but a trace can have at most {MAX_SCANS:,}"
    return ""


def longest_text_length_in_trace(trace: Trace) -> int:
    """Return the number of characters of the longest text of a trace."""
    return max(map(len, _texts(trace)))


def _texts(trace: Trace) -> Iterator[str]:
    for label in trace.labels:
        yield from (label.module, label.op)
    for frame in trace.frames:
        yield from (frame.file, frame.function)
    for tensor in trace.tensors:
        yield from (tensor.module, tensor.name, tensor.dtype)
    for note in trace.notes:
        yield from (note.text, note.where)
    yield from (each.where for each in trace.shortened)
    for scan in trace.scans:
        yield from (scan.where, scan.ended)
    for texts in (trace.settings, trace.versions):
        yield from (*texts.keys(), *texts.values())
    yield from (trace.device.name, trace.end.reason, trace.end.exception, trace.end.where)
    yield trace.end.missing_updates
    for read in trace.end.stand_ins:
        yield from (read.where, read.what, read.value, read.instead)
    yield from (segment.kind for segment in trace.segments)
    yield from trace.command
