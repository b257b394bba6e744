"""Read the file that ``memfit plan -o`` writes: what to change about a script and the allocator."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from memfit.analysis.script_change import PlannedRegion, PlannedStrategy, ScriptChange
from memfit.errors import FileFormatError
from memfit.input_files import read_input
from memfit.records import SCHEMA_VERSION, DividedBatches, Equality, OperationCounts, equality_of

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
    micro_batches: DividedBatches | None = None
    """How batches are divided; None if they are not."""
    fused: bool = False
    """Whether optimizers are created with ``fused=True``."""
    command: tuple[str, ...] = ()
    """What the plan was made for."""
    promised: Equality | None = None
    """What the file says that training under it computes; None if it does not say."""
    allocated: int | None = None
    """Most bytes allocated under it on the ghost; None if the file does not say."""
    operations: OperationCounts | None = None
    """Of the first step under it on the ghost; None if the file does not say."""
    nproc: int = 1
    """Ranks on each machine that it was made for."""
    nnodes: int = 1
    """Machines that it was made for."""
    models: tuple[str, ...] = ()
    """The models that it was made for: the class of each, and its optimizer's line."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of memfit, PyTorch and others that it was made with."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nproc * self.nnodes

    @property
    def is_sharded(self) -> bool:
        """Whether it has a script for one GPU train on several."""
        return "sharding" in self.settings

    @property
    def equality(self) -> Equality:
        """What training under it computes, compared with the script as written."""
        if self.promised is not None:
            return self.promised
        return equality_of(self.settings, rounds=self.micro_batches is not None or self.fused)

    def allocated_for(self, command: tuple[str, ...]) -> int | None:
        """Return the most bytes allocated for a command; None if the plan was made for another."""
        return self.allocated if command == self.command else None

    def operations_under(self, torch: str) -> OperationCounts | None:
        """Return the planned operations; None if the plan was made with another version of PyTorch."""
        return self.operations if self.versions.get("torch", torch) == torch else None

    def made_for(self, model: str) -> bool:
        """Whether a model of this class was planned for; True if the file names no models."""
        return not self.models or _class(model) in map(_class, self.models)

    @property
    def change(self) -> ScriptChange:
        """The change to be injected into a script; accumulation is made by skipping updates."""
        strategies = tuple(
            PlannedStrategy(field, tuple((name, _frozen(value)) for name, value in given.items()))
            for field, given in self.settings.items()
            if field != "accumulation" or self.micro_batches is None
        )
        divided = self.micro_batches
        if divided is None:
            return ScriptChange(strategies, self.optimizer, self.fused)
        return ScriptChange(
            strategies,
            self.optimizer,
            self.fused,
            divided.arguments,
            divided.loader,
            micro_batches=1 if divided.by_option else divided.count,
        )


def read_plan(path: Path) -> PlanFile:
    """Read a plan file: JSON with ``plan``; what else counts in it is ``allocator`` and ``optimizer``.

    Raises:
        FileFormatError: there is no such file, it holds no plan, or its schema is unknown.
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
    if (schema := found.get("schema", SCHEMA_VERSION)) != SCHEMA_VERSION:
        raise FileFormatError(
            f"Cannot read a plan from {path}: its schema is {schema!r:.40}, and this memfit reads "
            f"schema {SCHEMA_VERSION}. Install the memfit that wrote it, or make the plan again: "
            f"memfit plan -o {path} SCRIPT.py."
        )
    allocator, optimizer = found.get("allocator", ""), found.get("optimizer")
    if not isinstance(allocator, str) or "\0" in allocator:
        raise FileFormatError(f"Cannot read a plan from {path}: 'allocator' is not a string.")
    if not (optimizer is None or type(optimizer) is int):
        raise FileFormatError(f"Cannot read a plan from {path}: 'optimizer' is not an integer.")
    return PlanFile(settings, allocator, optimizer, **_optional(found, path))


_OPTIONAL: Mapping[str, tuple[str, Any]] = {
    "micro_batches": ("micro_batches", DividedBatches | None),
    "fused": ("fused", bool),
    "command": ("command", tuple[str, ...]),
    "promised": ("equality", Equality | None),
    "allocated": ("allocated", int | None),
    "operations": ("operations", OperationCounts | None),
    "nproc": ("nproc", int),
    "nnodes": ("nnodes", int),
    "models": ("models", tuple[str, ...]),
    "versions": ("versions", dict[str, str]),
}
"""By field of ``PlanFile``: its name in the file, and its type."""


def _optional(found: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return what a plan file may leave out, by field.

    Raises:
        FileFormatError: a value has the wrong type.
    """
    values = {}
    for of, (name, kind) in _OPTIONAL.items():
        if name in found:
            try:
                values[of] = msgspec.convert(found[name], kind)
            except msgspec.ValidationError as error:
                raise FileFormatError(f"Cannot read a plan from {path}: '{name}': {error}.") from None
    return values


def _class(model: str) -> str:
    return model.partition(" (")[0]


def _frozen(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return tuple(
        PlannedRegion(
            tuple(each.get("modules", ())),
            tuple(each.get("save_ops", ())),
            tuple(each.get("split_at", ())),
            each.get("recompute", "module"),
        )
        if isinstance(each, dict)
        else each
        for each in value
    )
