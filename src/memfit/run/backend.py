"""What a script runs on: the ghost, or this machine's own GPU.

        begin        refusal        stepped       hint          device
ghost   patches      no kernels     drops values  gaps, values  as configured
card    -            no history     reads usage   -             as measured
"""

import os
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from memfit.card.detect_card import is_ghost_loaded
from memfit.card.outside_allocator import OutsideMemoryMeter
from memfit.devices import find_device, why_torch_lacks_kernels
from memfit.ghost.deepspeed_kernels import run_deepspeed_without_kernels
from memfit.ghost.ghost_device import show_device_memory_to_script
from memfit.ghost.load_ghost import load
from memfit.ghost.rank_exchange_protocol import RankExchange, what_others_sent
from memfit.ghost.ranks.collective_release_times import CollectiveWatcher, wait_until_collectives_released
from memfit.ghost.runtime_bindings import GhostRuntime
from memfit.ghost.workspaces import WorkspaceSource
from memfit.native_build import cache_folder
from memfit.patching.after_import import call_after_import
from memfit.records import DeviceUse, Figure, MachineKind, Provenance, ScriptEnd, StandIn
from memfit.run.charge_nccl_communicators_to_ghost import CommunicatorMemory
from memfit.run.child_start import ChildSettings, GhostSettings
from memfit.run.job_rank import Rank
from memfit.run.options import RunOptions
from memfit.units import format_bytes

if TYPE_CHECKING:
    from memfit.ghost.skip_random_fills import RandomFillSkipper
    from memfit.ghost.values.gpu_reads import AssumedValues
    from memfit.recording.recorder import Recorder

_LOADER = "transformers.modeling_utils"
_STEPS_SETTLED = 5  # DistributedDataParallel replaces its buckets after the first
READING_INTERVAL = 0.5  # seconds between two readings of a card: NVML takes milliseconds


class Backend(ABC):
    """What a script runs on."""

    ghost: GhostRuntime | None = None
    """The ghost if the script runs on it."""
    _recorder: "Recorder | None" = None
    _has_joined = False

    def begin(self, recorder: "Recorder") -> None:
        """Prepare torch, which has just been imported."""
        self._recorder = recorder

    def go_on(self, settings: ChildSettings) -> None:  # noqa: B027 - a card needs nothing
        """Go on in a fork of this process, as another run."""

    @abstractmethod
    def refusal(self) -> str:
        """Return why the script, now that it initialises CUDA, cannot continue; empty if it can."""

    def joined(self) -> None:
        """Remember that the script has joined a process group."""
        self._has_joined = True

    def exchange_with(self, ranks: RankExchange) -> None:  # noqa: B027 - ranks on cards exchange by themselves
        """Have the script's ranks exchange small tensors."""

    @abstractmethod
    def stepped(self) -> None:
        """Handle the end of a training step."""

    def hint(self) -> str:
        """Return what about the backend may have made the script fail; empty if nothing."""
        return ""

    def stand_ins(self) -> tuple[StandIn, ...]:
        """Return the stand-ins for GPU values that the script read last, newest first."""
        return ()

    def explained(self, end: ScriptEnd, *, shortened: bool) -> ScriptEnd:
        """Add what is missing, and the stand-ins that decide; ``shortened``: memfit made loops shorter."""
        if end.reason == "exception" or end.gave_up:
            return replace(end, stand_ins=self.stand_ins())
        if self._recorder is None or not (end.reason == "end" or end.stopped):
            return end
        updates = self._recorder.steps.updates
        missing, reads = updates.missing(stopped=end.stopped, shortened=shortened)
        if missing:
            return replace(end, missing_updates=missing, stand_ins=reads or self.stand_ins())
        if not end.stopped:
            self._recorder.steps.count_last_steps()
        return replace(end, stand_ins=updates.steering(stopped=end.stopped))

    @abstractmethod
    def device(self) -> DeviceUse:
        """Return what the script ran on, and record notes about it. Called after the script has ended."""

    def cudnn_workspaces(self) -> tuple[int, ...]:
        """Return the sizes that cuDNN's plans reported for their workspaces, in ascending order; bytes."""
        return ()

    def versions(self) -> dict[str, str]:
        """Return further versions that the figures may depend on, by name."""
        return {}


