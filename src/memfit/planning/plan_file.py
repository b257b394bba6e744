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
    optimizer: int | None
    """The plan is for the models of this optimizer, counted from 0; None for all models."""

    @property
    def strategies(self) -> tuple[PlannedStrategy, ...]:
        """The strategies, to be injected into a script."""
        return tuple(
            PlannedStrategy(field, tuple((name, _frozen(value)) for name, value in given.items()))
            for field, given in self.settings.items()
        )


def read_plan(path: Path) -> PlanFile:
    """Read a plan file: JSON with ``plan``; what else counts in it is ``allocator`` and ``optimizer``.

    Raises:
        FileFormatError: there is no such file, or it holds no plan.
    """
    content = read_input(path, _MAX_FILE)
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"Cannot read a plan from {path}: it is not valid JSON ({error}).") from None
    settings = found.get("plan") if isinstance(found, dict) else None
    if not isinstance(settings, dict) or not all(isinstance(each, dict) for each in settings.values()):
        raise FileFormatError(
            f"Cannot read a plan from {path}: it has no settings under 'plan'. Write one with "
            f"memfit plan -o {path} SCRIPT.py."
        )
    allocator, optimizer = found.get("allocator", ""), found.get("optimizer")
    if not isinstance(allocator, str) or "\0" in allocator:
        raise FileFormatError(f"Cannot read a plan from {path}: 'allocator' is not a string.")
    if not (optimizer is None or type(optimizer) is int):
        raise FileFormatError(f"Cannot read a plan from {path}: 'optimizer' is not an integer.")
    return PlanFile(settings, allocator, optimizer)


def _frozen(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return tuple(
        PlannedRegion(tuple(each.get("modules", ())), tuple(each.get("save_ops", ())))
        if isinstance(each, dict)
        else each
        for each in value
    )
