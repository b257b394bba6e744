"""How much memory a run needs: what it takes on a GPU, or the smallest GPU on which it fits, by replay.

    the run's requests ──────────────────────> its peaks, with the workspaces that cuDNN suggested
      less the workspaces of cuDNN's plans ──> replayed: the peaks without them, the other end of a range

cuDNN was queried without a GPU. On a card, another version of it may choose engines with larger workspaces,
or with none. A script requests the same memory for everything else, so the replay is exact.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from memfit.allocator.config import allocator_conf_from_environment, allocator_settings_made_by_script
from memfit.allocator.replay import replay_requests
from memfit.allocator.requests import AllocatorRequests, RequestKind, allocator_requests_of_trace
from memfit.allocator.setting_outcomes import allocator_config_of_setting, smallest_device_that_fits
from memfit.analysis.allocator_comparison import torch_version
from memfit.analysis.event_locations import worst_provenance_of_notes
from memfit.devices import NO_LIMIT
from memfit.errors import FileFormatError, MemfitError, UsageError
from memfit.records import (
    Action,
    AllocatorSetting,
    ByteRange,
    Category,
    DeviceUse,
    DryRun,
    Figure,
    Note,
    PeakRange,
    Provenance,
    RangeCause,
    ReplayResult,
    Trace,
    worst_provenance,
)
from memfit.units import format_bytes, format_gib

_NOTABLE = 0.02
"""Share of the process from which on the two ends are shown."""
_NAMED = 3
"""Modules that the note names."""


@dataclass(frozen=True)
class ReplayableRun:
    """A run's requests, replayed under other allocator settings and on other GPUs."""

    trace: Trace
    found: DryRun
    """Its summary."""
    asked: AllocatorRequests
    """What ``allocator_requests_of_trace(trace)`` returned."""
    conf: str = ""
    """``PYTORCH_ALLOC_CONF``; empty for the run's own."""

    @classmethod
    def of(cls, trace: Trace, found: DryRun) -> "ReplayableRun":
        """Read a run's requests.

        Raises:
            MemfitError: its history is incomplete, or the allocator was not PyTorch's own.
        """
        return cls(trace, found, allocator_requests_of_trace(trace))

    @cached_property
    def unlimited(self) -> ReplayResult:
        """The replay with unlimited memory."""
        return self.on(NO_LIMIT)

    def on(self, total: int) -> ReplayResult:
        """ReplayResult the run on a GPU with so many bytes."""
        return replay_requests(
            self.asked,
            allocator_config_of_setting(self._setting),
            total=total,
            taken=self.taken,
            version=torch_version(self.trace),
        )

    def needs(self, fails_at: int = 0) -> Figure:
        """Return the bytes that PyTorch reserves at its peak on the smallest GPU on which the run fits.

        With less memory PyTorch waits for streams that still use freed blocks, and releases what it caches,
        so it takes less there than on a larger GPU.

        Args:
            fails_at: bytes of a GPU on which the run is known not to fit.
        """
        smallest = self._smallest()
        if smallest > fails_at:
            done, fraction = (
                self.on(smallest),
                allocator_config_of_setting(self._setting).per_process_memory_fraction,
            )
            return self._reserved(done, done.most_taken if fraction is None else smallest)
        # The replay would fit, but the run itself did not: it may do other things where memory is short.
        return Figure(
            self._smallest(fails_at) - self.taken, worst_provenance(self._sure, Provenance.SIMULATED)
        )

    def _smallest(self, fails_at: int = 0) -> int:
        return smallest_device_that_fits(
            self.asked,
            self._setting,
            taken=self.taken,
            version=torch_version(self.trace),
            fails_at=fails_at,
            exhaustive=0,
        )

    def _reserved(self, done: ReplayResult, gpu: int) -> Figure:
        """Return what a GPU has for PyTorch; that is as certain as the run if it did the same."""
        seen = not self.conf and done.peak_reserved == self.found.peak_reserved
        return Figure(
            gpu - self.taken, self._sure if seen else worst_provenance(self._sure, Provenance.SIMULATED)
        )

    @property
    def _setting(self) -> AllocatorSetting:
        settings = self.trace.settings
        return AllocatorSetting(
            self.conf or allocator_conf_from_environment(settings),
            script=allocator_settings_made_by_script(settings),
        )

    @property
    def taken(self) -> int:
        """Bytes that PyTorch cannot take: the CUDA context, NCCL's, and what others use."""
        return self.trace.device.outside.bytes + self.trace.device.in_use

    @property
    def _sure(self) -> Provenance:
        return worst_provenance_of_notes(note for note in self.trace.notes if note.sizes)


def process_bytes_with_reserved(reserved: Figure, device: DeviceUse) -> Figure:
    """Return the bytes of a process in which PyTorch has so many reserved."""
    outside = device.outside
    return Figure(reserved.bytes + outside.bytes, worst_provenance(reserved.provenance, outside.provenance))


def process_bytes_on_smallest_gpu(
    trace: Trace, found: DryRun, device: DeviceUse, *, fails_at: int = 0
) -> Figure:
    """Return the bytes of the process of a run on the smallest GPU on which it fits."""
    try:
        reserved = ReplayableRun.of(trace, found).needs(fails_at)
    except (FileFormatError, UsageError):  # memfit has no model of that allocator
        return found.peak_process
    needs = process_bytes_with_reserved(reserved, device)
    return needs if fails_at else min(needs, found.peak_process, key=lambda figure: figure.bytes)


def with_needed_memory(trace: Trace, found: DryRun) -> DryRun:
    """Return a run's result with what it needs, if it fits its GPU; the verdict follows what it needs."""
    if found.verdict not in ("fits", "tight") or found.caught:  # a script that runs out adapts to its GPU
        return found
    needs = process_bytes_on_smallest_gpu(trace, found, found.device)
    left = found.device.total.bytes - found.device.in_use - needs.bytes
    return replace(found, needs=needs, verdict="tight" if left < found.uncertainty else "fits")


def with_range_by_workspaces(trace: Trace, found: DryRun) -> DryRun:
    """Return a run's result; a range if cuDNN's workspaces change its peaks by over 2 % of the process."""
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
    needs, least = (
        found.needs or found.peak_process,
        process_bytes_with_reserved(without_workspaces.needs(), found.device),
    )
    # Without workspaces a run may need more: their blocks are not there to reuse.
    left = found.device.total.bytes - found.device.in_use - max(needs.bytes, least.bytes)
    return replace(
        found,
        verdict="tight" if left < found.uncertainty else found.verdict,
        range=either,
        needs_without_workspaces=least if least.bytes != needs.bytes else None,
        notes=(*found.notes, Note(Provenance.SIMULATED, _text(trace, of_plans, process), sizes=True)),
    )


def memory_needed_without_convolution_workspaces(
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
    least = process_bytes_with_reserved(run.needs(fails_at), device)
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


def _without(trace: Trace, found: DryRun, of_plans: npt.NDArray[np.bool_]) -> ReplayableRun | None:
    """Return the run without these allocations, to be replayed; None if memfit cannot replay it."""
    try:
        run = ReplayableRun.of(trace, found)
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
