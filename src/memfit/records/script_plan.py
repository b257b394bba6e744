"""A plan for a script: what to change so that it fits a budget, and what that costs."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from memfit.records.dry_run import Term
from memfit.records.provenance import Figure
from memfit.records.result import PrintedResult
from memfit.records.script_options import LoaderBatchSize
from memfit.records.step_operations import OperationCounts
from memfit.records.trace import DeviceUse, ScriptLocation


class Equality(StrEnum):
    """How near the results under a plan are to those of the script as written."""

    BITWISE = "bit for bit"
    """The same results, bit for bit."""
    ROUNDING = "up to rounding"
    """The same sums, taken in another order, or rounded at other places."""
    OTHER = "other numerics"
    """Values of other precision."""


_BITWISE = {"checkpointing", "offload", "optimizer_state", "sharding"}
"""Settings of a ``memfit.Plan`` under which results are the same, bit for bit, but for what follows."""
_OF_OPTIMIZER = {"offload", "step_in_backward"}
"""Fields of ``optimizer_state`` under which they are."""


def equality_of(settings: Mapping[str, Any], *, rounds: bool) -> Equality:
    """Return what training under settings of a ``memfit.Plan`` computes.

    Args:
        settings: by the plan's fields.
        rounds: whether something else about the plan takes sums in another order.

    >>> str(equality_of({"optimizer_state": {"offload": True}}, rounds=False))
    'bit for bit'
    """
    optimizer = settings.get("optimizer_state", {}).keys()
    if "precision" in settings or "bits" in optimizer:
        return Equality.OTHER
    in_parts = settings.get("sharding", {}).get("mode") == "fsdp2"  # gradients are summed so
    exact = settings.keys() <= _BITWISE and optimizer <= _OF_OPTIMIZER and not in_parts
    return Equality.BITWISE if exact and not rounds else Equality.ROUNDING


@dataclass(frozen=True, slots=True)
class DividedBatches:
    """Batches in equal parts: each part has a forward and a backward, and an update sums their gradients."""

    count: int
    """Parts of a batch."""
    size: int
    """Samples in each."""
    how: str
    """What to write: ``--batch-size 2, now 4``."""
    where: str
    """``file:line`` of it, if known."""
    arguments: tuple[str, ...] = ()
    """Options of the script's own that set the size."""
    loader: LoaderBatchSize | None = None
    """The loader to be created with this size."""
    draws: bool = False
    """Whether the step draws random numbers: other ones than for the whole batch."""
    assumed: str = ""
    """On which condition, which memfit has not seen, the parts have the samples of the batch, and why it has
    not; empty if it has."""
    by_option: bool = False
    """Whether the script's own options sum the gradients, too: nothing is to be changed in its loop."""
    by_engine: bool = False
    """Whether ``memfit.Engine`` divides batches, as for a ``memfit.Job``."""

    @property
    def in_loop(self) -> tuple[str, ...]:
        """What to write besides, so that an update sums the gradients of all parts."""
        if self.by_option:
            return ()
        if self.loader is not None and self.loader.library:
            return (
                f"gradient accumulation over {self.count} batches, by a setting of {self.loader.library}",
            )
        return (
            f"loss = loss / {self.count}",
            f"if (step + 1) % {self.count} == 0:  # clip, optimizer.step(), zero_grad()",
        )


@dataclass(frozen=True, slots=True)
class PlanRun:
    """A plan that ran on the ghost."""

    settings: Mapping[str, Any]
    """The settings of a ``memfit.Plan``, by its fields; empty for the script as written."""
    needs: Figure
    """Bytes of the process on the smallest GPU on which it fits."""
    reserved: Figure
    """Those of them that PyTorch reserves."""
    time: float
    """Of a step, relative to the script as written; infinite if it was not estimated."""
    place: ScriptLocation
    """Where most was allocated."""
    conf: str = ""
    """``PYTORCH_ALLOC_CONF`` under which it needs that; empty for the script's own."""
    divided: DividedBatches | None = None
    """None if batches stay whole."""
    fused: bool = False
    """Whether the optimizer is created with ``fused=True``."""
    terms: tuple[Term, ...] = ()
    """What holds the memory at the peak, as in ``DryRun``."""
    compiled: bool = False
    """Whether ``torch.compile`` compiles the script's code. What changes its graphs changes their kernels."""
    allocated: int | None = None
    """Most bytes that PyTorch's allocator had allocated: exact; simulated if ``conf`` is set."""
    rank: int | None = None
    """The rank that needs that; None for a script of one process."""
    operations: OperationCounts | None = None
    """Of the first step; None if they were not counted, as where the plan changes no model."""

    @property
    def changes(self) -> bool:
        """Whether it changes anything about the script."""
        return bool(self.settings or self.conf or self.fused or self.divided)

    @property
    def equality(self) -> Equality:
        """What training under it computes, compared with the script as written."""
        rounds = self.divided is not None or self.fused or (self.compiled and bool(self.settings))
        return equality_of(self.settings, rounds=rounds)


