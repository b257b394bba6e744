"""The public JSON of ``memfit replay`` and ``memfit allocator``; docs/replay.schema.json is made from it.

What ``schema.py`` promises of a dry run's holds of it, too.
"""

import json

import msgspec

from memfit.records import AllocatorComparison, CallRates, DriverCalls, ScriptLocation, SettingOutcome
from memfit.report.schema.dry_run_schema import SCHEMA, Remark, remark


class Failed(msgspec.Struct, frozen=True):
    """The malloc that fails under a setting."""

    event: int
    """Of the trace's history."""
    requested: int
    free: int
    """Bytes that the device has left then, whether or not they may be used."""
    where: ScriptLocation


class Row(msgspec.Struct, frozen=True):
    """How a trace fares under a setting."""

    setting: str
    current: bool
    """Whether it is what the trace was made with."""
    fits: bool
    peak_allocated: int
    """Up to where it fails, if it does."""
    peak_reserved: int
    smallest_capacity: int | None
    """Bytes of the smallest device on which it runs, and on every larger one: from ``memfit allocator``."""
    calls: DriverCalls
    """Of the CUDA runtime and driver, in all."""
    calls_per_step: DriverCalls | None
    """In the last full training step; null if fewer than two ended."""
    seconds_per_step: float | None
    """Of those, by ``rates``."""
    failure: Failed | None


class Replayed(msgspec.Struct, frozen=True):
    """What both commands write."""

    schema: int
    provenance: str
    """Of bytes and calls: ``simulated``."""
    seconds: str
    """Provenance of the rates: ``assumed``."""
    rates: CallRates
    """Seconds of one call of each kind."""
    total: int
    """Bytes of the device."""
    taken: int
    """Bytes of it that the context and other processes hold."""
    settings: tuple[Row, ...]
    recommended: str | None
    """The setting that gains, if one does; an empty string is the default."""
    notes: tuple[Remark, ...]


def to_json(result: AllocatorComparison) -> bytes:
    """Return a comparison as JSON: one line of ASCII."""
    answer = Replayed(
        schema=SCHEMA,
        provenance="simulated",
        seconds="assumed",
        rates=result.rates,
        total=result.total,
        taken=result.taken,
        settings=tuple(_row(row, result) for row in result.outcomes),
        recommended=result.recommended.setting.name if result.recommended else None,
        notes=tuple(map(remark, result.notes)),
    )
    return json.dumps(msgspec.to_builtins(answer), separators=(",", ":")).encode("ascii")


def _row(row: SettingOutcome, result: AllocatorComparison) -> Row:
    done, failure = row.replay, row.replay.failure
    return Row(
        setting=row.setting.name,
        current=row is result.current,
        fits=done.fits,
        peak_allocated=done.peak_allocated,
        peak_reserved=done.peak_reserved,
        smallest_capacity=row.smallest,
        calls=done.calls,
        calls_per_step=done.calls_per_step,
        seconds_per_step=row.seconds_per_step,
        failure=None
        if failure is None
        else Failed(failure.event, failure.requested, failure.free, result.places[row.setting.name]),
    )
