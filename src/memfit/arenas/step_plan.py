"""Plans of steps: offsets from two recordings of a step, for the steps that repeat it, and the file of plans.

Time counts allocations: allocation 4 is made at time 4; a tensor freed before allocation 7 is live until 7.
The step repeats, so time is a circle, and a gradient may live across its end; ``packing/buffer_lifetimes.py``
describes that.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from memfit.arenas.arena_library import LIVES
from memfit.atomic_files import write_output_file
from memfit.errors import FileFormatError
from memfit.input_files import read_input_file
from memfit.packing.best_packing import pack_buffers
from memfit.packing.buffer_lifetimes import Buffers, Column

FORMAT = "memfit plans"
VERSION = 1
_MOST_BYTES = 1 << 46
_MAX_FILE = 1 << 26  # bytes: plans of more than two million tensors
SECONDS = 2.0
"""Time limit of the packing. Plans of real steps are found in milliseconds."""


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """Offsets for the allocations of a step, in their order."""

    size: Column
    """Bytes requested."""
    offset: Column
    """Offset in the arena; -1 for an allocation left to the default allocator, because it outlives a step or
    other streams use it."""
    height: int
    """Arena size that the plan needs, in bytes."""
    bound: int
    """Lower bound on the height of any plan for this step, in bytes."""
    unshared: int
    """Sum of the placed allocations, in bytes: what they take if no memory is reused."""


NO_PLAN = StepPlan(np.zeros(0, np.int64), np.zeros(0, np.int64), 0, 0, 0)


def placeable_lifetimes(
    older: Column, newer: Column, *, follows: bool, alignment: int
) -> tuple[Buffers, Column]:
    """Return the buffers that can be placed, and the indices of their allocations.

    Args:
        older: a recorded step: rows of size, until and next.
        newer: the next recording of the same step, with the same sizes.
        follows: whether the newer step came right after the older one. Otherwise it is unknown how long steps
            of other kinds kept the tensors that the older one left.
        alignment: sizes are rounded up to a multiple of this many bytes.

    >>> step = np.array(
    ...     [[100, 2, -1], [64, -1, 0], [8, -1, -1]]
    ... )  # the second outlives the step, the third is never freed
    >>> buffers, which = placeable_lifetimes(step, step, follows=True, alignment=64)
    >>> buffers.lower.tolist(), buffers.upper.tolist(), buffers.size.tolist(), which.tolist()
    ([0, 1], [2, 3], [128, 64], [0, 1])
    """
    size, until, following = older.T
    newer_until = newer[:, 1]
    born = np.arange(len(size))
    within = (until > born) & (newer_until > born)
    across_the_end = (
        (until == LIVES) & (newer_until == LIVES) & (following >= 0) & (following <= born) & follows
    )
    upper = np.where(within, np.maximum(until, newer_until), len(size) + following)
    which = np.flatnonzero(within | across_the_end)
    rounded = -(-size[which] // alignment) * alignment
    names = tuple(map(str, which.tolist()))
    return Buffers(which, upper[which], rounded, names, len(size)), which


def plan_step_offsets(older: Column, newer: Column, *, follows: bool, alignment: int) -> StepPlan:
    """Plan a step from two recordings of it: see ``placeable_lifetimes``."""
    buffers, which = placeable_lifetimes(older, newer, follows=follows, alignment=alignment)
    offset = np.full(len(older), -1, np.int64)
    size = np.ascontiguousarray(older[:, 0])
    if not len(buffers):
        return StepPlan(size, offset, 0, 0, 0)
    packing = pack_buffers(buffers, seconds=SECONDS)
    offset[which] = packing.offset
    return StepPlan(size, offset, packing.height, packing.bound, int(buffers.size.sum()))


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


def batch_signature(batch: Any) -> Iterator[str]:
    """Yield the dtype and shape of each tensor in a batch, and its other numbers and strings.

    >>> list(batch_signature({"x": [np.zeros((2, 3), np.float32)], "length": 7}))
    ['float32[2, 3]', '7']
    """
    if hasattr(batch, "shape") and hasattr(batch, "dtype"):
        yield f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape)}"
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from batch_signature(part)
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from batch_signature(part)
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


def write_step_plans(plans: Mapping[StepKey, StepPlan], path: Path) -> None:
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
    write_output_file(path, msgspec.json.encode(_File(FORMAT, VERSION, rows)) + b"\n")


def read_step_plans(path: Path, alignment: int) -> dict[StepKey, StepPlan]:
    """Read plans from a file; return an empty dictionary if the file does not exist yet."""
    if not path.exists():
        return {}
    try:
        found = msgspec.json.decode(read_input_file(path, _MAX_FILE), type=_File)
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
