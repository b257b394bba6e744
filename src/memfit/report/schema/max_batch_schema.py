"""The public JSON of ``memfit max-batch``; docs/max-batch.schema.json is generated from it."""

import msgspec

from memfit.records import BatchLimit, Figure, MaxBatch
from memfit.report.schema.dry_run_schema import DeviceJson, public_device
from memfit.report.schema.encoding import SCHEMA_VERSION, encode


class BatchRunJson(msgspec.Struct, frozen=True):
    """The script with batches of one size, run with the memory of the budget."""

    size: int
    """Samples in a batch."""
    fits: bool
    """Whether no allocation failed."""
    needs: Figure
    """Bytes of the process on the smallest GPU on which it is known to fit, the CUDA context included."""
    allocated: Figure
    """Peak of allocated bytes; if it does not fit, from a run with unlimited memory."""
    steps: int
    """Training steps completed, in the run that ``allocated`` is from."""
    phase: str
    module: str
    line: str
    """Where most was allocated."""


class MaxBatchJson(msgspec.Struct, frozen=True):
    """What ``memfit max-batch --json`` writes."""

    schema: int
    largest: int | None
    """The largest batch size that fits; null if none does."""
    limit: BatchLimit
    """Why no larger one was found: ``memory`` (the next runs out), ``data`` (there are no more samples),
    ``flat`` (the peak does not depend on it), ``runs`` (memfit made as many runs as it may)."""
    as_written: int
    """The script's own batch size."""
    multiple: int
    """Batch sizes looked for are multiples of it."""
    budget: int
    """Bytes that the process may use."""
    device: DeviceJson
    """``total`` is the budget and what others use."""
    runs: tuple[BatchRunJson, ...]
    """Every size that was run, in ascending order."""
    how: str
    """What to write for the largest batch size; empty if there is nothing to change."""
    where: str
    """``file:line`` to be changed, if known."""
    per_sample: Figure | None
    """Bytes allocated for one more sample at the peak; null if no two runs show it."""
    remarks: tuple[str, ...]
    command: tuple[str, ...]
    versions: dict[str, str]


def to_json(result: MaxBatch) -> bytes:
    """Encode a largest batch size as one line of ASCII."""
    device = result.device
    return encode(
        MaxBatchJson(
            schema=SCHEMA_VERSION,
            largest=result.largest,
            limit=result.limit,
            as_written=result.as_written,
            multiple=result.multiple,
            budget=result.budget,
            device=public_device(device),
            runs=tuple(
                BatchRunJson(
                    size=run.size,
                    fits=run.fits,
                    needs=run.needs,
                    allocated=run.allocated,
                    steps=run.steps,
                    phase=run.place.phase,
                    module=run.place.module,
                    line=run.place.line,
                )
                for run in result.runs
            ),
            how=result.how,
            where=result.where,
            per_sample=result.per_sample,
            remarks=result.remarks,
            command=result.command,
            versions=dict(result.versions),
        )
    )
