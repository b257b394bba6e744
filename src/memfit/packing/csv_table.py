"""Buffers and offsets as comma-separated values, as minimalloc reads and writes them.

    id,lower,upper,size            id,lower,upper,size,offset
    b1,0,3,4               ──>     b1,0,3,4,8

Columns may come in any order; others are passed over, and so are blank lines.
"""

import csv
import io
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from memfit.errors import FileFormatError
from memfit.packing.buffers import Buffers, Column

_COLUMNS = ("id", "lower", "upper", "size")
_MOST = 1 << 62
"""What times are below, and all sizes together: sums of them stay within 64 bits."""


def read_buffers(path: Path) -> Buffers:
    """Read buffers.

    Raises:
        FileFormatError: no such file, not such a table, or a buffer that cannot be; the message names line
            and column.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise FileFormatError(f"Cannot read {path}: it is not text.") from None
    except OSError as error:
        raise FileFormatError(f"Cannot read {path}: {error.strerror or error}.") from None
    rows = csv.reader(io.StringIO(text, newline=""))
    try:
        header = next((row for row in rows if row), None)
        if header is None:
            raise FileFormatError(f"Cannot read {path}: it is empty. Its first line is {','.join(_COLUMNS)}.")
        places = _places([name.strip() for name in header])
        names: dict[str, int] = {}
        found = []
        for row in rows:
            if row:
                name, *numbers = _buffer(row, places)
                _add(names, name, rows.line_num)
                found.append(numbers)
    except (_FaultError, csv.Error) as fault:
        raise FileFormatError(f"Cannot read {path}: line {max(rows.line_num, 1)}: {fault}.") from None
    if not found:
        raise FileFormatError(f"Cannot read {path}: it holds no buffer.")
    if sum(size for *_, size in found) >= _MOST:
        raise FileFormatError(f"Cannot read {path}: its sizes add up to 2^62 or more.")
    lower, upper, size = np.ascontiguousarray(np.array(found, np.int64).T)
    return Buffers(lower, upper, size, tuple(names))


class _FaultError(Exception):
    """What is wrong with a line."""


def _places(header: list[str]) -> list[int]:
    """Return where the columns are, and how many there are, with those that are passed over."""
    missing = [name for name in _COLUMNS if name not in header]
    if wrong := missing or [name for name in _COLUMNS if header.count(name) > 1]:
        said, how_many = ",".join(header)[:80], "no" if missing else "more than one"
        raise _FaultError(
            f"{said!r} names {how_many} column {', '.join(wrong)}; it must name {','.join(_COLUMNS)}"
        )
    return [*map(header.index, _COLUMNS), len(header)]


def _buffer(row: list[str], places: list[int]) -> tuple[str, int, int, int]:
    *columns, count = places
    if len(row) != count:
        raise _FaultError(f"{len(row)} columns, where the first line has {count}")
    name, *texts = (row[column] for column in columns)
    if not name:
        raise _FaultError("column id is empty")
    lower, upper, size = map(_number, _COLUMNS[1:], texts)
    if not lower < upper:
        raise _FaultError(f"column upper is {upper}, and must be more than lower, {lower}")
    if size <= 0:
        raise _FaultError(f"column size is {size}, and must be at least 1")
    return name, lower, upper, size


def _add(names: dict[str, int], name: str, line: int) -> None:
    """Keep where a name is: offsets come back by name, so that each is there once."""
    if name in names:
        raise _FaultError(f"column id is {name!r}, which line {names[name]} has as well")
    names[name] = line


def _number(column: str, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise _FaultError(f"column {column} is {text[:40]!r}, which is no integer") from None
    if abs(number) >= _MOST:
        raise _FaultError(f"column {column} is {number}, which is beyond 2^62")
    return number


def packed_table(parts: Iterable[tuple[Buffers, Column]]) -> str:
    """Return buffers with their offsets."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((*_COLUMNS, "offset"))
    for buffers, offset in parts:
        columns = (column.tolist() for column in (buffers.lower, buffers.upper, buffers.size, offset))
        writer.writerows(zip(buffers.names, *columns, strict=True))
    return text.getvalue()
