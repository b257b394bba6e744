"""The public JSON of a dry run. What is here is a promise; docs/dry-run.schema.json is made from it.

With who holds the memory (``records.Breakdown``, ``records.Fragmentation``) it is docs/explain.schema.json.
Byte counts are integers. Fields may be added within a schema version; none is removed or changes meaning.
"""

import json
from dataclasses import astuple

import msgspec

from memfit.records import (
    Advice,
    Breakdown,
    DryRun,
    Explanation,
    Figure,
    Fragmentation,
    MemoryPeak,
    Note,
    OutOfMemory,
    PhaseChange,
    ScriptLocation,
)

SCHEMA = 1


class Device(msgspec.Struct, frozen=True):
    """The device the figures are for."""

    name: str
    total: int
    """Bytes, as cudaMemGetInfo reports them."""
    in_use: int
    """Bytes taken by other processes: before the run (--in-use), or at the end of a recording."""
    machine: str
    """``ghost`` (memfit dry-run), ``card`` (memfit record), ``rehearsal`` (memfit record with the ghost in
    the card's place: nothing is measured) or ``unknown`` (a snapshot)."""


class Peak(msgspec.Struct, frozen=True):
    """The most the run held, and where it was when it held most."""

    allocated: int
    """torch.cuda.max_memory_allocated()."""
    reserved: int
    """torch.cuda.max_memory_reserved()."""
    process: int
    """What nvidia-smi would show for the process."""
    step: int
    phase: str
    module: str
    op: str
    line: str


class Failure(msgspec.Struct, frozen=True):
    """An allocation that failed for good."""

    step: int
    phase: str
    module: str
    op: str
    line: str
    requested: int
    free: int
    shortfall: int


class Term(msgspec.Struct, frozen=True):
    """One row of the summary."""

    name: str
    bytes: int
    provenance: str
    source: str


class Growth(msgspec.Struct, frozen=True):
    """Whether a training step leaves memory as it found it."""

    steady_from: int | None
    bytes_per_step: int
    line: str
    leak: bool
    """Whether what grows outlives the step that allocated it."""


class Remark(msgspec.Struct, frozen=True):
    """Something the reader of a figure must know."""

    provenance: str
    text: str
    where: str


class End(msgspec.Struct, frozen=True):
    """How the script ended."""

    reason: str
    exit_code: int
    exception: str
    where: str


class Result(msgspec.Struct, frozen=True):
    """What ``memfit dry-run --json`` and ``memfit record --json`` write."""

    schema: int
    verdict: str
    """``fits``, ``does not fit``, ``out of memory``; ``unknown`` where the script failed or was interrupted
    (``end`` says how), and for a snapshot, which names no device."""
    device: Device
    steps: int
    peak: Peak
    out_of_memory: Failure | None
    terms: tuple[Term, ...]
    growth: Growth
    notes: tuple[Remark, ...]
    end: End
    command: tuple[str, ...]
    versions: dict[str, str]
    advice: tuple[Advice, ...] | None
    """What lowers what it needs, each beyond those before it; null where nobody asked. ``explain``
    tries settings alone, and has null where none helps."""
    in_all: Figure | None
    """Bytes of the process at its peak where memory does not end: advice counts from it. Null where it is not
    known."""
    untried: End | None
    """Where advice is missing because the script could not be run for it: how it ended. Reasons are those of
    ``end``, and ``refused``: it could not be run, or not with what was to be tried."""


class Explained(Result, frozen=True):
    """What ``memfit explain --json`` writes."""

    below_peak: tuple[MemoryPeak, ...]
    """What would limit the run next, highest first; apart from the peak and one another."""
    at: str
    """The moment that was asked for: ``peak``, a phase, or a training step."""
    held: Breakdown
    ledger: tuple[PhaseChange, ...]
    fragmentation: Fragmentation | None
    """With ``--fragmentation``."""


def explained(found: Explanation) -> Explained:
    """Turn an explanation into what is public of it."""
    return Explained(
        **msgspec.structs.asdict(to_public(found.summary)),
        below_peak=found.below_peak,
        at=found.at,
        held=found.held,
        ledger=found.ledger,
        fragmentation=found.fragmentation,
    )


def to_json(public: Result) -> bytes:
    """Encode what is public: one line of ASCII.

    By the standard library: a file name that is not UTF-8 reaches Python as lone surrogates, which
    msgspec refuses and JSON can spell.
    """
    return json.dumps(msgspec.to_builtins(public), separators=(",", ":")).encode("ascii")


def json_schema(of: type[msgspec.Struct] = Result) -> bytes:
    """Return the JSON Schema of a public result."""
    return msgspec.json.format(msgspec.json.encode(msgspec.json.schema(of)), indent=2)


def to_public(result: DryRun) -> Result:
    """Turn the internal answer into the public one."""
    place = result.peak_place
    return Result(
        schema=SCHEMA,
        verdict=result.verdict,
        device=Device(
            result.device.name, result.device.total.bytes, result.device.in_use, result.device.machine
        ),
        steps=result.steps,
        peak=Peak(
            result.peak_allocated,
            result.peak_reserved,
            result.peak_process.bytes,
            *_where(place),
        ),
        out_of_memory=_failure(result.out_of_memory),
        terms=tuple(
            Term(term.name, term.figure.bytes, term.figure.provenance, term.figure.source)
            for term in result.terms
        ),
        growth=Growth(*astuple(result.growth)),
        notes=tuple(remark(note) for note in result.notes),
        end=End(*astuple(result.end)),
        command=result.command,
        versions=dict(result.versions),
        advice=result.advice,
        in_all=result.in_all,
        untried=None if result.untried is None else End(*astuple(result.untried)),
    )


def _failure(failure: OutOfMemory | None) -> Failure | None:
    if failure is None:
        return None
    return Failure(*_where(failure.place), failure.requested, failure.free, failure.shortfall)


def _where(place: ScriptLocation) -> tuple[int, str, str, str, str]:
    return place.step, place.phase, place.module, place.op, place.line


def remark(note: Note) -> Remark:
    """Return a note as it is public."""
    return Remark(note.provenance, note.text, note.where)
