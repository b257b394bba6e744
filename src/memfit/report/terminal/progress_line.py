"""The progress line: on a terminal a live one at its foot, elsewhere a line now and then.

The script shares the terminal and prints when it likes. So the last row is taken out of what scrolls
(DECSTBM) and the line is drawn there; what the script prints scrolls above it, untouched.
"""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

_REDRAW = 0.1  # seconds between two states of the live line
_SILENT = 10.0  # seconds between two lines where there is no terminal
_LEAST_ROWS = 4

Show = Callable[[str], None]


@contextmanager
def progress_line(stream: TextIO = sys.stderr) -> Iterator[Show]:
    """Yield a function that shows the state of things: call it as often as you like.

    >>> with progress_line(sys.stdout) as show:
    ...     show("step 1/3")
    """
    if stream.isatty() and os.environ.get("TERM", "dumb") != "dumb" and _size()[1] >= _LEAST_ROWS:
        with _at_the_foot(stream) as draw:
            yield _at_most_every(_REDRAW, draw)
    else:
        yield _at_most_every(_SILENT, lambda text: print(text, file=stream, flush=True), first=_SILENT)


def _at_most_every(seconds: float, draw: Show, *, first: float = 0.0) -> Show:
    due = time.monotonic() + first

    def show(text: str) -> None:
        nonlocal due
        now = time.monotonic()
        if now >= due:
            due = now + seconds
            draw(text)

    return show


@contextmanager
def _at_the_foot(stream: TextIO) -> Iterator[Show]:
    rows_reserved = 0

    def reserve(rows: int) -> None:
        nonlocal rows_reserved
        rows_reserved = rows
        # A new line makes room if the cursor is on the last row; then back up to where it was.
        stream.write(f"\n\x1b7\x1b[1;{rows - 1}r\x1b8\x1b[1A")

    def draw(text: str) -> None:
        columns, rows = _size()
        if rows != rows_reserved:
            reserve(rows)
        stream.write(f"\x1b7\x1b[{rows};1H\x1b[2K{text[: columns - 1]}\x1b8")
        stream.flush()

    try:
        yield draw
    finally:
        if rows_reserved:
            stream.write(f"\x1b7\x1b[{rows_reserved};1H\x1b[2K\x1b[r\x1b8")
            stream.flush()


def _size() -> tuple[int, int]:
    size = shutil.get_terminal_size()
    return size.columns, size.lines
