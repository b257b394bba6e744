"""The key of a kind of step, and the file that keeps plans for later runs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from memfit.arenas.step_plan import StepPlan
from memfit.atomic_files import write_bytes
from memfit.errors import FileFormatError
from memfit.input_files import read_input

FORMAT = "memfit plans"
VERSION = 1
_MOST_BYTES = 1 << 46
_MAX_FILE = 1 << 26  # bytes: plans of more than two million tensors


@dataclass(frozen=True, slots=True)
class StepKey:
    """What determines a step's allocations, as far as it is known before the step runs."""

    kind: str
    """``train`` or ``test``."""
    shapes: tuple[str, ...]
    """Dtype and shape of each tensor in the batch: ``float32[32, 3, 224, 224]``."""
    settings: tuple[tuple[str, str], ...]
    """Versions, threads, the device, and the PyTorch settings that change what operations request."""
    is_first: bool = False
    """Whether it is the first step of its kind in a process that keeps plans in a file."""

    def __str__(self) -> str:
        batch = f" with {', '.join(self.shapes)}" if self.shapes else ""
        first = "first " if self.is_first else ""
        return f"{first}{'training' if self.kind == 'train' else 'test'} step{batch}"


def shapes(batch: Any) -> Iterator[str]:
    """Yield the dtype and shape of each tensor in a batch, and its other numbers and strings.

    >>> list(shapes({"x": [np.zeros((2, 3), np.float32)], "length": 7}))
    ['float32[2, 3]', '7']
    """
    if hasattr(batch, "shape") and hasattr(batch, "dtype"):
        yield f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape)}"
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from shapes(part)
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from shapes(part)
    elif isinstance(batch, bool | int | str):
        yield str(batch)


class _SavedPlan(msgspec.Struct, forbid_unknown_fields=True):
    kind: str
    shapes: list[str]
    settings: dict[str, str]
    is_first: bool
    size: list[int]
    offset: list[int]
    height: int
    bound: int
    unshared: int


class _File(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    version: int
    plans: list[_SavedPlan]


def write_plans(plans: Mapping[StepKey, StepPlan], path: Path) -> None:
    """Write plans to a file atomically.

    Raises:
        OutputError: the file cannot be written.
    """
    rows = [
        _SavedPlan(
            key.kind,
            list(key.shapes),
            dict(key.settings),
            key.is_first,
            plan.size.tolist(),
            plan.offset.tolist(),
            plan.height,
            plan.bound,
            plan.unshared,
        )
        for key, plan in plans.items()
    ]
    write_bytes(path, msgspec.json.encode(_File(FORMAT, VERSION, rows)) + b"\n")


def read_plans(path: Path, alignment: int) -> dict[StepKey, StepPlan]:
    """Read plans from a file; return an empty dictionary if the file does not exist yet.

    Raises:
        FileFormatError: the file holds no plans, or an invalid one.
    """
    if not path.exists():
        return {}
    try:
        found = msgspec.json.decode(read_input(path, _MAX_FILE), type=_File)
    except msgspec.DecodeError as error:
        raise FileFormatError(f"Cannot read plans from {path}: {error}. Name another file.") from None
    if (found.format, found.version) != (FORMAT, VERSION):
        raise FileFormatError(
            f"{path} holds no plans that this version of memfit can read. Remove it, or name another file."
        )
    return {_key(row): _plan(row, alignment, path) for row in found.plans}


def _key(row: _SavedPlan) -> StepKey:
    return StepKey(row.kind, tuple(row.shapes), tuple(row.settings.items()), row.is_first)


def _plan(row: _SavedPlan, alignment: int, path: Path) -> StepPlan:
    numbers = (*row.size, *row.offset, row.height, row.bound, row.unshared)
    if len(row.size) == len(row.offset) and all(-1 <= number < _MOST_BYTES for number in numbers):
        size, offset = np.array(row.size, np.int64), np.array(row.offset, np.int64)
        placed = offset >= 0
        is_inside = ((offset + size)[placed] <= row.height).all()
        if (size > 0).all() and (offset[placed] % alignment == 0).all() and is_inside:
            return StepPlan(size, offset, row.height, row.bound, row.unshared)
    raise FileFormatError(
        f"{path} holds an invalid plan. Remove the file; memfit then records the steps again."
    )
