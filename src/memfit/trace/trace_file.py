"""Trace files (``.memfit``): a zip of one JSON header and one raw column per member.

    header.json          format, version, and everything of a Trace that is not a column; marks of stages,
                         what was shortened and scans from version 6 on
    columns/action       n x u1     |  may contain EARLIER from version 4 on
    columns/address      n x u8     |  little-endian; the type of a column is fixed by the
    columns/size         n x i8     |  version, never by the file
    ...                             |
    columns/category     n x u1     |  may contain COPY and HELD from version 5 on
    columns/pool         n x i4     |  only if the header has pools; from version 2 on
    columns/tensor       n x i4     |  only if the header has tensors; from version 3 on

A trace file may come from an untrusted source. It is data only, and everything is checked: sizes before
decompression, every index before it is used.
"""

import io
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, BinaryIO, get_type_hints

import msgspec
import numpy as np
import numpy.typing as npt

from memfit.atomic_files import write_atomically
from memfit.errors import FileFormatError, UsageError
from memfit.input_files import open_input_file
from memfit.records import (
    DEFAULT_POOL,
    Action,
    Category,
    Events,
    LoaderScan,
    Segment,
    Trace,
)
from memfit.trace.trace_limits import (
    MAX_BYTES,
    MAX_EVENTS,
    MAX_HEADER_BYTES,
    MAX_TEXT,
    exceeded_trace_limit,
    longest_text_length_in_trace,
)

FORMAT = "memfit trace"
VERSION = 6

_COLUMNS = {
    "action": "<u1", "address": "<u8", "size": "<i8", "stream": "<i4",
    "time": "<i8", "label": "<i4", "stack": "<i4", "category": "<u1", "pool": "<i4", "tensor": "<i4",
}  # fmt: skip
_TABLES = {"pool": "pools", "tensor": "tensors"}
"""Columns that exist only if the header has the table that they index."""
_HEADER = "header.json"
_LEVEL = 3  # of deflate; its default, 6, takes three to four times as long
_MAX_INTEGER = (1 << 63) - 1
BLOCK_STATES = ("inactive", "active_allocated", "active_awaiting_free")

_ZIP_START = b"PK\x03\x04"
# The end of a zip: signature, disks, entries (twice), bytes of the directory, its offset, comment length.
_ZIP_END = struct.Struct("<4s4xHHI4xH")
_ZIP64_LOCATOR, _ZIP64_LOCATOR_SIZE = b"PK\x06\x07", 20
_MAX_DIRECTORY_BYTES = 1 << 12


class _Signature(msgspec.Struct):
    """The fields that begin the header of every version."""

    format: str
    version: int


def _header_type() -> type[msgspec.Struct]:
    """Return the type of the header of every version: the fields of ``Trace``, and the number of events."""
    types = get_type_hints(Trace) | {"events": int}
    given: list[Any] = [
        (field.name, types[field.name], *([] if field.default is MISSING else [field.default]))
        for field in fields(Trace)
    ]
    return msgspec.defstruct("Header", given, bases=(_Signature,), kw_only=True)


_HEADER_TYPE = _header_type()


class _TraceError(Exception):
    """The file is not a valid trace; the message completes ``Cannot read X: it ...``."""


def looks_like_trace_file(path: Path) -> bool:
    """Return whether a file looks like a trace rather than a pickle: it begins like a zip."""
    with open_input_file(path, None) as file:
        try:
            return file.read(len(_ZIP_START)) == _ZIP_START
        except OSError as error:
            raise FileFormatError(f"Cannot read {path}: {error.strerror or error}.") from None


