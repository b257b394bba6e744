"""A row of a table of ``benchmarks/ranks.py``."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """The cells of one row, and what is wrong with it."""

    cells: tuple[str, ...]
    failure: str = ""
    """What the section requires and the row does not show; empty if all is as required."""
