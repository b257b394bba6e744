"""A plan for a script: what to change so that it fits a budget, and what that costs."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from memfit.records.dry_run import Term
from memfit.records.own_sharding import ShardingCalls
from memfit.records.printable_result import PrintableResult
from memfit.records.provenance import Figure
from memfit.records.script_change import Change, Equality, equality_of
from memfit.records.step_operations import OperationCounts
from memfit.records.step_time import StepTime
from memfit.records.trace import DeviceUse, ScriptLocation

_HOUR, _THOUSAND = 3600, 1000


@dataclass(frozen=True, slots=True)
class PlanRun:
    """A plan that ran on the ghost."""

    change: Change
    """Nothing for the script as written. Its ``allocator`` is what was replayed."""
    needs: Figure
    """Bytes of the process on the smallest GPU on which it fits."""
    reserved: Figure
    """Those of them that PyTorch reserves."""
    time: float
    """Of its own step, relative to the script as written, as ``step_time`` is; where one of the two is not
    known, as the operations predict. Infinite if it was not estimated."""
    place: ScriptLocation
    """Where most was allocated."""
    terms: tuple[Term, ...] = ()
    """What holds the memory at the peak, as in ``DryRun``."""
    compiled: bool = False
    """Whether ``torch.compile`` compiles the script's code. What changes its graphs changes their kernels."""
    allocated: int | None = None
    """Most bytes that PyTorch's allocator had allocated: exact; simulated with other settings."""
    rank: int | None = None
    """The rank that needs that; None for a script of one process."""
    operations: OperationCounts | None = None
    """Of the first step; None if they were not counted, as where the plan changes no model."""

    @property
    def changes(self) -> bool:
        """Whether it changes anything about the script."""
        return self.change != Change()

    @property
    def equality(self) -> Equality:
        """What training under it computes, compared with the script as written."""
        return equality_of(self.change, compiled=self.compiled)


@dataclass(frozen=True, slots=True, repr=False)
class ScriptPlan(PrintableResult):
    """The fastest plan found for a script under a budget, or why there is none.

    A plan that may not fit, because the CUDA context is assumed, is tight: it is chosen if there is no other.
    """

    json_description = "What ``memfit plan`` writes; ``memfit.apply`` and ``memfit dry-run --plan`` read it."

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

    step_time: StepTime | None = None
    """How long a step takes as written, of one rank; None if that is not known."""
    sharding_calls: tuple[ShardingCalls, ...] = ()
    """How the script as written shards itself, by calls whose options plans change."""
    in_loop: PlanRun | None = None
    """A plan with micro-batches that the script's loop makes: less time than the chosen plan, for a change of
    the loop. None if no such plan fits."""
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
    def seconds(self) -> float | None:
        """Seconds of a step under the chosen plan; None if there is none, or that is not known."""
        if self.chosen is None or self.step_time is None:
            return None
        return self.step_time.seconds * self.chosen.time

    @property
    def sharded(self) -> bool:
        """Whether a script for one GPU is to train on several."""
        return self.world_size > 1 and not self.distributed


@dataclass(frozen=True, slots=True, repr=False)
class GpusFor(PrintableResult):
    """A script on every GPU of the table."""

    json_description = "What ``memfit gpus --for --json`` writes."

    plans: tuple[ScriptPlan, ...]
    """A GPU each, whose memory is the plan's budget. First those with a price, the cheapest run first; then
    the others, in ascending order of their memory."""
    failed: Mapping[str, str]
    """By GPU: why the script as written does not run on it, such as a PyTorch without kernels for it."""
    command: tuple[str, ...]
    versions: Mapping[str, str]
    prices: Mapping[str, float] = field(default_factory=dict)
    """By GPU: what an hour costs, as the user gave it."""
    priced_on: str = ""
    """The date of these prices, of the oldest table among several; empty if they are of none."""
    steps_total: int | None = None
    """Training steps of the whole run; None if the user did not say."""

    @property
    def hours(self) -> Mapping[str, float]:
        """By GPU: the hours of ``steps_total`` steps, or of 1,000, under its plan, where they are known."""
        steps = self.steps_total or _THOUSAND
        known = {plan.device.name: plan.seconds for plan in self.plans}
        return {name: seconds * steps / _HOUR for name, seconds in known.items() if seconds is not None}

    @property
    def costs(self) -> Mapping[str, float]:
        """By GPU: what these hours cost, where the price is known."""
        return {name: hours * self.prices[name] for name, hours in self.hours.items() if name in self.prices}