def write_trace(trace: Trace, path: Path) -> None:
    """Write a trace; a reader of ``path`` sees the old file or the complete new one.

    Args:
        trace: within the limits of ``trace_limits.py``; longer texts are cut.
        path: the file, by convention ``*.memfit``.

    Raises:
        OutputError: the file cannot be written.
        UsageError: the trace is too large to be read back, or the path names something other than a file.
    """
    if too_many := exceeded_trace_limit(trace):
        raise UsageError(f"Cannot write {path}: the run has {too_many}. Run fewer steps.")
    rest = {name: getattr(trace, name) for name in _rest_of_trace()}
    header = {"format": FORMAT, "version": VERSION, "events": len(trace.events), **rest}
    members = {_HEADER: _encode(header, cut=longest_text_length_in_trace(trace) > MAX_TEXT)}
    if len(members[_HEADER]) > MAX_HEADER_BYTES:
        raise UsageError(
            f"Cannot write {path}: the tables of the trace take {len(members[_HEADER]):,} bytes, but a trace "
            f"can have at most {MAX_HEADER_BYTES:,}. Run fewer steps."
        )
    for name, dtype in _columns_of(trace).items():
        members[f"columns/{name}"] = np.ascontiguousarray(getattr(trace.events, name), dtype).tobytes()

    def write(file: BinaryIO) -> None:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=_LEVEL) as archive:
            for name, content in members.items():
                # A fixed date, so that equal traces make equal files.
                archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED, _LEVEL)

    write_atomically(path, write)


def read_trace(path: Path) -> Trace:
    """Read a trace that ``write_trace`` wrote.

    Returns:
        The trace; its columns are read-only.
    """
    try:
        with open_input_file(path, MAX_BYTES) as file:
            return _read(file)
    except OSError as error:
        raise FileFormatError(f"Cannot read {path}: {error.strerror or error}.") from None
    except _TraceError as error:
        raise FileFormatError(f"Cannot read {path}: it {error}") from None


def _read(file: BinaryIO) -> Trace:
    _check_directory(file)
    try:
        with zipfile.ZipFile(file) as archive:
            members = {info.filename: info for info in archive.infolist()}
            if next(iter(members), None) != _HEADER:
                raise _TraceError(f"is a zip, but not a memfit trace. It holds {_first_names(members)}.")
            header = _decode(_content(archive, members[_HEADER], MAX_HEADER_BYTES))
            dtypes = _columns_of(header)
            if list(members) != [_HEADER, *(f"columns/{name}" for name in dtypes)]:
                raise _TraceError("is damaged (its columns do not match its header). Record the run again.")
            sizes = {f"columns/{name}": _bytes_of(name, header.events) for name in dtypes}
            for name, size in sizes.items():
                if members[name].file_size != size:
                    raise _TraceError(
                        f"is damaged. {name} has {members[name].file_size:,} bytes, but its "
                        f"{header.events:,} events need {size:,} bytes. Record the run again."
                    )
            columns = {
                name: np.frombuffer(_content(archive, members[f"columns/{name}"], MAX_EVENTS * 8), dtype)
                for name, dtype in dtypes.items()
            }
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise _TraceError(f"is damaged ({error}). Record the run again.") from None
    rest: dict[str, Any] = {name: getattr(header, name) for name in _rest_of_trace()}
    trace = Trace(events=Events(**columns), **rest)
    if too_many := exceeded_trace_limit(trace):
        raise _TraceError(f"has {too_many}.")
    if (length := longest_text_length_in_trace(trace)) > MAX_TEXT:
        raise _TraceError(f"contains a text of {length:,} characters, but at most {MAX_TEXT:,} are allowed.")
    for fault in _faults(trace):
        raise _TraceError(f"is inconsistent ({fault}). The file was damaged or edited. Record the run again.")
    return trace


def _columns_of(tables: Any) -> dict[str, str]:
    """Return the columns that a trace, or a header, with these tables has, and their types."""
    return {
        name: dtype
        for name, dtype in _COLUMNS.items()
        if name not in _TABLES or getattr(tables, _TABLES[name])
    }


def _rest_of_trace() -> list[str]:
    return [field.name for field in fields(Trace) if field.name != "events"]


