"""What killed_ranks.py and two_machines.py report of a job."""

from typing import NamedTuple


class Row(NamedTuple):
    """The figures of a job, and what is wrong with it."""

    cells: tuple[str, ...]
    failure: str = ""
    """Empty if all is as required."""
