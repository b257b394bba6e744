"""The public JSON of a dry run and a recording; docs/dry-run.schema.json is generated from it."""

from dataclasses import astuple

import msgspec

from memfit.records import (
    Advice,
    DeviceUse,
    DryRun,
    Figure,
    JobRank,
    Note,
    OutOfMemory,
    PeakRange,
    RankRole,
    ScriptLocation,
    StageUse,
)
from memfit.report.schema.encoding import SCHEMA_VERSION, encode
from memfit.report.schema.longest_batch_schema import LongestBatchJson, public_longest_batch


class DeviceJson(msgspec.Struct, frozen=True):
    """The device the figures are for."""

    name: str
    total: int
    """Bytes, as cudaMemGetInfo reports them."""
    in_use: int
    """Bytes that other processes use: given for a dry run (--in-use), read at the end of a recording."""
    driver_reserved: int | None
    """Bytes that the driver keeps for itself. ``total`` does not contain them; nvidia-smi does not count them
    as used, but the first version of NVML's nvmlDeviceGetMemoryInfo does. Null if unknown."""
    machine: str
    """``ghost`` (memfit dry-run), ``card`` (memfit record), ``rehearsal`` (memfit record with the ghost in
    place of a GPU: nothing is measured) or ``unknown`` (a snapshot)."""


class PeakJson(msgspec.Struct, frozen=True):
    """The peaks of the run, and where the script was at the peak of allocated memory."""

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
    function: str
    """The function that contains the line; empty for the script's top level."""
    stage: str
    """The stage of a whole run; empty if it is not known."""


class OutOfMemoryJson(msgspec.Struct, frozen=True):
    """An allocation that failed even after PyTorch had emptied its cache."""

    step: int
    phase: str
    module: str
    op: str
    line: str
    function: str
    """The function that contains the line; empty for the script's top level."""
    stage: str
    """The stage of a whole run; empty if it is not known."""
    requested: int
    free: int
    shortfall: int
    cached: int
    """Bytes that the allocator had reserved and not allocated, in pieces too small for the request."""


class TermJson(msgspec.Struct, frozen=True):
    """One row of the summary."""

    name: str
    bytes: int
    provenance: str
    source: str


class GrowthJson(msgspec.Struct, frozen=True):
    """Whether memory grows from one training step to the next."""

    steady_from: int | None
    bytes_per_step: int
    line: str
    leak: bool
    """Whether the memory that grows outlives the step that allocated it."""


class NoteJson(msgspec.Struct, frozen=True):
    """A remark that the reader of the figures must know."""

    provenance: str
    text: str
    where: str


class SizeBoundJson(msgspec.Struct, frozen=True):
    """An operator whose size depends on GPU values, and is assumed to be the largest possible."""

    operator: str
    where: str
    """``file:line``; ``file:line, in package/file:line`` for a line that called a package."""
    bytes: int
    """Those allocated at the peak that follow from it, as far as memfit can tell."""


class ScriptEndJson(msgspec.Struct, frozen=True):
    """How the script ended."""

    reason: str
    exit_code: int
    exception: str
    where: str
    evaluation: str
    """With the reason ``steps``: ``file:line`` of a call of ``eval()`` in the user's code that did not
    run, or empty."""


class ChildProcessJson(msgspec.Struct, frozen=True):
    """A process that the script started and that used the GPU, too, or may have."""

    name: str
    """The name that ``multiprocessing`` gave it, or its command."""
    peak: Figure | None
    """The most bytes that it was seen to hold, CUDA context included; None if memfit could not follow it."""
    exception: str
    """What ended it, what it ran out of, or that it still ran, if memfit saw it."""


class RankJson(msgspec.Struct, frozen=True):
    """A rank, and the ranks that hold the same."""

    rank: int
    also: tuple[int, ...]
    verdict: str
    peak: PeakRange
    """Of the process: what nvidia-smi would show; if the rank runs out of memory, what it needs."""
    phase: str
    module: str
    line: str