class GhostBackend(Backend):
    """The ghost, loaded into this process.

    Raises:
        GhostError: it cannot be loaded, or refuses the configuration.
    """

    def __init__(self, settings: GhostSettings, options: RunOptions) -> None:
        self._settings = settings
        self._options = options
        self._values: AssumedValues | None = None
        self._host: RandomFillSkipper | None = None
        self._steps = 0
        self._collectives: CollectiveWatcher | None = None
        context = settings.device.context.bytes
        self.ghost: GhostRuntime = load(settings.build)
        self.ghost.configure(
            settings.stands_for,
            count=settings.visible_devices,
            in_use=context + settings.device.in_use,
            context=context,
            workspaces=WorkspaceSource(options.workspaces),
        )
        device = find_device(settings.device.name)
        self._communicators = CommunicatorMemory(self.ghost, device, options.rank.nproc)
        # Now, not when torch has been imported: the loader may be what imports torch.
        call_after_import(_LOADER, self._patch_weight_loading)

    def begin(self, recorder: "Recorder") -> None:
        """Patch GPU reads, the compilers and, if the options ask for it, the filling of CPU tensors."""
        from memfit.ghost.compile import isolate_torch_compile
        from memfit.ghost.values import gpu_reads
        from memfit.recording.use_of_read import use_of_read

        super().begin(recorder)
        if self._options.finish_late:
            self._finish_work_late()
        else:
            self._collectives = CollectiveWatcher(self.ghost)
            call_after_import("torch.distributed.distributed_c10d", self._collectives.install)
        choices = gpu_reads.GpuValueOptions.parse(self._options.values)
        self._values = gpu_reads.answer_gpu_reads(
            self.ghost,
            choices,
            recorder.note,
            forward_lines=recorder.labelled_lines,
            fallback_where=recorder.place,
            senders_exist=self._options.real_ranks,
            on_stand_in=lambda read: recorder.steps.updates.note_read(read, *use_of_read()),
        )
        if self._settings.shown_memory is not None:
            show_device_memory_to_script(self._settings.shown_memory)
        caches = cache_folder("compiled-graphs")
        isolate_torch_compile.isolate_compilation(
            self.ghost, caches, recorder.note, labelled=recorder.book.doing
        )
        call_after_import("torch._inductor.fx_passes.joint_graph", self._follow_folding)
        run_deepspeed_without_kernels(recorder.note)
        if self._options.host_memory:
            from memfit.ghost.skip_random_fills import RandomFillSkipper

            self._host = RandomFillSkipper(recorder.note)

    def go_on(self, settings: ChildSettings) -> None:
        """Go on in a fork of this process: with more memory, or with work that finishes late.

        Nothing else of the ghost differs between the runs, and no work could have been late so far.
        """
        options, ghost = settings.options, settings.ghost or self._settings
        self.ghost.set_capacity(ghost.stands_for.total_bytes)
        if ghost.shown_memory is not None and self._settings.shown_memory is None:
            show_device_memory_to_script(ghost.shown_memory)
        if self._collectives is not None and options.finish_late:
            self._collectives.remove()
            self._collectives = None
            self._finish_work_late()
        self._settings, self._options = ghost, options

    def _finish_work_late(self) -> None:
        from memfit.ghost.late_stream_work import finish_stream_work_late

        finish_stream_work_late(self.ghost)

    def exchange_with(self, ranks: RankExchange) -> None:
        """Have the script's ranks exchange small tensors."""
        if self._values is not None:
            self._values.ranks = ranks

    def _follow_folding(self) -> None:
        from memfit.ghost.compile.constant_folding import track_folded_constants

        if self._values is not None:
            track_folded_constants(self._values.known)

    def _patch_weight_loading(self) -> None:
        from memfit.ghost import pretrained_weights

        if self._recorder is not None:
            pretrained_weights.substitute_missing_weights(
                sys.modules[_LOADER], self._recorder.note, no_weights=not self._options.weights
            )

    def refusal(self) -> str:
        """Return that torch has no kernels for the device, if so.

        Must not be called before CUDA is initialised: querying the architectures torch was built for marks
        the process as one that must not fork.
        """
        import torch

        built_for = (torch._C._cuda_getArchFlags() or "").split()
        return (
            why_torch_lacks_kernels(find_device(self._settings.device.name), built_for, torch.__version__)
            or ""
        )

    def stepped(self) -> None:
        """Drop the values known in the step, which are of no use in the next, and settle its collectives."""
        if self._values is not None:
            self._values.stepped()
        if self._options.finish_late:  # the host runs ahead of the GPU, but not by more than a step
            self.ghost.hold_events(False)
        self._steps += 1
        if self._steps <= _STEPS_SETTLED:
            wait_until_collectives_released()
        if self._options.finish_late:
            self.ghost.finish_late()

    def hint(self) -> str:
        """Return a sentence on a rejected library, or on a gap reached."""
        rejections = self.ghost.extensions.rejections
        if rejections:
            return rejections[-1]
        if gaps := self._gaps_reached():
            named = ", ".join(map(self._named, gaps))
            return f"the ghost does not implement {named} (see memfit doctor --gaps) and returned an error."
        ranks = self._ranks()
        return "" if ranks is None else ranks.missing

    def _ranks(self) -> RankExchange | None:
        return None if self._values is None else self._values.ranks

    def stand_ins(self) -> tuple[StandIn, ...]:
        """Return the stand-ins that the script read last, newest first; none if ``hint`` says more."""
        return () if self._values is None or self.hint() else self._values.last_stand_ins()

    def device(self) -> DeviceUse:
        """Return the device as configured, and record a note for each gap that the run reached."""
        if self._recorder is None:
            return self._settings.device
        rank = self._options.rank
        if rank.world_size > 1 and self._has_joined:
            others = what_others_sent(self._ranks(), real=self._options.real_ranks)
            text = f"The script ran as {rank}. {others}"
            self._recorder.note(Provenance.ASSUMED, text)  # sizes rarely follow from what others send
        elif rank.world_size > 1:
            text = f"The script ran as {rank}, and joined no process group: it trains by itself."
            self._recorder.note(Provenance.EXACT, text, sizes=True)
        elif self._settings.visible_devices > 1:
            seen = f"The script saw {self._settings.visible_devices} GPUs (CUDA_VISIBLE_DEVICES)"
            self._recorder.note(Provenance.EXACT, f"{seen}; these figures are for the first.", sizes=True)
        for text in _on_other_devices(rank) if rank.world_size > 1 else ():
            self._recorder.note(Provenance.EXACT, text, sizes=True)
        for pair in self._values.unused() if self._values is not None else ():
            text = f"--values {pair} had no effect: the script read no GPU value that it applies to."
            self._recorder.note(Provenance.EXACT, text, sizes=True)
        for text in self._reached():
            self._recorder.note(Provenance.ASSUMED, text, sizes=True)
        for reason in self.ghost.extensions.rejections:
            self._recorder.note(Provenance.ASSUMED, reason, sizes=True)
        for provenance, text in self.ghost.workspaces.notes():
            self._recorder.note(provenance, text, sizes=True, workspaces=True)
        return replace(
            self._settings.device,
            nccl=self._communicators.figure(),
            race=self._collectives is not None and self._collectives.race,
        )

    def cudnn_workspaces(self) -> tuple[int, ...]:
        """Return the sizes that cuDNN's plans reported for their workspaces, in ascending order; bytes."""
        return tuple(sorted(self.ghost.reported_workspaces()))

    def _reached(self) -> list[str]:
        """Return a sentence on each function that the ghost refused, answered by assumption, or lacks."""
        gaps = self._gaps_reached()
        others = [name for name in self.ghost.gaps_reached() if name not in gaps]
        requested = [name for name in others if name.isidentifier() and re.match("cu[A-Z]", name)]
        notes = [
            f"The script called {self._named(name)}, which the ghost does not implement: the ghost returned "
            f"an error, and figures after this call may be wrong."
            for name in gaps
        ]
        notes += [
            f"The ghost assumed a value that memory depends on: {name}."
            for name in others
            if name not in requested
        ]
        if requested:  # a CUDA runtime bundled with a library requests every driver function
            notes.append(
                f"A library requested CUDA driver functions that the ghost does not have ({len(requested)} "
                f"in total; the first was {requested[0]}). The library may have continued without them."
            )
        return notes

    def _gaps_reached(self) -> list[str]:
        known = {gap.name for gap in self._settings.build.gaps} | self.ghost.extensions.imported_by.keys()
        return [name for name in self.ghost.gaps_reached() if name in known]

    def _named(self, gap: str) -> str:
        imported_by = self.ghost.extensions.imported_by.get(gap)
        return f"{gap} of {imported_by}" if imported_by else gap


