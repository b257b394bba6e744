"""A script under several strategies: what it would need with each of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memfit.records.dry_run import PeakRange
from memfit.records.own_sharding import CallOptions, ShardingCalls
from memfit.records.printable_result import PrintableResult
from memfit.records.provenance import Figure, Provenance
from memfit.records.script_change import Equality
from memfit.records.step_time import StepTime
from memfit.records.trace import DeviceUse, ScriptLocation


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """The script under one set of strategies; on several GPUs, the rank that needs most."""

    name: str
    """``DDP + checkpointing``; ``as written`` for the script itself."""
    plan: tuple[str, ...]
    """The strategies as Python expressions."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The same as settings: of ``memfit.configure``, or of a file for ``memfit train --plan``."""
    own_sharding: Mapping[str, CallOptions] = field(default_factory=dict)
    """By call with which the script shards itself: arguments in place of its own."""
    models: tuple[str, ...] = ()
    """Models that they were applied to: the class of each, and the line that creates its optimizer."""
    rank: int | None = None
    """None without figures."""
    peak: PeakRange | None = None
    """With unlimited memory; None if there are no figures: see ``reason``."""
    provenance: Provenance = Provenance.EXACT
    """Of what PyTorch allocates and reserves."""
    needs: Figure | None = None
    """Bytes of the process at its peak: on the device or, if it does not fit, on the smallest on which it
    does. Where streams race, the most."""
    verdict: str = "unknown"
    """As in ``DryRun``; ``unknown`` without figures."""
    change: int | None = None
    """Bytes by which ``needs`` exceeds what the script as written needs; None if either is unknown."""
    place: ScriptLocation | None = None
    """Where most was allocated."""
    time: float | None = None
    """Of a step, relative to the script as written; None if either is not known."""
    step_time: StepTime | None = None
    """How long a step takes."""
    equality: Equality | None = None
    """What training computes, compared with the script as written, and under a sharding with DDP; None
    without figures."""
    reason: str = ""
    """Why there are no figures."""


@dataclass(frozen=True, slots=True, repr=False)
class StrategyComparison(PrintableResult):
    """What a script would need under each set of strategies."""

    json_description = "What ``memfit compare --json`` writes."

    device: DeviceUse
    nproc: int
    """Ranks on each machine."""
    nnodes: int
    """Machines."""
    runs: tuple[ComparedRun, ...]
    """The script as written first."""
    command: tuple[str, ...]
    versions: Mapping[str, str]
    distributed: bool = False
    """Whether the script as written trains on several GPUs."""
    sharding_calls: tuple[ShardingCalls, ...] = ()
    """How the script as written shards itself, by calls whose options memfit compares."""
    rule: str = ""
    """What the times are based on; empty if none is known."""
    draws: bool = False
    """Whether a step draws random numbers: slices of a batch get other ones than the whole batch."""
    interrupted: bool = False
    """Whether the user interrupted the comparison, so that later runs are missing."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nproc * self.nnodes
