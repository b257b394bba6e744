"""Places of a run in words: ranks, locations in the script, and paths as seen from the working folder."""

import os
from pathlib import Path

from memfit.analysis.fold_module_paths import format_ranges
from memfit.records import ScriptLocation, Stage
from memfit.report.escape_control_characters import escaped


def short_path(line: str) -> str:
    """Shorten ``file:line`` relative to the working folder, or to ``~`` in the home folder.

    >>> short_path(str(Path.cwd() / "train.py") + ":3")
    'train.py:3'
    """
    for folder, name in ((Path.cwd(), ""), (Path.home(), "~" + os.sep)):
        prefix = str(folder) + os.sep
        if line.startswith(prefix):
            return name + line.removeprefix(prefix)
    return line


def location_in_words(place: ScriptLocation) -> str:
    """Return where the script was, in one line; outside modules, with the function."""
    function = f" in {escaped(place.function)}" if place.function and not place.module else ""
    trains = not place.stage or place.stage.startswith(Stage.TRAINING)  # elsewhere, a step has no meaning
    step = f"step {place.step}" if place.step and trains else ""
    parts = [
        place.stage,
        step,
        place.phase if trains or place.module else "",
        escaped(place.module),
        escaped(place.op),
        f"{escaped(short_path(place.line))}{function}",
    ]
    return " · ".join(part for part in parts if part)


def location_in_cell(place: ScriptLocation) -> str:
    """Return the phase, the module and the line of a place, for a cell of a table."""
    parts = (
        place.phase,
        escaped(place.module),
        escaped(short_path(place.line)),
    )
    return " · ".join(part for part in parts if part)


def format_ranks(ranks: tuple[int, ...]) -> str:
    """Return ranks as people write them; runs of neighbours as first and last.

    >>> format_ranks((0, 2, 3, 4, 8))
    '0, 2-4, 8'
    """
    return format_ranges(ranks, ", ")
