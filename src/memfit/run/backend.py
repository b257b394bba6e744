"""What a script can be run on: the ghost, or this machine's own GPU. ``child.py`` asks for no more than this.

        begin        refusal        stepped       hint          device
ghost   overrides    no kernels     drops values  gaps, values  as configured
card    -            no history     looks at it   -             as measured
"""

import os
import re
import sys
import time
from typing import TYPE_CHECKING, Protocol

from memfit.card.find import is_rehearsal
from memfit.card.outside_allocator import Outside
from memfit.devices import find_device, refusal
from memfit.ghost.ffi import Ghost
from memfit.ghost.load import load
from memfit.ghost.patching.after_import import after_import
from memfit.ghost.workspaces import WorkspaceSource
from memfit.native_build import cache_folder
from memfit.records import DeviceUse, Figure, Machine, Provenance
from memfit.run.options import RunOptions
from memfit.run.settings import GhostSettings

if TYPE_CHECKING:
    from memfit.ghost.host_memory.skip_random_fills import RandomFillSkipper
    from memfit.ghost.values.gpu_reads import AssumedValues
    from memfit.recording.recorder import Recorder

_LOADER = "transformers.modeling_utils"
BETWEEN_LOOKS = 0.5  # seconds between two looks at a card: NVML takes milliseconds


class Ground(Protocol):
    """What a script runs on."""

    @property
    def ghost(self) -> Ghost | None:
        """Return the ghost, where it is what the script runs on."""

    def begin(self, recorder: "Recorder") -> None:
        """Prepare torch, which has just been imported."""

    def refusal(self) -> str:
        """Say why the script cannot go on, now that it initialises CUDA; empty if it can."""

    def stepped(self) -> None:
        """Take note that a training step has been completed."""

    def hint(self) -> str:
        """Say what of the ground may have made the script fail; empty if nothing."""

    def device(self) -> DeviceUse:
        """Say what the script ran on, and note what the reader must know. The script has ended."""

    def versions(self) -> dict[str, str]:
        """Say what else figures may depend on, by name."""


class OnGhost:
    """The ghost, loaded into this process.

    Raises:
        GhostError: it cannot be loaded, or refuses the configuration.
    """

    def __init__(self, settings: GhostSettings, options: RunOptions) -> None:
        self._settings = settings
        self._options = options
        self._recorder: Recorder | None = None
        self._values: AssumedValues | None = None
        self._host: RandomFillSkipper | None = None
        context = settings.device.context.bytes
        self.ghost = load(settings.build)
        self.ghost.configure(
            settings.stands_for,
            count=settings.devices,
            in_use=context + settings.device.in_use,
            own=context,
            workspaces=WorkspaceSource(options.workspaces),
        )
        # Now, not when torch has been imported: this may be what imports it.
        after_import(_LOADER, self._watch_loading)

    def begin(self, recorder: "Recorder") -> None:
        """Answer what the script reads, keep compilers apart, spare the host's memory."""
        from memfit.ghost.compile import torch_compile
        from memfit.ghost.values import gpu_reads

        self._recorder = recorder
        choices = gpu_reads.ValueOptions.parse(self._options.values)
        self._values = gpu_reads.install(self.ghost, choices, recorder.note, fallback_where=recorder.place)
        caches = cache_folder("compiled")
        torch_compile.install(self.ghost, caches, recorder.note, labelled=recorder.book.doing)
        after_import("torch._inductor.fx_passes.joint_graph", self._follow_folding)
        if self._options.host_memory:
            from memfit.ghost.host_memory import skip_random_fills

            self._host = skip_random_fills.install(recorder.note)

    def _follow_folding(self) -> None:
        from memfit.ghost.compile.constant_folding import follow_folding

        if self._values is not None:
            follow_folding(self._values.known)

    def _watch_loading(self) -> None:
        from memfit.ghost import pretrained_weights

        if self._recorder is not None:
            pretrained_weights.install(
                sys.modules[_LOADER], self._recorder.note, never=not self._options.weights
            )

    def refusal(self) -> str:
        """Refuse a device that torch has no kernels for.

        Not before CUDA is initialised: asking torch what it was built for marks the process as one that
        must not fork.
        """
        import torch

        built_for = (torch._C._cuda_getArchFlags() or "").split()
        return refusal(find_device(self._settings.device.name), built_for, torch.__version__) or ""

    def stepped(self) -> None:
        """Let values know: what they remember of a step is of no use in the next."""
        if self._values is not None:
            self._values.stepped()

    def hint(self) -> str:
        """Name a library that was turned away, a gap that was reached, or a value that was told."""
        turned_away = self.ghost.extensions.turned_away
        if turned_away:
            return turned_away[-1]
        if gaps := self._gaps_reached():
            named = ", ".join(map(self._named, gaps))
            return f"the ghost does not stand in for {named} (memfit doctor --gaps), and refused it."
        return self._values.hint() if self._values is not None else ""

    def device(self) -> DeviceUse:
        """Return the device as configured; note the gaps that were reached."""
        if self._recorder is None:
            return self._settings.device
        if self._settings.devices > 1:
            seen = f"The script saw {self._settings.devices} GPUs (CUDA_VISIBLE_DEVICES)"
            self._recorder.note(Provenance.EXACT, f"{seen}; these figures are the first one's.")
        for text in self._reached():
            self._recorder.note(Provenance.ASSUMED, text, sizes=True)
        for reason in self.ghost.extensions.turned_away:
            self._recorder.note(Provenance.ASSUMED, reason, sizes=True)
        for provenance, text in self.ghost.workspaces.notes():
            self._recorder.note(provenance, text, sizes=True, workspaces=True)
        return self._settings.device

    def versions(self) -> dict[str, str]:
        """Return nothing: the ghost was built for the torch that is named."""
        return {}

    def _reached(self) -> list[str]:
        """Say in a sentence each what the run reached that the ghost refused, assumed, or does not have."""
        gaps = self._gaps_reached()
        others = [name for name in self.ghost.gaps_reached() if name not in gaps]
        asked_for = [name for name in others if name.isidentifier() and re.match("cu[A-Z]", name)]
        notes = [
            f"The run reached {self._named(name)}, a known gap: the ghost refused it; figures after that may "
            f"be wrong."
            for name in gaps
        ]
        notes += [
            f"The ghost assumed an answer that memory depends on: {name}."
            for name in others
            if name not in asked_for
        ]
        if asked_for:  # a CUDA runtime that a library brings along asks for all there are
            notes.append(
                f"The driver was asked for functions that the ghost does not have ({len(asked_for)}, the "
                f"first {asked_for[0]}); who asked may have gone without them."
            )
        return notes

    def _gaps_reached(self) -> list[str]:
        known = {gap.name for gap in self._settings.build.gaps} | self.ghost.extensions.wanted_by.keys()
        return [name for name in self.ghost.gaps_reached() if name in known]

    def _named(self, gap: str) -> str:
        wanted_by = self.ghost.extensions.wanted_by.get(gap)
        return f"{gap} of {wanted_by}" if wanted_by else gap


