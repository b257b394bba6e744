"""The public JSON of every result, and its JSON Schema.

Both follow from the records: an object has the fields of its record, in their order, and inner records become
inner objects. ``_OMITTED`` and ``_IN_PLACE_OF`` list what differs. Byte counts are integers.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import cache, reduce
from operator import or_
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from memfit.errors import FileFormatError
from memfit.records import (
    SCHEMA_VERSION,
    AllocatorComparison,
    BatchRun,
    ComparedRun,
    DeviceUse,
    DryRun,
    Equality,
    EquivalentRanks,
    Explanation,
    FailedMalloc,
    GpusFor,
    GradientComparison,
    MaxBatch,
    MemoryBaseline,
    Note,
    OutOfMemory,
    PeakByBatchSize,
    PlanRun,
    ScriptLocation,
    ScriptPlan,
    SettingOutcome,
    StageUse,
    StepTime,
    Term,
    Verification,
)


@dataclass(frozen=True, slots=True)
class _Inner:
    """An object that is no record."""

    name: str
    description: str
    paths: Mapping[str, str]


_Source = str | _Inner
"""Where a value comes from: a path of attributes (``place.phase``), or an object of several of them."""


def _of(field: str, *names: str) -> dict[str, _Source]:
    """Return fields of a field's record, under their own names."""
    return {name: f"{field}.{name}" for name in names}


_PLACE = _of("place", "phase", "module", "line")
_WHOLE_PLACE = ("step", "phase", "module", "op", "line", "function", "stage")
_OMITTED: Mapping[type, tuple[str, ...]] = {
    DeviceUse: ("context", "nccl", "context_spread", "race"),
    DryRun: ("peak_reserved", "peak_process", "peak_place", "resumed"),
    Explanation: ("page",),
    Note: ("sizes", "workspaces", "objects", "bound", "activations"),
    PlanRun: ("reserved", "terms", "compiled", "operations"),
    ScriptPlan: ("ran",),
    SettingOutcome: ("memory_fraction",),
}
"""By record: the fields that nothing in the JSON stands for."""
_IN_PLACE_OF: Mapping[type, Mapping[str, Mapping[str, _Source]]] = {
    AllocatorComparison: {
        "outcomes": {"settings": "outcomes"},
        "recommended": {"recommended": "recommended.setting.name"},
    },
    BatchRun: {"place": _PLACE},
    ComparedRun: {"place": _PLACE},
    DeviceUse: {
        "total": {"total": "total.bytes"},
        "driver": {"driver_reserved": "driver.bytes"},
    },
    DryRun: {
        "peak_allocated": {
            "peak": _Inner(
                "Peak",
                "The peaks of the run, and where the script was at the peak of allocated memory.",
                {
                    "allocated": "peak_allocated",
                    "reserved": "peak_reserved",
                    "process": "peak_process.bytes",  # what nvidia-smi would show for the process
                    **{name: f"peak_place.{name}" for name in _WHOLE_PLACE},
                },
            )
        },
        "bounds": {"upper_bound": "bound"},
    },
    Explanation: {"summary": {"*": "summary"}},
    GpusFor: {
        "plans": {"gpus": "plans"},
        "steps_total": {name: name for name in ("steps_total", "hours", "costs")},
    },
    PeakByBatchSize: {"scan": _of("scan", "where", "seen", "of", "ended", "largest", "median")},
    MaxBatch: {"device": {"device": "device", "budget": "budget"}},
    OutOfMemory: {"place": _of("place", *_WHOLE_PLACE)},
    PlanRun: {
        "change": _of("change", "plan", "allocator", "micro_batches", "fused", "own_sharding"),
        "place": _PLACE,
    },
    EquivalentRanks: {"place": _PLACE},
    ScriptPlan: {
        "chosen": {
            **_of("chosen.change", "plan", "allocator", "micro_batches", "fused", "own_sharding"),
            **_of("chosen", "equality", "needs", "allocated", "operations", "time", "rank"),
        },
        "rule": {"time_rule": "rule"},
        "uncertainty": {"is_tight": "is_tight"},
    },
    SettingOutcome: {
        "setting": {"setting": "setting.name"},
        "replay": _of(
            *("replay", "fits", "peak_allocated", "peak_reserved", "calls", "calls_per_step", "failure")
        ),
        "smallest": {"smallest_capacity": "smallest"},
    },
    StageUse: {"stage": {"name": "stage"}, "process": {"process": "process.bytes"}, "place": _PLACE},
    StepTime: {
        "host_basis": {name: name for name in ("host_basis", "is_bound_by_host")},
        "tokens": {name: name for name in ("tokens", "samples_per_second", "tokens_per_second")},
    },
    Term: {"figure": _of("figure", "bytes", "provenance", "source")},
}
"""By record and field: the names and sources of what stands in place of the field. With the name ``*``, the
fields of an inner record do.

A value whose path ends early, in None, is null; a text is then empty, and a flag is false."""

_TYPES: Mapping[tuple[type, str], Any] = {
    (AllocatorComparison, "recommended"): str | None,  # the default settings have an empty name
    (ComparedRun, "provenance"): str,
    (DeviceUse, "machine"): str,
    (FailedMalloc, "where"): ScriptLocation,  # known by the time that the result is complete
    (GradientComparison, "largest"): float | None,  # null stands for a number that is not finite
    (Note, "provenance"): str,
    (PlanRun, "time"): float | None,
    (ScriptPlan, "equality"): Equality | None,
    (Verification, "bound"): float | None,
    (StageUse, "name"): str,
}
"""Types in the schema, by record and public name, where they do not follow from the records."""


