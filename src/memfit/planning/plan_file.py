"""Read the file that ``memfit plan -o`` writes: its settings, and the allocator's."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.analysis.script_change import PlannedRegion, PlannedStrategy
from memfit.errors import FileFormatError
from memfit.input_files import read_input

_MAX_FILE = 16 << 20  # bytes; a plan of 1,000 modules has less than one MiB


@dataclass(frozen=True, slots=True)
class PlanFile:
    """What a plan file says to do."""

    settings: Mapping[str, Any]
    """By field of a ``memfit.Plan``: the settings of a strategy."""
    allocator: str
    """``PYTORCH_ALLOC_CONF``; empty for the script's own."""

    @property
    def strategies(self) -> tuple[PlannedStrategy, ...]:
        """The strategies, to be injected into a script."""
        return tuple(
            PlannedStrategy(field, tuple((name, _frozen(value)) for name, value in given.items()))
            for field, given in self.settings.items()
        )


def read_plan(path: Path) -> PlanFile:
    """Read a plan file: JSON with ``plan``, and nothing else that matters but ``allocator``.

    Raises:
        FileFormatError: there is no such file, or it holds no plan.
    """
    content = read_input(path, _MAX_FILE)
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"Cannot read a plan from {path}: it is not valid JSON ({error}).") from None
    settings = found.get("plan") if isinstance(found, dict) else None
    allocator = found.get("allocator", "") if isinstance(found, dict) else ""
    if not isinstance(settings, dict) or not all(isinstance(each, dict) for each in settings.values()):
        raise FileFormatError(
            f"Cannot read a plan from {path}: it has no settings under 'plan'. Write one with "
            f"memfit plan -o {path} SCRIPT.py."
        )
    if not isinstance(allocator, str) or "\0" in allocator:
        raise FileFormatError(f"Cannot read a plan from {path}: 'allocator' is not a string.")
    return PlanFile(settings, allocator)


def _frozen(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return tuple(
        PlannedRegion(tuple(each.get("modules", ())), tuple(each.get("save_ops", ())))
        if isinstance(each, dict)
        else each
        for each in value
    )