def _check_directory(file: BinaryIO) -> None:
    """Check the end of the zip first, so that zipfile never reads a directory as large as the file."""
    end = file.seek(0, io.SEEK_END)
    file.seek(max(end - _ZIP_END.size - _ZIP64_LOCATOR_SIZE, 0))
    tail = file.read()
    if len(tail) < _ZIP_END.size or not tail[-_ZIP_END.size :].startswith(b"PK\x05\x06"):
        raise _TraceError(
            "is not a memfit trace, or is truncated. Create a trace with memfit dry-run -o FILE."
        )
    _, entries, entries_in_all, directory, comment = _ZIP_END.unpack(tail[-_ZIP_END.size :])
    if tail.startswith(_ZIP64_LOCATOR) or directory > _MAX_DIRECTORY_BYTES or comment:
        raise _TraceError("is a zip, but not a memfit trace.")
    limit = 1 + len(_COLUMNS)
    if entries != entries_in_all or not limit - len(_TABLES) <= entries <= limit:
        raise _TraceError(f"is a zip file with {entries} members, but not a memfit trace.")


def _content(archive: zipfile.ZipFile, member: zipfile.ZipInfo, limit: int) -> bytes:
    """Decompress a member. zipfile reads at most the size that it declares, and checks the CRC."""
    if member.file_size > limit:
        raise _TraceError(
            f"declares {member.file_size:,} bytes for {member.filename}, more than a trace can have."
        )
    content = archive.read(member)
    if len(content) != member.file_size:
        raise _TraceError(f"is truncated inside {member.filename}. Record the run again.")
    return content


def _bytes_of(column: str, events: int) -> int:
    if not 0 <= events <= MAX_EVENTS:
        raise _TraceError(f"declares {events:,} events, but a trace can have at most {MAX_EVENTS:,}.")
    return events * np.dtype(_COLUMNS[column]).itemsize


def _encode(header: dict[str, Any], *, cut: bool) -> bytes:
    try:
        return msgspec.json.encode(_writable(msgspec.to_builtins(header)) if cut else header)
    except UnicodeEncodeError:
        # A file name that is not UTF-8, as Python represents it: JSON cannot hold it, so it gets a "?".
        return msgspec.json.encode(_writable(msgspec.to_builtins(header)))


def _writable(value: Any) -> Any:
    if isinstance(value, str):
        text = value.encode(errors="replace").decode()
        return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"
    if isinstance(value, dict):
        return {_writable(key): _writable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(item) for item in value]
    return value


def _decode(content: bytes) -> Any:
    try:
        signature = msgspec.json.decode(content, type=_Signature)
        if signature.format != FORMAT:
            raise _TraceError(f"is not a memfit trace; its format is {signature.format[:80]!r}.")
        if signature.version > VERSION:
            raise _TraceError(
                f"was written by a newer memfit. Its format has version {signature.version}, but this memfit "
                f"reads only up to version {VERSION}. Upgrade memfit."
            )
        if signature.version < 1:
            raise _TraceError(f"has the unknown format version {signature.version}.")
        return msgspec.json.decode(content, type=_HEADER_TYPE)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _TraceError(f"has an invalid header ({error}). Record the run again.") from None


def _first_names(members: dict[str, zipfile.ZipInfo]) -> str:
    return ", ".join(repr(name[:40]) for name in list(members)[:4]) or "nothing"


