"""Read the file that ``memfit plan -o`` writes: a change of a script, and what memfit found under it."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from memfit.errors import FileFormatError
from memfit.input_files import read_input_file
from memfit.records import (
    SCHEMA_VERSION,
    Change,
    Equality,
    OperationCounts,
    PlanRun,
    ScriptPlan,
    equality_of,
)
from memfit.records.own_sharding import unknown_call_options

_OF_CHANGE = ("plan", "allocator", "micro_batches", "fused", "own_sharding", "optimizer")
_OF_SEARCH = {
    "schema",
    "time_rule",
    "is_tight",
    *(each.name for of in (ScriptPlan, PlanRun) for each in fields(of)),
}
"""What ``memfit plan -o`` writes beside what training under the plan takes: how it was found."""
_MAX_FILE = 16 << 20  # bytes; a plan of 1,000 modules has less than one MiB


@dataclass(frozen=True, slots=True)
class PlanFile:
    """What a plan file says; all but ``change`` has the file's names."""

    change: Change
    """What to do: the file's ``plan``, ``allocator``, ``micro_batches``, ``fused``, ``own_sharding`` and
    ``optimizer``."""
    equality: Equality
    """What training under it computes, compared with the script as written."""
    command: tuple[str, ...] = ()
    """What the plan was made for."""
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
        return "sharding" in self.change.plan

    def allocated_for(self, command: tuple[str, ...]) -> int | None:
        """Return the most bytes allocated for a command; None if the plan was made for another."""
        return self.allocated if command == self.command else None

    def operations_under(self, torch: str) -> OperationCounts | None:
        """Return the planned operations; None if the plan was made with another version of PyTorch."""
        return self.operations if self.versions.get("torch", torch) == torch else None

    def made_for(self, model: str) -> bool:
        """Whether a model of this class was planned for; True if the file names no models."""
        return not self.models or _class(model) in map(_class, self.models)


def read_plan(path: Path) -> PlanFile:
    """Read a plan file: JSON with ``plan``; what else counts in it is ``allocator`` and ``optimizer``.

    Raises:
        FileFormatError: there is no such file, it holds no plan, or its schema is unknown.
    """
    content = read_input_file(path, _MAX_FILE)
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"Cannot read a plan from {path}: it is not valid JSON ({error}).") from None
    settings = found.get("plan") if isinstance(found, dict) else None
    if faults := list(_faults(settings)):
        raise FileFormatError(
            f"Cannot read a plan from {path}: {faults[0]}. Write one with memfit plan -o {path} SCRIPT.py."
        )
    if (schema := found.get("schema", SCHEMA_VERSION)) != SCHEMA_VERSION:
        raise FileFormatError(
            f"Cannot read a plan from {path}: its schema is {schema!r:.40}, and this memfit reads "
            f"schema {SCHEMA_VERSION}. Install the memfit that wrote it, or make the plan again: "
            f"memfit plan -o {path} SCRIPT.py."
        )
    said = tuple(each.name for each in fields(PlanFile) if each.name != "change")
    if others := sorted(found.keys() - {*_OF_CHANGE, *said, *_OF_SEARCH}):
        raise FileFormatError(
            f"Cannot read a plan from {path}: {', '.join(map(repr, others)):.200} beside 'plan' is nothing "
            "that memfit plan writes. Move settings into 'plan', or leave 'plan' out for a file of settings."
        )
    allocator, optimizer = found.get("allocator", ""), found.get("optimizer")
    if not isinstance(allocator, str) or "\0" in allocator:
        raise FileFormatError(f"Cannot read a plan from {path}: 'allocator' is not a string.")
    if not (optimizer is None or type(optimizer) is int):
        raise FileFormatError(f"Cannot read a plan from {path}: 'optimizer' is not an integer.")
    given = _values(found, _OF_CHANGE, Change, path)
    divided = given.get("micro_batches")
    if divided is not None:
        given |= {"arguments": divided.arguments, "loader": divided.loader}
    change = Change(**given)
    if unknown := unknown_call_options(change.own_sharding):
        raise FileFormatError(
            f"Cannot read a plan from {path}: 'own_sharding': memfit cannot change {unknown[0]}. Write that "
            "in the script."
        )
    if found.get("equality") is None:
        found["equality"] = equality_of(change)
    return PlanFile(change, **_values(found, said, PlanFile, path))


def _faults(settings: Any) -> Iterator[str]:
    if not isinstance(settings, dict):
        yield "it has no settings under 'plan'"
        return
    for name, each in settings.items():
        if not isinstance(each, dict):
            yield f"under 'plan', {name!r:.40} is {each!r:.40}, and not an object of settings"


def _values(found: Mapping[str, Any], names: Iterable[str], of: type, path: Path) -> dict[str, Any]:
    """Return those fields of a class that a plan file has, under the same names.

    Raises:
        FileFormatError: a value has the wrong type.
    """
    types, values = get_type_hints(of), {}
    for name in filter(found.__contains__, names):
        try:
            values[name] = msgspec.convert(found[name], types[name])
        except msgspec.ValidationError as error:
            raise FileFormatError(f"Cannot read a plan from {path}: '{name}': {error}.") from None
    return values


def _class(model: str) -> str:
    return model.partition(" (")[0]
