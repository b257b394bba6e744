"""The public JSON of ``memfit diff``; docs/diff.schema.json is generated from it."""

import msgspec

from memfit.records import GroupBy, RowChange, RunDifference, ScriptLocation
from memfit.report.schema.encoding import SCHEMA_VERSION, encode


class DifferenceJson(msgspec.Struct, frozen=True):
    """What ``memfit diff --json`` writes. The fields are those of ``RunDifference``."""

    schema: int
    at: str
    by: GroupBy
    places: tuple[ScriptLocation, ScriptLocation]
    allocated: tuple[int, int]
    reserved: tuple[int, int]
    outside: tuple[int, int]
    rows: tuple[RowChange, ...]
    names: tuple[str, str]
    """``before`` and ``after``, or for two ranks of a job ``rank 0`` and ``rank 7``."""


def to_json(difference: RunDifference) -> bytes:
    """Encode a difference as one line of ASCII."""
    fields = (getattr(difference, name) for name in DifferenceJson.__struct_fields__[1:])
    return encode(DifferenceJson(SCHEMA_VERSION, *fields))