def _faults(trace: Trace) -> Iterator[str]:
    """Yield what is out of range; each range is that of the table or type that the number refers to."""
    events, labels, stacks, frames = trace.events, len(trace.labels), len(trace.stacks), len(trace.frames)
    columns: dict[str, tuple[int, int]] = {
        "action": (0, max(Action)),
        "category": (0, max(Category)),
        "address": (0, _MAX_INTEGER),
        "size": (0, _MAX_INTEGER),
        "stream": (0, _MAX_INTEGER),
        "label": (-1, labels - 1),
        "stack": (-1, stacks - 1),
        "pool": (0, len(trace.pools) - 1),
        "tensor": (-1, len(trace.tensors) - 1),
    }
    for name, (low, high) in columns.items():
        of_event = getattr(events, name)
        if of_event is None:
            continue
        outside = np.flatnonzero((of_event < low) | (of_event > high))
        if len(outside):
            event = outside[0]
            yield f"event {event} of {len(events)} has {name} {of_event[event]}, not between {low} and {high}"
    numbers: dict[str, tuple[npt.ArrayLike, int, int]] = {
        "a pool's number": ([number for pool in trace.pools for number in pool], 0, _MAX_INTEGER),
        "a label's stack": ([label.stack for label in trace.labels], -1, stacks - 1),
        "a stack's frame": ([frame for stack in trace.stacks for frame in stack], 0, frames - 1),
        "a frame's line": ([frame.line for frame in trace.frames], -_MAX_INTEGER, _MAX_INTEGER),
        "a mark's position": ([mark.position for mark in trace.marks], 0, len(events)),
        "a mark's index": ([mark.index for mark in trace.marks], 0, _MAX_INTEGER),
        "a tensor's dimension": ([n for tensor in trace.tensors for n in tensor.shape], 0, _MAX_INTEGER),
        "a segment's number": ([n for s in trace.segments for n in _integers(s)], 0, _MAX_INTEGER),
        "a statistic": (list(trace.statistics.values()), -_MAX_INTEGER, _MAX_INTEGER),
        "bytes of the device": (
            [trace.device.total.bytes, trace.device.outside.bytes, trace.device.in_use], 0, _MAX_INTEGER,
        ),
        "an option's value": ([option.value for option in trace.options], 0, _MAX_INTEGER),
        "the loader's batch size": ([trace.loader.size if trace.loader else 1], 1, _MAX_INTEGER),
        "the loader's samples": ([(trace.loader.samples if trace.loader else 0) or 0], 0, _MAX_INTEGER),
        "the number of ranks": ([trace.rank.world_size if trace.rank else 2], 2, _MAX_INTEGER),
        "the rank": (
            [trace.rank.rank if trace.rank else 0], 0, trace.rank.world_size - 1 if trace.rank else 0,
        ),
        "the size of a workspace": (list(trace.cudnn_workspaces), 0, _MAX_INTEGER),
        "the bytes of host memory": ([trace.pinned, trace.unpinned], 0, _MAX_INTEGER),
        "the ranks of a machine": ([(trace.rank and trace.rank.nproc) or 1], 1, _MAX_INTEGER),
        "a scan's number": ([n for scan in trace.scans for n in _numbers(scan)], 0, _MAX_INTEGER),
        "the exit code": ([trace.end.exit_code], -_MAX_INTEGER, _MAX_INTEGER),
    }  # fmt: skip
    for what, (values, low, high) in numbers.items():
        column = np.asarray(values)
        if column.size and not (low <= column.min() and column.max() <= high):
            yield f"{what} is not between {low} and {high}"
    if trace.pools and trace.pools[0] != DEFAULT_POOL:
        yield "its first pool is not the default pool"
    if trace.pools and not {segment.pool for segment in trace.segments} <= set(trace.pools):
        yield "a segment's pool is not among the trace's pools"
    if any(block.state not in BLOCK_STATES for segment in trace.segments for block in segment.blocks):
        yield f"a block's state is not one of {', '.join(BLOCK_STATES)}"


def _numbers(scan: LoaderScan) -> Iterator[int]:
    yield from (scan.seen, scan.of or 0, scan.dimension or 0)
    for batch in (scan.largest, scan.median, *scan.served):
        yield from (batch.bytes, *batch.shape)


def _integers(segment: Segment) -> Iterator[int]:
    yield from (segment.address, segment.size, segment.stream, *segment.pool)
    for block in segment.blocks:
        yield from (block.address, block.size, block.requested)