@dataclass(frozen=True, slots=True, repr=False)
class ScriptPlan(PrintedResult):
    """The fastest plan found for a script under a budget, or why there is none.

    A plan that may not fit, because the CUDA context is assumed, is tight: it is chosen if there is no other.
    """

    chosen: PlanRun | None
    """None if no plan fits; the script as written if that fits."""
    bound: float
    """No plan of this kind that fits as well takes less time, relative to the script as written: none that is
    not tight, unless the chosen one is. 0 if no bound is known."""
    rule: str
    """What the times are based on; they are assumed."""
    budget: int
    """Bytes that the process may use, the CUDA context included."""
    device: DeviceUse
    as_written: PlanRun
    smallest: PlanRun | None
    """The plan that needs least, if none fits the budget."""
    tried: tuple[PlanRun, ...]
    """Every plan that ran on the ghost, in order."""
    models: tuple[str, ...]
    """The models that got the plan: the class of each, and the line that creates its optimizer."""
    optimizer: int | None
    """Which optimizer of the script they have, counted from 0: the plan is for no other models."""
    command: tuple[str, ...]
    versions: Mapping[str, str]
    reason: str = ""
    """Why there is no plan."""
    floor: Figure | None = None
    """Bytes of the process below which no change that memfit may make brings the script, if that is more than
    the budget: no plan can fit."""
    out_of_time: bool = False
    """Whether the time for the search was over before it ended: a faster plan may exist, or one that fits."""
    policies: tuple[PlanRun, ...] = ()
    """Policies of checkpointing that people use, if they were to be run."""
    uncertainty: int = 0
    """Bytes by which the assumed CUDA context may be too small, as in ``DryRun``."""
    undivided: str = ""
    """Why batches are not divided into micro-batches, as a clause; empty if they may be, or need not."""
    log_probabilities: int = 0
    """Bytes of the cross-entropy's log-probabilities in the script as written; 0 if that is not known."""
    without_workspaces: int = 0
    """Bytes that the script as written needs if its convolutions use no workspaces, as in ``DryRun``; 0 if it
    fits, or if they matter little."""
    max_slowdown: float | None = None
    """How many times as long as the script as written a step may take at most; None for any time."""
    too_slow: PlanRun | None = None
    """The fastest plan found that fits, if it takes longer than that; none is chosen then."""
    dropped: tuple[str, ...] = ()
    """Plans that could not run, each with the reason, as a sentence."""
    nproc: int = 1
    """Ranks on each machine, with a GPU each."""
    nnodes: int = 1
    """Machines."""
    ran: int = 1
    """Ranks of the script as written that ran; the others are assumed to hold what one of these holds."""
    distributed: bool = False
    """Whether the script as written trains on several GPUs. If it does not, but there are several ranks,
    ``as_written`` is the script with plain data parallelism."""

    sent: tuple[int, int] | None = None
    """About how many bytes a rank sends to others in a step, as ``as_written`` and under the chosen plan;
    assumed. None unless the plan shards a script for one GPU."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nproc * self.nnodes

    @property
    def is_tight(self) -> bool:
        """Whether the chosen plan leaves less than the assumed CUDA context may be too small by."""
        return self.chosen is not None and self.budget - self.chosen.needs.bytes < self.uncertainty

    @property
    def may_fit_as_written(self) -> bool:
        """Whether the script may fit if PyTorch takes engines with smaller workspaces for convolutions."""
        return 0 < self.without_workspaces <= self.budget

    @property
    def sharded(self) -> bool:
        """Whether a script for one GPU is to train on several."""
        return self.world_size > 1 and not self.distributed


@dataclass(frozen=True, slots=True, repr=False)
class GpusFor(PrintedResult):
    """A script on every GPU of the table."""

    plans: tuple[ScriptPlan, ...]
    """A GPU each, in ascending order of their memory, which is the plan's budget."""
    failed: Mapping[str, str]
    """By GPU: why the script as written does not run on it, such as a PyTorch without kernels for it."""
    command: tuple[str, ...]
    versions: Mapping[str, str]