def _on_other_devices(rank: Rank) -> Iterator[str]:
    """Yield a sentence on each GPU that a rank used and that is another rank's."""
    import torch

    for index in range(rank.devices):
        size = torch.cuda.max_memory_allocated(index)
        if size and index != rank.device:
            yield (
                f"The script allocated {format_bytes(size)} on GPU {index}, which is another rank's. These "
                f"figures are of GPU {rank.device}, the one of LOCAL_RANK."
            )


class CardBackend(Backend):
    """This machine's own GPU: the first that the script sees. Create it before CUDA is initialised."""

    def __init__(self) -> None:
        self._outside = OutsideMemoryMeter()
        self._last_reading = 0.0

    def refusal(self) -> str:
        """Return that the allocator keeps no history, if so: only the ghost can observe its allocations."""
        import torch

        setting = f"backend:{torch.cuda.get_allocator_backend()}"
        if "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ:
            setting = "PYTORCH_NO_CUDA_MEMORY_CACHING"
        if setting == "backend:native":
            return ""
        return (
            f"Cannot record with the allocator setting {setting}: PyTorch keeps no allocator history with "
            "this setting. Remove it, or use memfit dry-run, which records the allocations on the ghost."
        )

    def stepped(self) -> None:
        """Read the card's usage, unless it was read just now or reading it would change the run."""
        import torch

        # Reading the usage initialises CUDA, and may end the capture of a CUDA graph.
        safe = torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
        now = time.monotonic()
        if safe and now - self._last_reading >= READING_INTERVAL:
            self._last_reading = now
            self._outside.read()

    def device(self) -> DeviceUse:
        """Return the card by name, with the figures of its driver and NVML now."""
        import torch

        last = self._outside.read()
        rehearsal = is_ghost_loaded()
        if self._recorder is not None and (seen := torch.cuda.device_count()) > 1:
            self._recorder.note(
                Provenance.EXACT,
                f"The script saw {seen} GPUs. These figures are for the first one.",
                sizes=True,
            )
        return DeviceUse(
            name=torch.cuda.get_device_name(0),
            total=Figure(
                torch.cuda.mem_get_info(0)[1],
                Provenance.ASSUMED if rehearsal else Provenance.MEASURED,
                "rehearsal: the ghost's memory" if rehearsal else "cudaMemGetInfo",
            ),
            context=self._outside.figure(),
            in_use=last.others,
            machine=MachineKind.REHEARSAL if rehearsal else MachineKind.CARD,
        )

    def versions(self) -> dict[str, str]:
        """Return the versions of the driver and cuDNN, where they are known."""
        import torch

        versions = {"driver": self._outside.driver(), "cudnn": str(torch.backends.cudnn.version() or "")}  # type: ignore[no-untyped-call]
        return {name: version for name, version in versions.items() if version}
