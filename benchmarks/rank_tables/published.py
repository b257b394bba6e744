"""What others measured on 2, 8 and 128 GPUs, against the same jobs on the ghost, one rank at a time.

The sets I to L of benchmarks/accuracy/rows.toml, which has the sources; ``python benchmarks/accuracy.py``
prints them with an explanation of every difference.
"""

from collections.abc import Iterator

from accuracy import Runs, cells, measure
from accuracy import rows as published_rows
from rank_tables.row import Row

COLUMNS = ("job", "published", "ghost", "difference")


def rows() -> Iterator[Row]:
    """Run each job once for each of its rows' ranks."""
    runs = Runs()
    for row in published_rows("IJKL")[0]:
        result = measure(row, runs)
        yield Row(cells(result), "" if result.met else f"more than {row.within} away")
