"""A console that breaks lines between words only.

A path or setting that is longer than a line runs over the edge, where the terminal continues it: it can be
copied in one piece. rich itself breaks such a word at the edge, or cuts it.
"""

import re
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_UNLIMITED = 10_000  # columns


class WholeWordsConsole(Console):
    """A console that breaks no word and no row of a table."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does; texts, which must have no markup, and tables stay within words."""
        super().print(*map(self._whole, objects), no_wrap=True, overflow="ignore", crop=False, **options)

    def _whole(self, found: Any) -> Any:
        if isinstance(found, Table):
            return _WholeTable(found)
        if isinstance(found, str):
            found = Text(found)
        return (
            found if self.soft_wrap or not isinstance(found, Text) else _wrap_between_words(found, self.width)
        )


class _WholeTable:
    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unlimited = options.update(width=_UNLIMITED, no_wrap=False)
        width = Measurement.get(console, unlimited, self._table).maximum
        yield from console.render(self._table, unlimited.update(width=width))


def _wrap_between_words(text: Text, width: int) -> Text:
    r"""Return a text whose lines have at most ``width`` columns, except those of a single longer word.

    >>> _wrap_between_words(Text("at /a/long/path:3 it ran out"), 10).plain
    'at\n/a/long/path:3\nit ran out'
    """
    lines = (
        part for line in text.split("\n", allow_blank=True) for part in line.divide(_breaks(line, width))
    )
    return Text("\n").join(_stripped(line) for line in lines)


def _breaks(line: Text, width: int) -> list[int]:
    """Return the positions of the words that begin a new line."""
    breaks: list[int] = []
    start = 0
    for word in re.finditer(r"\S+", line.plain):
        before = line.plain[start : word.start()]
        if before.strip() and cell_len(line.plain[start : word.end()]) > width:
            start = word.start()
            breaks.append(start)
    return breaks


def _stripped(line: Text) -> Text:
    line.rstrip()
    return line
