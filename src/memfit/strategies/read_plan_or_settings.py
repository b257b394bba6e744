"""Read what ``--plan`` takes: a file that ``memfit plan -o`` wrote, or a file of settings."""

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from memfit.errors import UsageError
from memfit.planning.plan_file import PlanFile, read_plan
from memfit.records import Change, equality_of
from memfit.strategies.settings_files import is_plan


def read_plan_or_settings(path: Path) -> PlanFile:
    """Return the plan in a file; of a file of settings, what they change about a script.

    Raises:
        FileFormatError: it cannot be read.
        UsageError: a setting is unknown or invalid, or applies to the training loop and not to a model.
    """
    if is_plan(path):
        return read_plan(path)
    from memfit.strategies.read_configuration import configure  # not before: it imports torch

    found = configure(path)
    if found.max_grad_norm is not None or found.arena is not None:
        what = "the arena" if found.arena is not None else "clipping of gradients"
        raise UsageError(
            f"{path} has settings of {what}, which belongs to the training loop: memfit changes a script's "
            "model and optimizer. Leave them out."
        )
    change = Change(
        {
            each.name: _given(settings)
            for each in fields(found.plan)
            if (settings := getattr(found.plan, each.name)) is not None
        }
    )
    if not change.plan:
        raise UsageError(f"{path} has no setting of memfit.Plan. Settings, and what they became:\n{found}")
    return PlanFile(change, equality_of(change))


def _given(settings: Any) -> dict[str, Any]:
    """Return the fields of a strategy that differ from its defaults."""
    values = asdict(settings)
    return {each.name: values[each.name] for each in fields(settings) if values[each.name] != each.default}
