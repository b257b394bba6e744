"""The look of answers: their first lines, and tables of figures, which the HTML report draws, too."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memfit.records.command_as_typed import command_as_typed
from memfit.report.escape_control_characters import escaped


def print_answer_and_subject(answer: str, console: Console, subject: str) -> None:
    """Print the first lines of a result: the answer, what it is about, and an empty line."""
    console.print(Text(answer, style="bold"))
    console.print(Text(subject, style="dim"))
    console.print()


def subject_in_words(command: Sequence[str], *of: str, versions: Mapping[str, str]) -> str:
    """Return what an answer is about: the script, the GPU if one is given, the version of PyTorch.

    >>> subject_in_words(["a.py"], "T4", versions={"torch": "2.14.1"})
    'a.py · T4 · torch 2.14.1'
    """
    torch = f"torch {versions.get('torch', '?')}"
    return " · ".join(map(escaped, (command_as_typed(command)[0], *of, torch)))


def plain_table(kinds: str, *headings: str, header_style: str = "dim") -> Table:
    """Return an empty table without lines; without headings, it has no header.

    Args:
        kinds: a letter for each column, as in LaTeX: ``r`` stands on the right, ``l`` and ``w`` on the left;
            only ``w`` is wrapped.
        headings: of the columns.
        header_style: of the headings.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style=header_style)
    table.show_header = bool(headings)
    for kind, heading in zip_longest(kinds, headings, fillvalue=""):
        table.add_column(heading, justify="right" if kind == "r" else "left", no_wrap=kind != "w")
    return table


_BAR = 20  # characters of the longest bar
_EIGHTHS = " ▏▎▍▌▋▊▉"


def share_as_bar(share: float) -> str:
    """Return a bar of a share of the whole, from 0 to 1.

    >>> share_as_bar(0.27)
    '█████▍'
    """
    whole, eighths = divmod(round(share * _BAR * 8), 8)
    return "█" * whole + _EIGHTHS[eighths].strip()


@dataclass(frozen=True, slots=True)
class TableCell:
    """What one cell shows."""

    text: str
    bytes: int | None = None
    """The figure in full, if it is one."""
    warns: bool = False
    """Whether it asks for attention."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """The cells of a row. The first names it, and the last says where."""

    cells: tuple[TableCell, ...]
    marked: bool = False
    """Whether it is the row that the answer is about."""


@dataclass(frozen=True, slots=True)
class ReportTable:
    """Rows under headings."""

    headings: tuple[str, ...]
    numbers: tuple[str, ...]
    """The headings of columns of numbers."""
    rows: Sequence[TableRow]

    def in_terminal(self) -> Table:
        """Return the table as the terminal shows it."""
        kinds = "".join("r" if heading in self.numbers else "w" for heading in self.headings)
        table = plain_table(kinds, *self.headings)
        for row in self.rows:
            cells = [Text(cell.text, style="bold yellow" * cell.warns) for cell in row.cells]
            table.add_row(*cells, style="bold" * row.marked)
        return table
