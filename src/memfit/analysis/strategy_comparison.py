"""One script under several strategies: which ranks to run, and what each run needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memfit.analysis.dry_run_result import dry_run_of_trace
from memfit.analysis.needed_memory import process_bytes_on_smallest_gpu
from memfit.analysis.side_stream_peak_range import with_side_stream_range
from memfit.analysis.trial_result import TrialResult, why_run_failed
from memfit.records import (
    ByteRange,
    Change,
    ComparedRun,
    DeviceUse,
    DryRun,
    PeakRange,
    ScriptEnd,
)

AS_WRITTEN, AS_IN = "as written", "as in "
"""The name of the script itself, and what precedes the name of a file of settings."""
SHARDINGS = {"DDP": "ddp", "ZeRO-1": "zero1", "FSDP2": "fsdp2"}
"""Modes of ``memfit.Sharding`` by their names."""


def sharding_settings(mode: str) -> dict[str, Any]:
    """Return the settings with which memfit shards a script for one GPU."""
    return {"mode": mode, "split_batch": True}


@dataclass(frozen=True, slots=True)
class StrategyCombination:
    """A set of strategies to run a script with."""

    name: str
    change: Change
    group: str = ""
    """Of the rows that are alike; empty for the script as written."""


def refusal_of_strategies(of: StrategyCombination, refused: Mapping[Change, ScriptEnd]) -> ScriptEnd | None:
    """Return why strategies cannot be applied, if some of them alone cannot."""

    def is_part(change: Change) -> bool:
        ours = of.change.own_sharding
        own = all(
            options.items() <= ours.get(call, {}).items() for call, options in change.own_sharding.items()
        )
        return own and change.plan.items() <= of.change.plan.items()

    return next((end for change, end in refused.items() if is_part(change)), None)


def first_rank_that_holds_most(nproc: int) -> int:
    """Return a rank that holds most where all ranks hold the same in PyTorch's allocator.

    NCCL connects the ranks of a machine in a chain: those at its ends take less. Of two, the first takes
    more (``ghost/ranks/nccl_memory.py``).
    """
    return 1 if nproc > 2 else 0  # noqa: PLR2004 - the shortest chain that has an inside


def ranks_that_may_need_most(shares: Sequence[int], nproc: int) -> tuple[int, ...]:
    """Return the ranks that may need most, given the bytes of each rank's share.

    >>> ranks_that_may_need_most([9, 5, 5, 4], 4)  # the largest share, and the largest inside of NCCL's chain
    (0, 1)
    >>> ranks_that_may_need_most([5, 5, 5, 4], 4)
    (1,)
    """
    inside = [rank for rank in range(len(shares)) if 0 < rank % nproc < nproc - 1]
    largest = max([*inside, *range(len(shares))], key=shares.__getitem__)
    return tuple(dict.fromkeys([largest, *([max(inside, key=shares.__getitem__)] if inside else [])]))


def compared_run_of_trial(
    of: StrategyCombination, rank: int, early: TrialResult, late: TrialResult | None, device: DeviceUse
) -> ComparedRun:
    """Return what a run with strategies needs.

    Args:
        of: the strategies.
        rank: the rank that ran.
        early: its run with unlimited memory.
        late: the same, with GPU work that finishes late; None if no streams race.
        device: the device to fit.
    """
    found = dry_run_of_trace(early.trace)
    device = replace(device, nccl=early.trace.device.nccl)
    needs = process_bytes_on_smallest_gpu(early.trace, found, device)
    if late is not None:
        after = replace(late.trace, device=early.trace.device)
        finished_late = dry_run_of_trace(after)
        at_most = process_bytes_on_smallest_gpu(after, finished_late, device)
        needs = max(needs, at_most, key=lambda figure: figure.bytes)
        found = with_side_stream_range(found, finished_late)
    peak = found.range or PeakRange.exactly(found.peak_allocated, found.peak_reserved, needs.bytes)
    least = peak.process.least if found.range else needs.bytes
    return ComparedRun(
        name=of.name,
        plan=of.change.code,
        settings=of.change.strategies,
        own_sharding=of.change.own_sharding,
        models=early.models,
        rank=rank,
        peak=replace(peak, process=ByteRange(min(least, needs.bytes), needs.bytes)),
        provenance=next(term.figure.provenance for term in found.terms if term.name == "reserved"),
        needs=needs,
        verdict=_verdict(found, least, needs.bytes, device),
        place=found.peak_place,
    )


def with_change_from_first_run(runs: Sequence[ComparedRun]) -> tuple[ComparedRun, ...]:
    """Return runs with what each needs beyond the first, the script as written."""
    base = runs[0].needs
    return tuple(
        run if base is None or run.needs is None else replace(run, change=run.needs.bytes - base.bytes)
        for run in runs
    )


def compared_run_from_failure(of: StrategyCombination, end: ScriptEnd) -> ComparedRun:
    """Return that strategies cannot be applied, or that the script fails with them, and why."""
    return ComparedRun(
        of.name,
        of.change.code,
        of.change.strategies,
        own_sharding=of.change.own_sharding,
        reason=why_run_failed(end),
    )


def _verdict(found: DryRun, least: int, most: int, device: DeviceUse) -> str:
    room = device.total.bytes - device.in_use
    if found.children:
        return "unknown"
    if most > room:
        return "may not fit" if found.bounds or least <= room else "does not fit"
    return "tight" if room - most < found.uncertainty else "fits"
