"""How much memory a run needs: what it takes on a GPU, or the smallest GPU on which it fits, by replay."""

from dataclasses import dataclass
from functools import cached_property

from memfit.allocator.config import environment_settings, script_settings
from memfit.allocator.replay import replay
from memfit.allocator.requests import Requests, read_requests
from memfit.allocator.setting_outcomes import setting_config, smallest_capacity
from memfit.analysis.allocator_comparison import torch_version
from memfit.analysis.location import least_certain
from memfit.devices import NO_LIMIT
from memfit.errors import MemfitError
from memfit.records import AllocatorSetting, DeviceUse, DryRun, Figure, Provenance, Replay, Trace, worst


@dataclass(frozen=True)
class ReplayedRun:
    """A run's requests, replayed under other allocator settings and on other GPUs."""

    trace: Trace
    found: DryRun
    """Its summary."""
    asked: Requests
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
    def unlimited(self) -> Replay:
        """The replay with unlimited memory."""
        return self.on(NO_LIMIT)

    def on(self, total: int) -> Replay:
        """Replay the run on a GPU with so many bytes."""
        return replay(
            self.asked,
            setting_config(self._setting),
            total=total,
            taken=self.taken,
            version=torch_version(self.trace),
        )

    def needs(self, gpu: int | None = None, *, fails: bool = False) -> Figure:
        """Return the bytes that PyTorch reserves at its peak, on a GPU or on the smallest that is enough.

        With less memory PyTorch releases what it caches, so the smallest GPU may have less than the run takes
        with unlimited memory.

        Args:
            gpu: bytes of the GPU; 0 if they are unknown, and then its memory counts as unlimited. None for
                the smallest.
            fails: whether the run is known not to fit it.
        """
        done = None if gpu is None or fails else self.on(gpu) if gpu else self.unlimited
        if done is not None and done.fits:
            return Figure(done.most_taken - self.taken, self._provenance(done))
        smallest = smallest_capacity(
            self.asked,
            self._setting,
            taken=self.taken,
            version=torch_version(self.trace),
            fails_at=gpu or 0,
            exhaustive=0,
        )
        return Figure(smallest - self.taken, worst(self._sure, Provenance.SIMULATED))

    @property
    def _setting(self) -> AllocatorSetting:
        settings = self.trace.settings
        return AllocatorSetting(self.conf or environment_settings(settings), script=script_settings(settings))

    @property
    def taken(self) -> int:
        """Bytes that PyTorch cannot take: the CUDA context, NCCL's, and what others use."""
        return self.trace.device.outside.bytes + self.trace.device.in_use

    @property
    def _sure(self) -> Provenance:
        return least_certain(note for note in self.trace.notes if note.sizes)

    def _provenance(self, done: Replay) -> Provenance:
        """Return how certain a replay is: it may be what the run itself did, or what memfit's model does."""
        seen = not self.conf and done.peak_reserved == self.found.peak_reserved
        return self._sure if seen else worst(self._sure, Provenance.SIMULATED)


def process_bytes(reserved: Figure, device: DeviceUse) -> Figure:
    """Return the bytes of a process in which PyTorch has so many reserved."""
    outside = device.outside
    return Figure(reserved.bytes + outside.bytes, worst(reserved.provenance, outside.provenance))


def needed_process(
    trace: Trace, found: DryRun, device: DeviceUse, gpu: int | None = None, *, fails: bool = False
) -> Figure:
    """Return the bytes of the process of a run, on a GPU or on the smallest that is enough.

    Args:
        trace: of the run, on a GPU that is large enough.
        found: its summary.
        device: what the process holds outside PyTorch's allocator.
        gpu: as for ``ReplayedRun.needs``.
        fails: the same.
    """
    try:
        reserved = ReplayedRun.of(trace, found).needs(gpu, fails=fails)
    except MemfitError:  # memfit has no model of that allocator
        return found.peak_process
    return process_bytes(reserved, device)