class OnCard:
    """This machine's own GPU: the first that the script sees. Make it before CUDA is initialised."""

    def __init__(self) -> None:
        self.ghost = None
        self._recorder: Recorder | None = None
        self._outside = Outside()
        self._looked = 0.0

    def begin(self, recorder: "Recorder") -> None:
        """Change nothing."""
        self._recorder = recorder

    def refusal(self) -> str:
        """Refuse allocators that keep no history: outside the ghost nothing else could tell."""
        import torch

        backend = torch.cuda.get_allocator_backend()
        if "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ:
            backend = "PYTORCH_NO_CUDA_MEMORY_CACHING"
        if backend == "native":
            return ""
        return (
            f"Cannot record with {backend}: PyTorch keeps no history of its allocations. Unset it to record; "
            "memfit dry-run shows them on the ghost."
        )

    def stepped(self) -> None:
        """Look at the card, unless that was done just now, or would change what the script does."""
        import torch

        # To look at a card initialises CUDA, and in the capture of a CUDA graph it may end the capture.
        may = torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
        now = time.monotonic()
        if may and now - self._looked >= BETWEEN_LOOKS:
            self._looked = now
            self._outside.look()

    def hint(self) -> str:
        """Return nothing: on a card a script fails for its own reasons."""
        return ""

    def device(self) -> DeviceUse:
        """Return the card by name, with what its driver and NVML say of it now."""
        import torch

        last = self._outside.look()
        rehearsal = is_rehearsal()
        if self._recorder is not None and (seen := torch.cuda.device_count()) > 1:
            self._recorder.note(
                Provenance.EXACT, f"The script saw {seen} GPUs; these figures are the first one's."
            )
        return DeviceUse(
            name=torch.cuda.get_device_name(0),
            total=Figure(
                torch.cuda.mem_get_info(0)[1],
                Provenance.ASSUMED if rehearsal else Provenance.MEASURED,
                "rehearsal: the ghost's" if rehearsal else "cudaMemGetInfo",
            ),
            context=self._outside.figure(),
            in_use=last.others,
            machine=Machine.REHEARSAL if rehearsal else Machine.CARD,
        )

    def versions(self) -> dict[str, str]:
        """Return the driver's and cuDNN's, where they can be told."""
        import torch

        versions = {"driver": self._outside.driver(), "cudnn": str(torch.backends.cudnn.version() or "")}  # type: ignore[no-untyped-call]
        return {name: version for name, version in versions.items() if version}
