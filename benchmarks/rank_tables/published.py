"""What others measured on 2, 8 and 128 GPUs, against the same jobs on the ghost, one rank at a time.

The sets I to L of benchmarks/accuracy/rows.toml, which has the sources; ``python benchmarks/accuracy.py``
prints them with an explanation of every difference. Required: what each row allows, and of a range, that its
upper end is at most 5 % above what was measured.
"""

from collections.abc import Iterator

from accuracy import Runs, cells, measure
from accuracy import rows as published_rows
from rank_tables.row import Row

UPPER_END = 5
"""Percent by which the upper end of a range may exceed what was measured."""
COLUMNS = ("job", "published", "ghost", "difference")


def rows() -> Iterator[Row]:
    """Run each job once for each of its rows' ranks."""
    runs = Runs()
    for row in published_rows("IJKL")[0]:
        result = measure(row, runs)
        limit = row.within if result.lower is None else min(row.within, UPPER_END)
        fails = not result.met or abs(result.difference) > limit
        yield Row(cells(result), f"more than {limit} away" * fails)
