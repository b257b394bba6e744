"""A table of figures as data, made once: the terminal and the HTML report draw the same rows."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, slots=True)
class FigureCell:
    """What one cell shows."""

    text: str
    bytes: int | None = None
    """The figure in full, if it is one."""
    warns: bool = False
    """Whether it asks for attention."""


@dataclass(frozen=True, slots=True)
class FigureRow:
    """The cells of a row. The first names it, and the last says where."""

    cells: tuple[FigureCell, ...]
    marked: bool = False
    """Whether it is the row that the answer is about."""


@dataclass(frozen=True, slots=True)
class FigureTable:
    """Rows under headings."""

    headings: tuple[str, ...]
    numbers: tuple[str, ...]
    """The headings of columns of numbers."""
    rows: Sequence[FigureRow]

    def in_terminal(self) -> Table:
        """Return the table as the terminal shows it."""
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        for heading in self.headings:
            number = heading in self.numbers
            table.add_column(heading, justify="right" if number else "left", no_wrap=number)
        for row in self.rows:
            cells = [Text(cell.text, style="bold yellow" * cell.warns) for cell in row.cells]
            table.add_row(*cells, style="bold" * row.marked)
        return table
