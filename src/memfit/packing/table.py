"""Buffers and offsets as comma-separated values, as minimalloc reads and writes them.

    id,lower,upper,size            id,lower,upper,size,offset
    b1,0,3,4               ──>     b1,0,3,4,8

A fourth column may come in any order; what else is in the file is passed over.
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
        FileFormatError: not such a table, or a buffer that cannot be; the message names the line.
        OSError: no such file.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise FileFormatError(f"Cannot read {path}: it is not text.") from None
    rows = csv.DictReader(io.StringIO(text, newline=""))
    try:
        missing = [name for name in _COLUMNS if name not in (rows.fieldnames or ())]
        if missing:
            raise FileFormatError(
                f"Cannot read {path}: its first line names no column {', '.join(missing)}; "
                f"it is {','.join(_COLUMNS)}."
            )
        found = [_buffer(path, rows.line_num, row) for row in rows]
    except csv.Error as error:
        raise FileFormatError(f"Cannot read {path}: line {rows.line_num}: {error}.") from None
    if not found:
        raise FileFormatError(f"Cannot read {path}: it holds no buffer.")
    if sum(size for *_, size in found) >= _MOST:
        raise FileFormatError(f"Cannot read {path}: its sizes add up to more than 64 bits hold.")
    columns = np.array([numbers for _, *numbers in found], np.int64).T
    lower, upper, size = np.ascontiguousarray(columns)
    return Buffers(lower, upper, size, tuple(name for name, *_ in found))


def _buffer(path: Path, line: int, row: dict[str, str | None]) -> tuple[str, int, int, int]:
    try:
        lower, upper, size = (int(row[name] or "") for name in _COLUMNS[1:])
    except ValueError:
        raise FileFormatError(f"Cannot read {path}: line {line}: a time or a size is no integer.") from None
    if not (-_MOST < lower < upper < _MOST and 0 < size < _MOST):
        raise FileFormatError(
            f"Cannot read {path}: line {line}: a buffer has lower < upper and size > 0, "
            f"not [{lower}, {upper}) and {size}."
        )
    return row["id"] or "", lower, upper, size


def packed_table(parts: Iterable[tuple[Buffers, Column]]) -> str:
    """Return buffers with their offsets."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((*_COLUMNS, "offset"))
    for buffers, offset in parts:
        columns = (column.tolist() for column in (buffers.lower, buffers.upper, buffers.size, offset))
        writer.writerows(zip(buffers.names, *columns, strict=True))
    return text.getvalue()