class StageJson(msgspec.Struct, frozen=True):
    """A stage of the run: setup, loading, training, evaluation or saving."""

    name: str
    times: int
    """How often the script enters it."""
    allocated: int
    reserved: int
    process: int
    """What nvidia-smi would show for the process; what earlier stages left in the cache is included."""
    phase: str
    module: str
    line: str
    """Of the moment at which most was allocated; empty if the stage never allocates more than it finds."""
    ran_out: bool
    leaves: int
    """Bytes that it allocated and that the script still held at the end of a later training step."""
    leaves_line: str
    """``file:line`` that allocated most of them; empty if there are none."""
    gradients: bool
    """Whether it is an evaluation with forwards that record gradients, and so keep activations."""
    resumed: bool
    """Whether it is a stage of the run that --resume-with asks for."""


class ShortenedJson(msgspec.Struct, frozen=True):
    """A loader, or an option, that memfit made shorter."""

    where: str
    to: int
    of: int | None
    """Null for a loader that does not know its length, or an option that is no limit."""


class DryRunJson(msgspec.Struct, frozen=True):
    """What ``memfit dry-run --json`` and ``memfit record --json`` write."""

    schema: int
    verdict: str
    """``fits``; ``tight`` if less than ``uncertainty`` is left; ``does not fit`` or ``out of memory``;
    ``may not fit`` if an allocation failed, but ``upper_bound`` is not null: the script may need less;
    ``unknown`` if the script failed or was interrupted (see ``end``) or started processes that use the GPU
    (see ``children``), and for a snapshot, which names no device."""
    device: DeviceJson
    steps: int
    peak: PeakJson
    out_of_memory: OutOfMemoryJson | None
    terms: tuple[TermJson, ...]
    growth: GrowthJson
    notes: tuple[NoteJson, ...]
    end: ScriptEndJson
    command: tuple[str, ...]
    versions: dict[str, str]
    advice: tuple[Advice, ...] | None
    """What makes the run fit, or lowers its peak: entries are alternatives, the fewest changes first. Null
    if advice was not requested. ``explain`` tries allocator settings only; null if none of them helps."""
    advice_remarks: tuple[str, ...]
    """Sentences about the advice, such as what a sample of a batch takes."""
    uncertainty: int
    """Bytes that the process may need in addition: the CUDA context is assumed. 0 if it is measured."""
    caught: int
    """Out-of-memory errors that the script caught before it completed a training step. The peaks are those
    after the last one; ``out_of_memory`` describes the first."""
    upper_bound: SizeBoundJson | None
    """Not null if ``peak``, ``terms`` and ``needs`` are upper bounds, because sizes that depend on GPU
    values are assumed to be the largest possible: the operator that most of the peak follows from. For
    ``out of memory`` and ``does not fit``, only ``needs`` is an upper bound."""
    needs: Figure | None
    """Bytes of the process at its peak on the smallest device of this kind on which the run fits; ``peak`` is
    on this device, where PyTorch may cache more. Savings count from it. Null if unknown."""
    needs_without_workspaces: Figure | None
    """The same if convolutions use no workspaces; of a run that does not fit, more than the memory on which
    it failed. Null where ``range`` is null, or where that is at most 2 % less. Where memory is short, PyTorch
    takes engines with smaller ones."""
    children: tuple[ChildProcessJson, ...]
    """Processes that the script started and that used the GPU, too. The figures do not include them."""
    range: PeakRange | None
    """The peaks if work on side streams is done at once, and as late as possible (``peak`` and the rest of
    the result are of the late run), and with and without the workspaces that cuDNN suggests (the rest is with
    them). Null where the two ends meet; for workspaces, where they differ by at most 2 % of the process."""
    rank: JobRank | None
    """The rank that the figures are of, and the number of ranks. Null for a script run as one process."""
    ranks: tuple[RankJson, ...]
    """With --all-ranks: every role of the job's ranks, one that failed first, then the one that needs most.
    The rest of the result is of the first. Otherwise empty."""
    pinned: Figure | None
    """Most bytes of host memory that PyTorch's allocator pinned, beside those of the device. Null if none."""
    stages: tuple[StageJson, ...]
    """With --whole or --to-end: the stages of the script's life, in the order in which it enters them."""
    shortened: tuple[ShortenedJson, ...]
    """With --whole: what memfit made shorter than the script has it."""
    longest: tuple[LongestBatchJson, ...]
    """With --longest: each loader from which memfit drew batches to find the largest."""
    untried: ScriptEndJson | None
    """How a run for advice ended, if advice is missing because that run failed; otherwise null. Reasons are
    those of ``end``, and ``refused``: the script or the change could not be run."""


