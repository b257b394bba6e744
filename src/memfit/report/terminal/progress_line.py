"""The progress line: on a terminal, a live line on the last row; elsewhere, a line every ten seconds.

The script shares the terminal and prints at any time. So memfit takes the last row out of the scrolling
region (DECSTBM) and draws the line there; the script's output scrolls above it, untouched.
"""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

_REDRAW_INTERVAL = 0.1  # seconds between updates of the live line
_INTERVAL = 10.0  # seconds between lines if there is no terminal
_MIN_ROWS = 4

Show = Callable[[str], None]


@contextmanager
def show_progress_line(stream: TextIO | None = None) -> Iterator[Show]:
    """Yield a function that shows a text as the progress; it limits how often it draws.

    Args:
        stream: where to show it; the standard error stream by default.

    >>> with show_progress_line(sys.stdout) as show:
    ...     show("step 1/3")
    """
    stream = stream or sys.stderr
    if _understands_escapes(stream) and _size()[1] >= _MIN_ROWS:
        with _on_last_row(stream) as draw:
            yield _at_most_every(_REDRAW_INTERVAL, draw)
    else:
        yield _at_most_every(_INTERVAL, lambda text: print(text, file=stream, flush=True), first=_INTERVAL)


def move_to_line_start(stream: TextIO) -> None:
    """Move a terminal's cursor to the beginning of a line, unless it is there; else write nothing.

    The script shares the terminal, and may have left a progress bar without a newline. As many spaces as a
    line has columns wrap to the next line unless the cursor is at the beginning of one.
    """
    if _understands_escapes(stream):
        columns = os.get_terminal_size(stream.fileno()).columns or _size()[0]
        stream.write(" " * columns + "\r\x1b[K")
        stream.flush()


def _understands_escapes(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


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
def _on_last_row(stream: TextIO) -> Iterator[Show]:
    rows_reserved = 0

    def reserve(rows: int) -> None:
        nonlocal rows_reserved
        rows_reserved = rows
        # The newline scrolls if the cursor is on the last row; then move back to where the cursor was.
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
