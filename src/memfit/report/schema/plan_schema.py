"""The public JSON of ``memfit plan``, also in its plan files; docs/plan.schema.json is generated from it."""

from typing import Any

import msgspec

from memfit.records import DividedBatches, Equality, Figure, OperationCounts, PlanRun, ScriptPlan
from memfit.report.schema.dry_run_schema import DeviceJson, public_device
from memfit.report.schema.encoding import SCHEMA_VERSION, encode


class PlanRunJson(msgspec.Struct, frozen=True):
    """A plan that ran on the ghost."""

    plan: dict[str, Any]
    """The settings of a ``memfit.Plan``, by its fields; empty for the script as written."""
    allocator: str
    """``PYTORCH_ALLOC_CONF`` under which it needs that; empty for the script's own."""
    micro_batches: DividedBatches | None
    """How batches are divided; null if they are not."""
    fused: bool
    """Whether the optimizer is created with ``fused=True``."""
    needs: Figure
    """Bytes of the process on the smallest GPU on which it fits, the CUDA context included."""
    allocated: int | None
    """Most bytes that PyTorch's allocator had allocated: exact; simulated with other settings."""
    time: float
    """Of a step, relative to the script as written; assumed."""
    rank: int | None
    """The rank that needs that; null for a script of one process."""
    phase: str
    module: str
    line: str
    """Where most was allocated."""


class ScriptPlanJson(msgspec.Struct, frozen=True):
    """What ``memfit plan`` writes; ``memfit.apply`` and ``memfit dry-run --plan`` read it."""

    schema: int
    plan: dict[str, Any] | None
    """The chosen plan; empty if the script as written fits, null if no plan does."""
    allocator: str
    """The chosen ``PYTORCH_ALLOC_CONF``; empty for the script's own."""
    micro_batches: DividedBatches | None
    """How the chosen plan divides batches; null if it does not."""
    fused: bool
    """Whether the chosen plan needs ``fused=True`` when the optimizer is created."""
    equality: Equality | None
    """How near the results under the chosen plan are to those of the script as written."""
    needs: Figure | None
    """Bytes of the process under the chosen plan."""
    allocated: int | None
    """Most bytes that PyTorch's allocator had allocated under it; exact."""
    operations: OperationCounts | None
    """Operations of the first step under it; null if they were not counted."""
    time: float | None
    """Of a step under the chosen plan, relative to the script as written; assumed."""
    bound: float
    """No plan of this kind that fits takes less time; tight ones may, unless the chosen one is tight. 0 if no
    bound is known."""
    time_rule: str
    """What the times are based on."""
    budget: int
    """Bytes that the process may use."""
    device: DeviceJson
    nproc: int
    """Ranks on each machine, with a GPU each."""
    nnodes: int
    """Machines."""
    distributed: bool
    """Whether the script as written trains on several GPUs. If it does not, but there are several ranks,
    ``as_written`` is the script with plain data parallelism."""
    rank: int | None
    """The rank that needs most under the chosen plan; null for a script of one process."""
    sent: tuple[int, int] | None
    """About how many bytes a rank sends to others in a step, as ``as_written`` and under the chosen plan:
    assumed; null unless the plan shards a script for one GPU."""
    as_written: PlanRunJson
    smallest: PlanRunJson | None
    """The plan that needs least, if none fits the budget."""
    max_slowdown: float | None
    """How many times as long as the script as written a step may take at most; null for any time."""
    too_slow: PlanRunJson | None
    """The fastest plan found that fits the budget, if it takes longer than that: none is chosen then."""
    tried: tuple[PlanRunJson, ...]
    """Every plan that ran on the ghost, in order."""
    policies: tuple[PlanRunJson, ...]
    """Policies of checkpointing that people use, run with ``--chart``."""
    models: tuple[str, ...]
    """Models that got the plan: the class of each, and the line that creates its optimizer."""
    optimizer: int | None
    """Which optimizer of the script they have, counted from 0: the plan is for no other models."""
    floor: Figure | None
    """Bytes of the process below which no change that memfit may make brings the script, if that is more than
    the budget: no plan can fit."""
    out_of_time: bool
    """Whether the time for the search was over before it ended: a faster plan may exist, or one that fits."""
    is_tight: bool
    """Whether the chosen plan leaves less than the assumed CUDA context may be too small by."""
    reason: str
    """Why no plan was found; otherwise empty."""
    undivided: str
    """Why batches are not divided into micro-batches; empty if they may be, or need not."""
    log_probabilities: int
    """Bytes of the cross-entropy's log-probabilities in the script as written; 0 if that is not known."""
    without_workspaces: int
    """Bytes that the script as written needs if its convolutions use no workspaces; 0 if it fits, or if
    that is at most 2 % less."""
    dropped: tuple[str, ...]
    """Plans that could not run, each with the reason."""
    command: tuple[str, ...]
    versions: dict[str, str]


def to_json(result: ScriptPlan) -> bytes:
    """Encode a plan as one line of ASCII."""
    return encode(script_plan_json(result))


def script_plan_json(result: ScriptPlan) -> ScriptPlanJson:
    """Return the public form of a plan."""
    device, chosen = result.device, result.chosen
    return ScriptPlanJson(
        schema=SCHEMA_VERSION,
        plan=None if chosen is None else dict(chosen.change.plan),
        allocator="" if chosen is None else chosen.change.allocator,
        micro_batches=None if chosen is None else chosen.change.micro_batches,
        fused=chosen is not None and chosen.change.fused,
        equality=None if chosen is None else chosen.equality,
        needs=None if chosen is None else chosen.needs,
        allocated=None if chosen is None else chosen.allocated,
        operations=None if chosen is None else chosen.operations,
        time=None if chosen is None else chosen.time,
        bound=result.bound,
        time_rule=result.rule,
        budget=result.budget,
        device=public_device(device),
        nproc=result.nproc,
        nnodes=result.nnodes,
        distributed=result.distributed,
        rank=None if chosen is None else chosen.rank,
        sent=result.sent,
        as_written=_run(result.as_written),
        smallest=None if result.smallest is None else _run(result.smallest),
        max_slowdown=result.max_slowdown,
        too_slow=None if result.too_slow is None else _run(result.too_slow),
        tried=tuple(map(_run, result.tried)),
        policies=tuple(map(_run, result.policies)),
        models=result.models,
        optimizer=result.optimizer,
        floor=result.floor,
        out_of_time=result.out_of_time,
        is_tight=result.is_tight,
        reason=result.reason,
        undivided=result.undivided,
        log_probabilities=result.log_probabilities,
        without_workspaces=result.without_workspaces,
        dropped=result.dropped,
        command=result.command,
        versions=dict(result.versions),
    )


def _run(run: PlanRun) -> PlanRunJson:
    place = run.place
    return PlanRunJson(
        dict(run.change.plan),
        run.change.allocator,
        run.change.micro_batches,
        run.change.fused,
        run.needs,
        run.allocated,
        run.time,
        run.rank,
        place.phase,
        place.module,
        place.line,
    )
