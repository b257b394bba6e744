"""The public JSON of ``memfit compare``; docs/compare.schema.json is generated from it."""

import msgspec

from memfit.records import ComparedRun, Figure, PeakRange, StrategyComparison
from memfit.report.schema.dry_run_schema import DeviceJson, public_device
from memfit.report.schema.encoding import SCHEMA_VERSION, encode


class ComparedRunJson(msgspec.Struct, frozen=True):
    """The script under one set of strategies."""

    name: str
    """``as written`` for the script itself."""
    plan: tuple[str, ...]
    """The strategies, as Python expressions."""
    models: tuple[str, ...]
    """Models that they were applied to: the class of each, and the line that creates its optimizer."""
    rank: int | None
    """The rank that needs most; the figures are of it. Null if there are none."""
    verdict: str
    """As in the JSON of a dry run; ``unknown`` if there are no figures."""
    peak: PeakRange | None
    """Allocated and reserved with unlimited memory, and what the process needs. Ranges where streams race.
    Null if there are no figures: see ``reason``."""
    provenance: str
    """Of what PyTorch allocates and reserves."""
    needs: Figure | None
    """Bytes of the process on this device or, if it does not fit, on the smallest on which it does."""
    change: int | None
    """Bytes by which that exceeds what the script as written needs."""
    phase: str
    module: str
    line: str
    """Where most was allocated."""
    reason: str
    """Why there are no figures; otherwise empty."""


class StrategyComparisonJson(msgspec.Struct, frozen=True):
    """What ``memfit compare --json`` writes."""

    schema: int
    device: DeviceJson
    nproc: int
    """Ranks on each machine."""
    nnodes: int
    """Machines."""
    distributed: bool
    """Whether the script as written trains on several GPUs."""
    interrupted: bool
    """Whether later runs are missing, because the user interrupted the comparison."""
    runs: tuple[ComparedRunJson, ...]
    """The script as written first."""
    command: tuple[str, ...]
    versions: dict[str, str]


def to_json(result: StrategyComparison) -> bytes:
    """Encode a comparison as one line of ASCII."""
    device = result.device
    public = StrategyComparisonJson(
        schema=SCHEMA_VERSION,
        device=public_device(device),
        nproc=result.nproc,
        nnodes=result.nnodes,
        distributed=result.distributed,
        interrupted=result.interrupted,
        runs=tuple(_run(result, run) for run in result.runs),
        command=result.command,
        versions=dict(result.versions),
    )
    return encode(public)


def _run(result: StrategyComparison, run: ComparedRun) -> ComparedRunJson:
    place = run.place
    return ComparedRunJson(
        name=run.name,
        plan=run.plan,
        models=run.models,
        rank=run.rank,
        verdict=run.verdict,
        peak=run.peak,
        provenance=run.provenance,
        needs=run.needs,
        change=result.change(run),
        phase=place.phase if place is not None else "",
        module=place.module if place is not None else "",
        line=place.line if place is not None else "",
        reason=run.reason,
    )