def result_to_json(result: Any) -> bytes:
    """Encode a result as one line of ASCII.

    With the standard library: a file name that is not UTF-8 reaches Python as lone surrogates, which
    msgspec rejects and JSON can express.
    """
    return json.dumps(public_json_value(result), separators=(",", ":"), allow_nan=False).encode("ascii")


def public_json_value(value: Any) -> Any:
    """Return what stands for a value in the public JSON: dictionaries, lists, texts and numbers."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: field.of(value) for field in _public_fields(type(value))}
    if isinstance(value, Mapping):
        return {str(key): public_json_value(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [public_json_value(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def result_json_schema(result: type) -> bytes:
    """Return the JSON Schema of a result."""
    return msgspec.json.format(msgspec.json.encode(msgspec.json.schema(public_json_type(result))), indent=2)


@cache
def public_json_type(record: type) -> type[msgspec.Struct]:
    """Return the type of the JSON of a record, for its schema and for reading it back."""
    shapes = [(field.name, field.type) for field in _public_fields(record)]
    return msgspec.defstruct(
        record.__name__, shapes, namespace={"__doc__": _description(record) or record.__doc__}, frozen=True
    )


def _description(record: type) -> str:
    """Return what the JSON Schema says of a result that a command writes; empty for other records."""
    return getattr(record, "json_description", "")


@dataclass(frozen=True, slots=True)
class _PublicField:
    """A field of an object in the public JSON."""

    name: str
    type: Any
    """Its type in the schema."""
    of: Callable[[Any], Any]
    """Returns its public value, given the record."""


@cache
def _public_fields(record: type) -> tuple[_PublicField, ...]:
    found = [_PublicField("schema", int, lambda _: SCHEMA_VERSION)] if _description(record) else []
    replaced = _IN_PLACE_OF.get(record, {})
    omitted = _OMITTED.get(record, ())
    for field in (field for field in fields(record) if field.name not in omitted):
        for name, source in replaced.get(field.name, {field.name: field.name}).items():
            if name == "*":
                found += _inlined(record, field.name)
            elif isinstance(source, _Inner):
                found.append(_inner_object(record, name, source))
            else:
                found.append(_at_path(record, name, source))
    return tuple(found)


def _inlined(record: type, field: str) -> Iterator[_PublicField]:
    def inside(of: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda value: of(getattr(value, field))

    for inner in _public_fields(_attribute_type(record, field)):
        yield replace(inner, of=inside(inner.of))


def _inner_object(record: type, name: str, inner: _Inner) -> _PublicField:
    parts = [_at_path(record, each, path) for each, path in inner.paths.items()]
    shape = msgspec.defstruct(
        inner.name, [(part.name, part.type) for part in parts], namespace={"__doc__": inner.description}
    )
    return _PublicField(name, shape, lambda value: {part.name: part.of(value) for part in parts})


def _at_path(record: type, name: str, path: str) -> _PublicField:
    *before, last = path.split(".")
    owner, early = record, False
    for attribute in before:
        kinds = set(_alternatives(_attribute_type(owner, attribute)))
        early |= NoneType in kinds
        (owner,) = kinds - {NoneType}
    shape = _TYPES.get((record, name)) or _attribute_type(owner, last)
    if before and isinstance(shape, type) and issubclass(shape, Enum):
        shape = str
    absent = {str: "", bool: False}.get(shape)
    if early and absent is None:
        shape |= None

    def value_of(value: Any) -> Any:
        for attribute in before:
            if (value := getattr(value, attribute)) is None:
                return absent
        return public_json_value(getattr(value, last))

    return _PublicField(name, _public_shape(shape), value_of)


def _attribute_type(record: type, name: str) -> Any:
    """Return the type of a record's field or property."""
    found = getattr(record, name, None)
    return (
        get_type_hints(found.fget)["return"] if isinstance(found, property) else get_type_hints(record)[name]
    )


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)


def _public_shape(annotation: Any) -> Any:
    """Return an annotation with the public types of the records in it."""
    if isinstance(annotation, type) and is_dataclass(annotation):
        return public_json_type(annotation)
    shapes = tuple(map(_public_shape, get_args(annotation)))
    if isinstance(annotation, UnionType):
        return reduce(or_, shapes)
    origin = get_origin(annotation)
    return annotation if origin is None else (dict if origin is Mapping else origin)[shapes]


# ---- baselines of memfit check ----------------------------------------------------------------------------


def baseline_to_json(baseline: MemoryBaseline) -> bytes:
    """Encode a baseline for version control: a line for each figure, and one for each module."""
    lines = [
        f"  {json.dumps(name)}: {_by_lines(value)}" for name, value in public_json_value(baseline).items()
    ]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode("ascii")


def baseline_from_json(content: bytes, name: str) -> MemoryBaseline:
    """Decode a baseline."""
    try:
        found = msgspec.json.decode(content, type=public_json_type(MemoryBaseline))
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise FileFormatError(
            f"Cannot read a baseline from {name}: {error}. Write one with memfit check --update."
        ) from None
    return MemoryBaseline(*(getattr(found, field.name) for field in fields(MemoryBaseline)))


def _by_lines(value: Any) -> str:
    if not isinstance(value, dict):
        return json.dumps(value)
    inner = [f"    {json.dumps(key)}: {json.dumps(each)}" for key, each in value.items()]
    return "{\n" + ",\n".join(inner) + "\n  }" if inner else "{}"
