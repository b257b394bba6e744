"""The public JSON of ``memfit replay`` and ``memfit allocator``; docs/replay.schema.json comes from it."""

import msgspec

from memfit.records import AllocatorComparison, CallRates, DriverCalls, ScriptLocation, SettingOutcome
from memfit.report.schema.dry_run_schema import NoteJson, public_note
from memfit.report.schema.encoding import SCHEMA_VERSION, encode


class FailedMallocJson(msgspec.Struct, frozen=True):
    """The allocation that fails under a setting."""

    event: int
    """Index into the trace's history."""
    requested: int
    free: int
    """Bytes free on the device at that point, whether or not the allocator may use them."""
    where: ScriptLocation


class SettingJson(msgspec.Struct, frozen=True):
    """The outcome of a trace under one setting."""

    setting: str
    current: bool
    """Whether the trace was recorded with this setting."""
    fits: bool
    peak_allocated: int
    """Up to the failure, if there is one."""
    peak_reserved: int
    smallest_capacity: int | None
    """Bytes of the smallest device from which on the run fits; null except from ``memfit allocator``."""
    calls: DriverCalls
    """DriverCalls of the CUDA runtime and driver in the whole run."""
    calls_per_step: DriverCalls | None
    """DriverCalls in the last complete training step; null if fewer than two steps completed."""
    seconds_per_step: float | None
    """Time of those calls, by ``rates``."""
    failure: FailedMallocJson | None


class ComparisonJson(msgspec.Struct, frozen=True):
    """What ``memfit replay --json`` and ``memfit allocator --json`` write."""

    schema: int
    provenance: str
    """Provenance of bytes and calls: ``simulated``."""
    seconds: str
    """Provenance of the rates: ``assumed``."""
    rates: CallRates
    """Seconds that one call of each kind takes."""
    total: int
    """Total bytes of the device."""
    taken: int
    """Bytes of the device that the CUDA context and other processes use."""
    settings: tuple[SettingJson, ...]
    recommended: str | None
    """The recommended setting, an empty string for the defaults; null if none is better."""
    notes: tuple[NoteJson, ...]


def to_json(result: AllocatorComparison) -> bytes:
    """Encode a comparison of allocator settings as one line of ASCII."""
    answer = ComparisonJson(
        schema=SCHEMA_VERSION,
        provenance="simulated",
        seconds="assumed",
        rates=result.rates,
        total=result.total,
        taken=result.taken,
        settings=tuple(_row(row, result) for row in result.outcomes),
        recommended=result.recommended.setting.name if result.recommended else None,
        notes=tuple(map(public_note, result.notes)),
    )
    return encode(answer)


def _row(row: SettingOutcome, result: AllocatorComparison) -> SettingJson:
    done, failure = row.replay, row.replay.failure
    return SettingJson(
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
        else FailedMallocJson(
            failure.event, failure.requested, failure.free, result.places[row.setting.name]
        ),
    )
