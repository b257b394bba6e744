"""Read buffers and write packings as CSV, in the format of minimalloc.

    id,lower,upper,size            id,lower,upper,size,offset
    b1,0,3,4               ──>     b1,0,3,4,8

Columns may come in any order. Other columns and blank lines are ignored.
"""

import csv
import io
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from memfit.errors import FileFormatError
from memfit.input_files import read_input_file
from memfit.packing.buffer_lifetimes import Buffers, Column

_COLUMNS = ("id", "lower", "upper", "size")
MAX_BYTES = 1 << 26
"""Of a table: about two million buffers."""
_LIMIT = 1 << 62
"""Exclusive limit of times, and of the sum of all sizes, so that sums stay within 64 bits."""


def read_buffers_csv(path: Path) -> Buffers:
    """Read buffers from a CSV file."""
    try:
        text = read_input_file(path, MAX_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise FileFormatError(f"Cannot read {path}: it is not UTF-8 text.") from None
    rows = csv.reader(io.StringIO(text, newline=""))
    try:
        header = next((row for row in rows if row), None)
        if header is None:
            raise FileFormatError(
                f"Cannot read {path}: it is empty. The first line must be {','.join(_COLUMNS)}."
            )
        columns = _find_columns([name.strip() for name in header])
        names: dict[str, int] = {}
        buffers = []
        for row in rows:
            if row:
                name, *numbers = _parse_row(row, columns, len(header))
                _add_name(names, name, rows.line_num)
                buffers.append(numbers)
    except (_BadRowError, csv.Error) as problem:
        raise FileFormatError(f"Cannot read {path}, line {max(rows.line_num, 1)}: {problem}.") from None
    if not buffers:
        raise FileFormatError(f"Cannot read {path}: it contains no buffers.")
    if sum(size for *_, size in buffers) >= _LIMIT:
        raise FileFormatError(f"Cannot read {path}: its column size adds up to 2^62 or more.")
    lower, upper, size = np.ascontiguousarray(np.array(buffers, np.int64).T)
    return Buffers(lower, upper, size, tuple(names))


class _BadRowError(Exception):
    """What is wrong with a row of the table."""


def _find_columns(header: list[str]) -> list[int]:
    """Return the position of each of ``_COLUMNS`` in the header."""
    missing = [name for name in _COLUMNS if name not in header]
    repeated = [name for name in _COLUMNS if header.count(name) > 1]
    if missing or repeated:
        shown, fault = ",".join(header)[:80], "has no" if missing else "repeats"
        raise _BadRowError(
            f"the header {shown!r} {fault} column {', '.join(missing or repeated)}. The header must contain "
            f"each of {','.join(_COLUMNS)} once"
        )
    return [*map(header.index, _COLUMNS)]


def _parse_row(row: list[str], columns: list[int], expected: int) -> tuple[str, int, int, int]:
    if len(row) != expected:
        raise _BadRowError(f"the header has {expected} columns, but the row has {len(row)}")
    name, *texts = (row[column] for column in columns)
    if not name:
        raise _BadRowError("column id is empty")
    lower, upper, size = map(_parse_integer, _COLUMNS[1:], texts)
    if not lower < upper:
        raise _BadRowError(f"column upper is {upper}, but must be greater than lower ({lower})")
    if size <= 0:
        raise _BadRowError(f"column size is {size}, but must be at least 1")
    return name, lower, upper, size


def _add_name(names: dict[str, int], name: str, line: int) -> None:
    """Record the line of a name; offsets are written by name, so that each must be unique."""
    if name in names:
        raise _BadRowError(f"column id is {name!r}, which line {names[name]} already uses")
    names[name] = line


def _parse_integer(column: str, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise _BadRowError(f"column {column} is {text[:40]!r}, which is not an integer") from None
    if abs(number) >= _LIMIT:
        raise _BadRowError(f"column {column} is {number}, but its magnitude must be below 2^62")
    return number


def packing_to_csv(parts: Iterable[tuple[Buffers, Column]]) -> str:
    """Return buffers with their offsets as CSV."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((*_COLUMNS, "offset"))
    for buffers, offset in parts:
        columns = (column.tolist() for column in (buffers.lower, buffers.upper, buffers.size, offset))
        writer.writerows(zip(buffers.names, *columns, strict=True))
    return text.getvalue()
