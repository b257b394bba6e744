"""The public JSON of ``memfit check``, and of its baseline files.

docs/check.schema.json and docs/baseline.schema.json are generated from it.
"""

import json
from typing import Any

import msgspec

from memfit.errors import FileFormatError
from memfit.records import CheckedFigure, CheckVerdict, Figure, MemoryBaseline, MemoryCheck
from memfit.report.schema.encoding import SCHEMA_VERSION, encode


class BaselineJson(msgspec.Struct, frozen=True):
    """What ``memfit check --update`` writes. The fields are those of ``MemoryBaseline``."""

    schema: int
    command: tuple[str, ...]
    gpu: str
    memory: int
    """Bytes of the GPU, or of the budget."""
    steps: int
    """Training steps completed."""
    versions: dict[str, str]
    phase: str
    module: str
    """Where most was allocated."""
    peak: dict[str, int]
    """Peaks of ``allocated``, ``reserved`` and ``process``."""
    terms: dict[str, int]
    """What is allocated at the peak by category, and what the process holds outside PyTorch's allocator."""
    modules: dict[str, dict[str, int]]
    """Requested bytes at the peak, by module and category; the module is empty outside modules."""


class CheckJson(msgspec.Struct, frozen=True):
    """What ``memfit check --json`` writes."""

    schema: int
    verdict: CheckVerdict
    """``same``, ``grew``, ``fell``, ``does not fit`` or ``written`` (there was no baseline)."""
    tolerance: float
    """Share of a figure by which it may change."""
    run: BaselineJson
    """What this run held; with unlimited memory, if it does not fit."""
    needs: Figure
    """Bytes of the process at its peak; if it does not fit, on the smallest GPU on which it does."""
    peaks: tuple[CheckedFigure, ...]
    """The three peaks, changed or not; empty without a baseline."""
    grew: tuple[CheckedFigure, ...]
    """What grew by more than the tolerance: peaks, terms (``module`` is null), then modules."""
    fell: tuple[CheckedFigure, ...]
    """What fell by more than the tolerance, likewise."""
    differences: tuple[str, ...]
    """Sentences about what else differs from the baseline."""


def to_json(check: MemoryCheck) -> bytes:
    """Encode a check as one line of ASCII."""
    return encode(
        CheckJson(
            schema=SCHEMA_VERSION,
            verdict=check.verdict,
            tolerance=check.tolerance,
            run=_public(check.run),
            needs=check.needs,
            peaks=check.peaks,
            grew=check.grew,
            fell=check.fell,
            differences=check.differences,
        )
    )


def baseline_file(baseline: MemoryBaseline) -> bytes:
    """Encode a baseline for version control: a line for each figure, and one for each module."""
    fields: dict[str, Any] = msgspec.to_builtins(_public(baseline))
    lines = [f"  {json.dumps(name)}: {_value(value)}" for name, value in fields.items()]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode("ascii")


def read_baseline(content: bytes, name: str) -> MemoryBaseline:
    """Decode a baseline.

    Raises:
        FileFormatError: it is not one; the message calls it ``name``.
    """
    try:
        found = msgspec.json.decode(content, type=BaselineJson)
        return MemoryBaseline(*(getattr(found, field) for field in BaselineJson.__struct_fields__[1:]))
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise FileFormatError(
            f"Cannot read a baseline from {name}: {error}. Write one with memfit check --update."
        ) from None


def _public(baseline: MemoryBaseline) -> BaselineJson:
    fields = (getattr(baseline, name) for name in BaselineJson.__struct_fields__[1:])
    return BaselineJson(SCHEMA_VERSION, *fields)


def _value(value: Any) -> str:
    if not isinstance(value, dict):
        return json.dumps(value)
    inner = [f"    {json.dumps(key)}: {json.dumps(each)}" for key, each in value.items()]
    return "{\n" + ",\n".join(inner) + "\n  }" if inner else "{}"
