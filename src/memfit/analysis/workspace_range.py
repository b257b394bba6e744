"""What a run needs if its convolutions use no workspaces: the other end of a range.

    the run's requests ──────────────────────> its peaks, with the workspaces that cuDNN suggested
      less the workspaces of cuDNN's plans ──> replayed: the peaks without them

cuDNN was queried without a GPU. On a card, another version of it may choose engines with larger workspaces,
or with none. A script requests the same memory for everything else, so the replay is exact.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from memfit.allocator.requests import AllocatorRequests, RequestKind
from memfit.analysis.needed_memory import ReplayedRun, process_bytes
from memfit.errors import MemfitError
from memfit.records import (
    Action,
    ByteRange,
    Category,
    DeviceUse,
    DryRun,
    Figure,
    Note,
    PeakRange,
    Provenance,
    RangeCause,
    Trace,
)
from memfit.units import format_bytes, format_gib

_NOTABLE = 0.02
"""Share of the process from which on the two ends are shown."""
_NAMED = 3
"""Modules that the note names."""


def with_workspace_range(trace: Trace, found: DryRun) -> DryRun:
    """Return a run's result, as a range if its peaks depend on cuDNN's workspaces by over 2 % of the process.

    Args:
        trace: the run.
        found: its summary, with what it needs.
    """
    of_plans = _workspaces(trace)
    if found.verdict not in ("fits", "tight") or not of_plans.any():
        return found
    without_workspaces = _without(trace, found, of_plans)
    if without_workspaces is None:
        return found
    bare = without_workspaces.on(found.device.total.bytes)
    if not bare.fits:
        return found
    outside = found.peak_process.bytes - found.peak_reserved
    asked = PeakRange.exactly(found.peak_allocated, found.peak_reserved, found.peak_process.bytes)
    without = PeakRange.exactly(bare.peak_allocated, bare.peak_reserved, bare.peak_reserved + outside)
    either = replace(PeakRange.around(asked, without), causes=(RangeCause.WORKSPACES,))
    process = either.process
    if process.most - process.least <= _NOTABLE * found.peak_process.bytes:
        return found
    needs, least = found.needs or found.peak_process, process_bytes(without_workspaces.needs(), found.device)
    # Without workspaces a run may need more: their blocks are not there to reuse.
    left = found.device.total.bytes - found.device.in_use - max(needs.bytes, least.bytes)
    return replace(
        found,
        verdict="tight" if left < found.uncertainty else found.verdict,
        range=either,
        needs_without_workspaces=least if least.bytes != needs.bytes else None,
        notes=(*found.notes, Note(Provenance.SIMULATED, _text(trace, of_plans, process), sizes=True)),
    )


def needed_without_workspaces(
    trace: Trace, found: DryRun, device: DeviceUse, needs: Figure, fails_at: int = 0
) -> Figure | None:
    """Return what a run needs if its convolutions use no workspaces.

    Args:
        trace: of the run, on a GPU that is large enough.
        found: its summary.
        device: what the process holds outside PyTorch's allocator.
        needs: what the run needs with them.
        fails_at: bytes of a GPU on which it is known not to fit.

    Returns:
        The bytes of the process on the smallest GPU that is enough. None if they are at most 2 % less than
        with workspaces.
    """
    of_plans = _workspaces(trace)
    run = _without(trace, found, of_plans) if of_plans.any() else None
    if run is None:
        return None
    least = process_bytes(run.needs(fails_at), device)
    return least if needs.bytes - least.bytes > _NOTABLE * needs.bytes else None


def _workspaces(trace: Trace) -> npt.NDArray[np.bool_]:
    """Return which events allocated a workspace of one of cuDNN's plans, or failed to."""
    events = trace.events
    if not trace.cudnn_workspaces:
        return np.zeros(len(events), np.bool_)
    failed = events.action == Action.OOM
    allocated = (events.action == Action.ALLOC) & np.isin(events.size, trace.cudnn_workspaces)
    of_libraries = events.category == Category.WORKSPACE
    of_plans: npt.NDArray[np.bool_] = of_libraries & (failed | allocated)
    return of_plans


def _without(trace: Trace, found: DryRun, of_plans: npt.NDArray[np.bool_]) -> ReplayedRun | None:
    """Return the run without these allocations, to be replayed; None if memfit cannot replay it."""
    try:
        run = ReplayedRun.of(trace, found)
    except MemfitError:  # memfit has no model of that allocator
        return None
    asked = run.asked
    of_workspaces = {
        block
        for ask, block, event in zip(asked.ask, asked.block, asked.event, strict=True)
        if ask == RequestKind.MALLOC and event < len(of_plans) and of_plans[event]
    }
    bare = AllocatorRequests(pools=asked.pools, reserved_before=asked.reserved_before)
    rows = zip(asked.ask, asked.event, asked.block, asked.size, asked.stream, asked.pool, strict=True)
    for ask, event, block, size, stream, pool in rows:
        failed = ask == RequestKind.FAILED and of_plans[event]
        if block not in of_workspaces and not failed:
            bare.add(RequestKind(ask), event, block, size, stream, pool)
    return replace(run, asked=bare)


def _text(trace: Trace, of_plans: npt.NDArray[np.bool_], process: ByteRange) -> str:
    largest = ", ".join(
        f"{module or 'a convolution outside modules'} ({phase}): {format_bytes(size)}"
        for module, phase, size in _largest(trace, of_plans)
    )
    return (
        f"The process takes {format_gib(process.least)} to {format_gib(process.most)}, depending on the "
        "workspaces of convolutions: those that the installed cuDNN suggests for this card, or none. The "
        f"largest: {largest}. What may need less, if the script does not have them: channels_last tensors, "
        "and torch.backends.cudnn.benchmark = False (the default; True times engines in the largest "
        "workspace). Another dry run shows by how much."
    )


def _largest(trace: Trace, of_plans: npt.NDArray[np.bool_]) -> Iterator[tuple[str, str, int]]:
    """Yield the modules with the largest workspaces: module, phase, bytes."""
    most: dict[tuple[str, str], int] = {}
    events = trace.events
    for event in np.flatnonzero(of_plans & (events.action == Action.ALLOC)).tolist():
        label = trace.labels[events.label[event]]
        place = label.module, str(label.phase)
        most[place] = max(most.get(place, 0), int(events.size[event]))
    for (module, phase), size in sorted(most.items(), key=lambda one: -one[1])[:_NAMED]:
        yield module, phase, size