def public_device(device: DeviceUse) -> DeviceJson:
    """Return the public part of a device's use."""
    reserved = None if device.driver is None else device.driver.bytes
    return DeviceJson(device.name, device.total.bytes, device.in_use, reserved, device.machine)


def public_dry_run(result: DryRun) -> DryRunJson:
    """Return the public part of a run's result."""
    place = result.peak_place
    return DryRunJson(
        schema=SCHEMA_VERSION,
        verdict=result.verdict,
        device=public_device(result.device),
        steps=result.steps,
        peak=PeakJson(
            result.peak_allocated,
            result.peak_reserved,
            result.peak_process.bytes,
            *_where(place),
        ),
        out_of_memory=_failure(result.out_of_memory),
        terms=tuple(
            TermJson(term.name, term.figure.bytes, term.figure.provenance, term.figure.source)
            for term in result.terms
        ),
        growth=GrowthJson(*astuple(result.growth)),
        notes=tuple(public_note(note) for note in result.notes),
        end=ScriptEndJson(*astuple(result.end)),
        command=result.command,
        versions=dict(result.versions),
        advice=result.advice,
        advice_remarks=result.advice_remarks,
        uncertainty=result.uncertainty,
        caught=result.caught,
        upper_bound=None if result.bound is None else SizeBoundJson(*astuple(result.bound)),
        needs=result.needs,
        needs_without_workspaces=result.needs_without_workspaces,
        children=tuple(ChildProcessJson(c.name, c.peak, c.exception) for c in result.children),
        range=result.range,
        rank=result.rank,
        ranks=tuple(_rank(role) for role in result.ranks),
        pinned=result.pinned,
        stages=tuple(map(_stage, result.stages)),
        shortened=tuple(ShortenedJson(each.where, each.to, each.of) for each in result.shortened),
        longest=tuple(map(public_longest_batch, result.longest)),
        untried=None if result.untried is None else ScriptEndJson(*astuple(result.untried)),
    )


def _failure(failure: OutOfMemory | None) -> OutOfMemoryJson | None:
    if failure is None:
        return None
    return OutOfMemoryJson(
        *_where(failure.place), failure.requested, failure.free, failure.shortfall, failure.cached
    )


def _rank(role: RankRole) -> RankJson:
    place = role.place
    return RankJson(role.rank, role.also, role.verdict, role.peak, place.phase, place.module, place.line)


def _stage(use: StageUse) -> StageJson:
    place = use.place
    return StageJson(
        use.stage,
        use.times,
        use.allocated,
        use.reserved,
        use.process.bytes,
        *((place.phase, place.module, place.line) if place is not None else ("", "", "")),
        use.ran_out,
        use.leaves,
        use.leaves_line,
        use.gradients,
        use.resumed,
    )


def _where(place: ScriptLocation) -> tuple[int, str, str, str, str, str, str]:
    return place.step, place.phase, place.module, place.op, place.line, place.function, place.stage


def public_note(note: Note) -> NoteJson:
    """Return the public part of a note."""
    return NoteJson(note.provenance, note.text, note.where)


def to_json(result: DryRun) -> bytes:
    """Encode a run's result as one line of ASCII."""
    return encode(public_dry_run(result))
