"""The result of a dry run: the verdict, the peak, what holds it, and what would lower it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

from memfit.records.loader_batches_and_peaks import PeakByBatchSize
from memfit.records.printable_result import PrintableResult
from memfit.records.provenance import Figure, Note
from memfit.records.script_end import ScriptEnd
from memfit.records.step_time import StepTime
from memfit.records.trace import ChildProcess, DeviceUse, JobRank, ScriptLocation, Shortened


class Stage(StrEnum):
    """What a script is doing with its model, over many steps."""

    SETUP = "setup"  # before the first forward
    LOADING = "loading"  # from reading a checkpoint to the next forward
    TRAINING = "training"
    EVALUATION = "evaluation"  # forwards without a backward, and what the script makes of their results
    SAVING = "saving"  # from asking for a state_dict to the next forward, if a file is written


@dataclass(frozen=True, slots=True)
class StageUse:
    """What one stage of a run uses, over all the times that the script is in it."""

    stage: Stage
    times: int
    """How often the script enters it."""
    allocated: int
    """Most bytes allocated in it."""
    reserved: int
    """Most bytes reserved in it, what earlier stages left in the allocator's cache included."""
    process: Figure
    """Most bytes of the process in it."""
    place: ScriptLocation | None
    """Where most was allocated; None if it never allocates more than it finds."""
    ran_out: bool
    """Whether an allocation failed in it, and the script did not recover."""
    leaves: int
    """Bytes that it allocated and that the script still held at the end of a later training step; the most of
    any time that it was entered. 0 for setup, loading and training, which are to leave something."""
    leaves_line: str
    """``file:line`` that allocated most of them; empty if there are none."""
    gradients: bool = False
    """Whether it is an evaluation with forwards that record gradients, and so keep activations."""
    resumed: bool = False
    """Whether this is a stage of the run that resumed from what the first one had written."""

    @property
    def name(self) -> str:
        """What users call it."""
        return f"{self.stage}, resumed" if self.resumed else self.stage


@dataclass(frozen=True, slots=True)
class Term:
    """One row of the summary."""

    name: str
    figure: Figure

    @property
    def is_total(self) -> bool:
        """Whether it is a sum of rows above it."""
        return self.name in ("allocated", "reserved", "process")


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """An allocation that failed for good."""

    place: ScriptLocation
    requested: int
    free: int
    """Bytes the device still had free."""
    shortfall: int
    """Bytes missing, if nothing in the allocator's cache could be reused: ``segment size - free``."""
    cached: int = 0
    """Bytes that the allocator had reserved and not allocated, in pieces too small for the request."""


@dataclass(frozen=True, slots=True)
class SizeBound:
    """A size that depends on GPU values, which memfit sets to its upper bound."""

    operator: str
    where: str
    """As in ``Note``."""
    bytes: int
    """Those allocated at the peak that follow from it, as far as memfit can tell."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Whether memory grows from training step to training step, compared at the end of each."""

    steady_from: int | None
    """The first step whose end holds as much as that of every later one; None if the last two differ."""
    bytes_per_step: int
    """Requested bytes held at the end of the last step, minus those at the end of the step before; for a
    leak, only bytes that have outlived a whole step."""
    line: str
    """``file:line`` that holds most of the leak; otherwise empty."""
    leak: bool
    """Whether the growing bytes outlive the step that allocated them; if not, batches may vary in size."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Changes that lower the memory a run needs; memfit has tried them, together if there are several."""

    changes: tuple[str, ...]
    how: tuple[str, ...]
    """The settings, options or code to write."""
    where: str
    """``file:line`` to be changed, if known; otherwise empty."""
    costs: str
    saves: Figure
    """Bytes of the process at its peak, compared with ``DryRun.needs``."""
    needs: Figure
    """Bytes of the process at its peak with these changes, found as ``DryRun.needs`` is."""
    fits: bool | None
    """Whether the run then fits its device by more than ``DryRun.uncertainty``; None without a device."""


class RangeCause(StrEnum):
    """Why a run's peaks are a range."""

    STREAMS = "streams"  # memory that side streams use is free again when the GPU has done that work
    WORKSPACES = "workspaces"  # cuDNN may choose engines with other workspaces, or with none


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A number of bytes that only a card decides, or an exact one: then both are the same."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class PeakRange:
    """The peaks of a run, as far as they are known without a card."""

    allocated: ByteRange
    reserved: ByteRange
    process: ByteRange
    causes: tuple[RangeCause, ...] = ()

    @classmethod
    def exactly(cls, allocated: int, reserved: int, process: int) -> Self:
        """Return peaks that are known to the byte."""
        return cls(
            ByteRange(allocated, allocated), ByteRange(reserved, reserved), ByteRange(process, process)
        )

    @classmethod
    def around(cls, *ranges: Self) -> Self:
        """Return the smallest range that contains others, with their causes.

        >>> around = PeakRange.around(PeakRange.exactly(1, 2, 3), PeakRange.exactly(1, 4, 5))
        >>> around.allocated, around.process
        (ByteRange(least=1, most=1), ByteRange(least=3, most=5))
        """
        allocated, reserved, process = (
            ByteRange(min(each.least for each in ends), max(each.most for each in ends))
            for ends in zip(*((one.allocated, one.reserved, one.process) for one in ranges), strict=True)
        )
        causes = dict.fromkeys(cause for one in ranges for cause in one.causes)
        return cls(allocated, reserved, process, tuple(causes))


