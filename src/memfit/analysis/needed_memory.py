"""How much memory a run needs: what it takes on a GPU, or the smallest GPU on which it fits, by replay."""

from dataclasses import dataclass, replace
from functools import cached_property

from memfit.allocator.config import settings_from_environment, settings_made_by_script
from memfit.allocator.replay import replay_requests
from memfit.allocator.requests import AllocatorRequests, read_requests
from memfit.allocator.setting_outcomes import config_of_setting, smallest_device_that_fits
from memfit.analysis.allocator_comparison import torch_version
from memfit.analysis.location import least_certain
from memfit.devices import NO_LIMIT
from memfit.errors import FileFormatError, UsageError
from memfit.records import (
    AllocatorSetting,
    DeviceUse,
    DryRun,
    Figure,
    Provenance,
    ReplayResult,
    Trace,
    worst_provenance,
)


@dataclass(frozen=True)
class ReplayedRun:
    """A run's requests, replayed under other allocator settings and on other GPUs."""

    trace: Trace
    found: DryRun
    """Its summary."""
    asked: AllocatorRequests
    """What ``read_requests(trace)`` returned."""
    conf: str = ""
    """``PYTORCH_ALLOC_CONF``; empty for the run's own."""
    late: bool = False
    """Whether GPU work on side streams finished late."""

    @classmethod
    def of(cls, trace: Trace, found: DryRun, *, late: bool = False) -> "ReplayedRun":
        """Read a run's requests.

        Raises:
            MemfitError: its history is incomplete, or the allocator was not PyTorch's own.
        """
        return cls(trace, found, read_requests(trace), late=late)

    @cached_property
    def unlimited(self) -> ReplayResult:
        """The replay with unlimited memory."""
        return self.on(NO_LIMIT)

    def on(self, total: int) -> ReplayResult:
        """Replay the run on a GPU with so many bytes."""
        return replay_requests(
            self.asked,
            config_of_setting(self._setting),
            total=total,
            taken=self.taken,
            version=torch_version(self.trace),
        )

    def needs(self, fails_at: int = 0) -> Figure:
        """Return the bytes that PyTorch reserves at its peak on the smallest GPU on which the run fits.

        With less memory PyTorch releases what it caches, so it takes less there than on a larger GPU. Where
        GPU work finishes late, it is what the run takes with unlimited memory: an upper bound.

        Args:
            fails_at: bytes of a GPU on which the run is known not to fit.
        """
        if self.late:
            return self._reserved(self.unlimited, self.unlimited.most_taken)
        smallest = self._smallest()
        if smallest > fails_at:
            done, fraction = self.on(smallest), config_of_setting(self._setting).per_process_memory_fraction
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
            self.conf or settings_from_environment(settings), script=settings_made_by_script(settings)
        )

    @property
    def taken(self) -> int:
        """Bytes that PyTorch cannot take: the CUDA context, NCCL's, and what others use."""
        return self.trace.device.outside.bytes + self.trace.device.in_use

    @property
    def _sure(self) -> Provenance:
        return least_certain(note for note in self.trace.notes if note.sizes)


def process_bytes(reserved: Figure, device: DeviceUse) -> Figure:
    """Return the bytes of a process in which PyTorch has so many reserved."""
    outside = device.outside
    return Figure(reserved.bytes + outside.bytes, worst_provenance(reserved.provenance, outside.provenance))


def needed_process(trace: Trace, found: DryRun, device: DeviceUse, *, fails_at: int = 0) -> Figure:
    """Return the bytes of the process of a run on the smallest GPU on which it fits.

    Args:
        trace: of the run, on a GPU that is large enough.
        found: its summary.
        device: what the process holds outside PyTorch's allocator.
        fails_at: bytes of a GPU on which the run is known not to fit.
    """
    try:
        reserved = ReplayedRun.of(trace, found).needs(fails_at)
    except (FileFormatError, UsageError):  # memfit has no model of that allocator
        return found.peak_process
    needs = process_bytes(reserved, device)
    return needs if fails_at else min(needs, found.peak_process, key=lambda figure: figure.bytes)


def with_needs(trace: Trace, found: DryRun) -> DryRun:
    """Return a run's result with what it needs, if it fits its GPU; the verdict follows what it needs.

    Args:
        trace: the run.
        found: its summary. Where its peaks are a range, what it needs without workspaces is found, too.
    """
    if found.verdict not in ("fits", "tight") or found.caught:  # a script that runs out adapts to its GPU
        return found
    needs = needed_process(trace, found, found.device)
    left = found.device.total.bytes - found.device.in_use - needs.bytes
    return replace(found, needs=needs, verdict="tight" if left < found.uncertainty else "fits")