@dataclass(frozen=True, slots=True)
class EquivalentRanks:
    """What a rank holds, and which ranks hold the same."""

    rank: int
    """The lowest rank of the role; memfit ran it."""
    also: tuple[int, ...]
    """The other ranks of the role."""
    peak: PeakRange
    verdict: str
    place: ScriptLocation
    """Where most was allocated."""


@dataclass(frozen=True, slots=True, repr=False)
class DryRun(PrintableResult):
    """What a script would use."""

    json_description = "What ``memfit dry-run --json`` and ``memfit record --json`` write."

    verdict: str
    """``fits``, ``tight`` (it fits by less than ``uncertainty``), ``does not fit`` (an allocation failed and
    the script carried on, or NCCL took more than PyTorch had left), ``out of memory``, ``may not fit`` (the
    two, with ``bound`` or ``range``: the script may need less), or ``unknown``: the script failed, gave up
    (an exit code other than 0), was interrupted, lacks updates (``end.missing_updates``) or started
    ``children`` that use the GPU, the run that finds its largest need failed (``untried``), or this is a
    snapshot, which names no device."""
    device: DeviceUse
    steps: int
    peak_allocated: int
    peak_reserved: int
    peak_process: Figure
    peak_place: ScriptLocation
    terms: tuple[Term, ...]
    """Rows that sum to the process's peak; totals last."""
    out_of_memory: OutOfMemory | None
    growth: Growth
    end: ScriptEnd
    notes: tuple[Note, ...]
    versions: Mapping[str, str]
    command: tuple[str, ...] = field(default=())
    advice: tuple[Advice, ...] | None = None
    """What makes the run fit, the fewest changes first, then the cheapest; if nothing does, or the run fits
    already, what lowers its peak. Each entry is an alternative. None if the caller did not ask."""
    advice_remarks: tuple[str, ...] = ()
    """Sentences about the advice, such as what a sample of a batch takes."""
    needs: Figure | None = None
    """Bytes of the process at its peak on the smallest device of this kind on which the run fits: PyTorch
    releases there what it caches on a larger one. None if that is not known. The baseline of the advice."""
    needs_without_workspaces: Figure | None = None
    """The same if convolutions use no workspaces; of a run that does not fit, more than the memory on which
    it failed. None if that is at most 2 % less."""
    uncertainty: int = 0
    """Bytes that the process may need besides, because terms of it are assumed."""
    caught: int = 0
    """Out-of-memory errors that the script caught before it completed a training step. The peaks are those
    after the last one; ``out_of_memory`` describes the first."""
    children: tuple[ChildProcess, ...] = ()
    """Processes that the script started and that used the GPU, too: the figures do not include them."""
    bounds: tuple[SizeBound, ...] = ()
    """Not empty if the peaks are upper bounds: the sizes that depend on GPU values and are set to the largest
    possible; the one that most of the peak follows from first."""
    untried: ScriptEnd | None = None
    """Why advice or the largest need, which take a rerun, is missing: how the script, or its rerun, ended
    (``refused``: it could not be rerun, or not with the change to be tried)."""

    range: PeakRange | None = None
    """The peaks if work on side streams is done at once, and as late as possible (the rest of the result is
    of the late run), and with and without the workspaces that cuDNN suggests (the rest is with them). None
    where the two ends meet; for workspaces, where they differ by at most 2 % of the process."""
    rank: JobRank | None = None
    """The rank that the figures are of; None for a script that ran as one process."""
    ranks: tuple[EquivalentRanks, ...] = ()
    """Every role of the job's ranks, if memfit ran them all: one that failed first, then the one that needs
    most. The rest of the result is of the first."""

    pinned: Figure | None = None
    """Most bytes of host memory that PyTorch's allocator pinned, beside those of the device; None if none."""
    unpinned: Figure | None = None
    """Most bytes of other host memory that optimizers' parameters, gradients and state took; None if none."""
    stages: tuple[StageUse, ...] = ()
    """The stages of the script's life, in the order in which it enters them; empty for a run that was ended
    after a few training steps."""
    shortened: tuple[Shortened, ...] = ()
    """What memfit made shorter than the script has it."""
    longest: tuple[PeakByBatchSize, ...] = ()
    """The loaders whose batches memfit looked through for the one that needs most."""

    step_time: StepTime | None = None
    """How long a training step takes on the device, with all ``ranks`` on the slowest; None if that is not
    known."""
    step_time_unknown: str = ""
    """Why ``step_time`` is None, as a clause; empty if it is not, or if this is no run on the ghost."""

    resumed: bool = False
    """Whether the result is of the run that resumed from what the first one had written."""

    @property
    def leaks_in_short_passes(self) -> bool:
        """Whether memory grows from step to step, and the script makes more steps than memfit ran."""
        return bool(self.shortened) and self.growth.leak

    @property
    def is_partial(self) -> bool:
        """Whether the script is known to go on with more than what was run."""
        return self.end.stopped or self.leaks_in_short_passes

    @property
    def worst_stage(self) -> StageUse | None:
        """The stage in which memory ran out, or else the one that allocates most; None without stages."""
        return max(self.stages, key=lambda use: (use.ran_out, use.allocated), default=None)

    @property
    def ran_out(self) -> bool:
        """Whether memory ran out, and the script did not recover from it."""
        return self.verdict in ("out of memory", "does not fit", "may not fit")

    @property
    def bound(self) -> SizeBound | None:
        """The size that most of the peak follows from, if the peaks are upper bounds."""
        return self.bounds[0] if self.bounds else None
