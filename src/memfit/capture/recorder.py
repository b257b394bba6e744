"""The recorder: everything that watches a script while it runs, and the Trace that comes of it.

    history (PyTorch's own, exact) ──┐
    labels   what was running ───────┼──> Trace
    holders  what it was for ────────┘

Nothing is touched before the script itself initialises CUDA: the history is switched on by
PyTorch's own queue of calls for that moment.
"""

import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import Any

import torch
from torch.optim import Optimizer

from memfit.capture import autocast, cublas
from memfit.capture.calls import calls
from memfit.capture.compiled import CompiledCode
from memfit.capture.counted import CountedStamps
from memfit.capture.graph import READABLE
from memfit.capture.history import StackTable, columns, pools
from memfit.capture.holders import Holdings, parameters_of
from memfit.capture.labels import LabelBook, metadata_of, serial_of
from memfit.capture.lifted import LiftedHooks
from memfit.capture.module_names import short_names
from memfit.capture.modules import ModuleHooks
from memfit.capture.settle import called, labelled, mark_spaces, placed
from memfit.capture.snapshot import segments, settings
from memfit.capture.steps import Steps
from memfit.ghost.before import before
from memfit.ghost.load import Ghost, LogAction, Space
from memfit.ghost.where import is_user_file
from memfit.records import (
    DeviceUse,
    MarkKind,
    Note,
    Provenance,
    ScriptEnd,
    Trace,
)

_UNCACHED = "PYTORCH_NO_CUDA_MEMORY_CACHING"
_UNLOGGED = {
    True: "Caching is off (PYTORCH_NO_CUDA_MEMORY_CACHING), so PyTorch counts nothing: figures are the CUDA "
    "runtime's own, without source lines. How cudaMalloc rounds is assumed: to 512 bytes below 1 MiB, to "
    "2 MiB from there on.",
    False: "PyTorch keeps no history with backend:cudaMallocAsync: figures are the CUDA runtime's own, "
    "without source lines. How CUDA's pool grows is assumed: by 32 MiB.",
}
_UNREADABLE = (
    "PyTorch before 2.10 does not show what a graph has saved: what the next backward frees counts as "
    "activations, and has no name."
)
_MARKED = {
    "_cuda_resetPeakMemoryStats": MarkKind.RESET_PEAK,
    "_accelerator_resetPeakStats": MarkKind.RESET_PEAK,
    "_cuda_emptyCache": MarkKind.EMPTY_CACHE,
    "_accelerator_emptyCache": MarkKind.EMPTY_CACHE,
}
_FREED = ("free_requested", "free_completed")
_HISTORY_NAMES = {
    LogAction.MALLOC: ("alloc",),
    LogAction.MALLOC_ASYNC: ("alloc",),
    LogAction.FREE: _FREED,
    LogAction.FREE_ASYNC: _FREED,
    LogAction.OUT_OF_MEMORY: ("oom",),
}


class Recorder:
    """Watches one script on one device.

    Args:
        ghost: the ghost that is loaded, or None on a real GPU.
        steps: training steps after which the script is ended; None for its own end.
        labels: False records the history and the steps alone; figures are the same, what holds them and
            where they were made is unknown.
        on_change: called at changes of phase, for the progress line.
        end_now: ends the process, for a script that will not be ended by an exception.
    """

    def __init__(
        self,
        ghost: Ghost | None,
        steps: int | None,
        *,
        labels: bool,
        on_change: Callable[[], None],
        end_now: Callable[[], None],
    ) -> None:
        self._ghost = ghost
        self._notes: dict[tuple[str, str], Note] = {}
        self._held = Holdings()
        self._roots: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._stacks = StackTable(is_user_file)
        self._with_labels = labels
        self._history = False
        self._counted: CountedStamps | None = None
        self.book = LabelBook()
        self._hooks = LiftedHooks()
        self.steps = Steps(
            self.book,
            steps,
            before_optimizer=self._before_optimizer,
            after_optimizer=self._after_optimizer,
            before_scaled=self._before_scaled,
            before_backward=self._before_backward,
            after_backward=self._after_backward,
            on_change=on_change,
            end_now=end_now,
        )
        self.modules = ModuleHooks(
            self.book,
            self._stacks,
            in_backward=lambda: self.steps.in_backward,
            on_root=self._enter_root,
            after_root=self.steps.enter,
        )
        self.compiled = CompiledCode(
            self.book,
            self._hooks,
            self.steps,
            self.modules if labels else None,
            hold_parameters=lambda parameters: self._held.parameters(self.book.moment(), parameters),
        )

    def install(self) -> None:
        """Start watching the process: call once, when torch has just been imported."""
        self.steps.install(self._hooks)
        if self._with_labels:
            self.modules.install(self._hooks)
            autocast.watch(self.book)
            self._held.checkpoints.watch()
        self.compiled.install()
        torch.cuda._lazy_call(self._start)  # type: ignore[no-untyped-call]
        self._mark_calls()

    def note(
        self,
        provenance: Provenance,
        text: str,
        where: str = "",
        *,
        sizes: bool = False,
        workspaces: bool = False,
        objects: bool = False,
    ) -> None:
        """Keep a note for the result, once."""
        self._notes.setdefault((text, where), Note(provenance, text, where, sizes, workspaces, objects))

    def place(self) -> str:
        """Say where the calling thread is by its label, for want of a Python frame: a line, or the module."""
        label = self.book.labels[self.book.current()]
        if label.stack >= 0:
            frames = [self._stacks.frames[index] for index in self._stacks.stacks[label.stack]]
            frame = next((frame for frame in frames if frame.user), frames[0])
            return f"{frame.file}:{frame.line}"
        return label.module or label.phase

    # -- while the script runs ----------------------------------------------------------------

    def _start(self) -> None:
        memory = torch.cuda.memory
        self._history = torch.cuda.get_allocator_backend() == "native" and _UNCACHED not in os.environ
        if self._history:
            memory._record_memory_history("all", context="alloc", stacks="python")
            memory._record_memory_history = self._leave_history_on
            set_metadata = getattr(torch._C, "_cuda_setMemoryMetadata", None)
            if set_metadata is None:  # PyTorch 2.8 and 2.9
                self._counted = CountedStamps()
                self.book.stamp_with(self._and_for_workspaces(self._counted.stamp))
            else:
                self.book.stamp_with(
                    self._and_for_workspaces(lambda serial: set_metadata(metadata_of(serial)))
                )
        elif self._ghost is not None:
            self._ghost.log_allocations(True)
            self.book.stamp_with(self._ghost.set_label)

    def _and_for_workspaces(self, stamp: Callable[[int], None]) -> Callable[[int], None]:
        """Stamp the ghost's log of workspaces, too."""
        ghost = self._ghost
        if ghost is None:
            return stamp

        def both(serial: int) -> None:
            stamp(serial)
            ghost.set_label(serial)

        return both

    def _leave_history_on(self, *_args: object, **_kwargs: object) -> None:
        self.note(
            Provenance.EXACT,
            "The script's own call of _record_memory_history was passed over: memfit's recording is on.",
        )

    def _mark_calls(self) -> None:
        for name, kind in _MARKED.items():
            original = getattr(torch._C, name, None)
            if original is not None:
                setattr(torch._C, name, before(self._marking(kind), original))

    def _marking(self, kind: MarkKind) -> Callable[..., None]:
        return lambda *_args: self.book.mark(kind, 0)

    def _hold_modules(self, modules: Iterable[torch.nn.Module]) -> None:
        named = {module: self.modules.names.full_name(module) for module in modules}
        self._held.modules(self.book.moment(), named)

    def _enter_root(self, module: torch.nn.Module) -> None:
        if module not in self._roots:  # only modules that are labelled are entered
            self._roots.add(module)
            self._hold_modules((module,))
        self.steps.enter_forward()

    def _before_backward(self, roots: Iterable[object]) -> None:
        if self._with_labels:
            self._held.graph(self.book.moment(), roots)
            self.modules.claim_loss(roots, sys._getframe(1))

    def _after_backward(self) -> None:
        if self._with_labels:
            self._held.gradients_of_graph(self.book.moment())

    def _before_scaled(self, scaler: torch.amp.GradScaler) -> None:
        if self._with_labels:
            self._held.scaler(self.book.moment(), scaler)

    def _before_optimizer(self, optimizer: Optimizer) -> None:
        if self._with_labels:
            parameters, moment = list(parameters_of(optimizer)), self.book.moment()
            self._held.given(moment, optimizer)
            self._held.gradients(moment, parameters)
            self._held.parameters(moment, parameters)

    def _after_optimizer(self, optimizer: Optimizer) -> None:
        if self._with_labels:
            self._held.optimizer_state(self.book.moment(), optimizer)

    # -- after it -----------------------------------------------------------------------------

    def finish(
        self, device: DeviceUse, end: ScriptEnd, command: tuple[str, ...], versions: Mapping[str, str]
    ) -> Trace:
        """Turn what was seen into a Trace. The script has ended; its objects are still alive."""
        if self._with_labels:
            moment = self.book.moment()
            for optimizer in self.steps.optimizers:
                self._held.parameters(moment, parameters_of(optimizer))
                self._held.optimizer_state(moment, optimizer)
            self._hold_modules(self.modules.names.outermost())  # those that never ran, too: averages
            self._hold_modules(self._roots)
            if not READABLE:
                self.note(Provenance.ASSUMED, _UNREADABLE)
        if compiled := self.compiled.summary():
            self.note(Provenance.EXACT, compiled)
        statistics = {
            name: value for name, value in torch.cuda.memory_stats(0).items() if isinstance(value, int)
        }
        if self._history:
            snapshot = torch.cuda.memory._snapshot()
            self._held.workspaces(self.book.moment(), cublas.workspaces(snapshot["segments"]))
            in_force = settings(snapshot) | _environment() | _fraction()
        else:
            snapshot = {"device_traces": [self._logged()], "segments": []}
            in_force = {
                "backend": torch.cuda.get_allocator_backend(),
                _UNCACHED: os.environ.get(_UNCACHED, ""),
            }
        history = snapshot["device_traces"][0]
        events, stacks, frames = columns(
            history, label_of=serial_of, is_user_file=is_user_file, table=self._stacks
        )
        serials = self._counted.serials(events.action) if self._counted else events.label
        events = called(labelled(events, serials, self.book, self._held), self.book, *calls(history))
        autocast.mark_copies(events, self.book)
        labels, tensors = short_names(self.book.labels, tuple(self._held.tensors))
        if missed := mark_spaces(events, serials, self._spaces()):
            text = "workspaces were not found in the allocator's history: they count with the rest."
            self.note(Provenance.ASSUMED, f"{missed} {text}", sizes=True)
        return Trace(
            events=events,
            labels=labels,
            stacks=stacks,
            frames=frames,
            marks=placed(self.book.marks, serials),
            segments=segments(snapshot),
            device=device,
            end=end,
            settings=in_force,
            statistics=statistics,
            versions=versions,
            command=command,
            notes=tuple(self._notes.values()),
            pools=pools(history, snapshot["segments"]),
            tensors=tensors,
        )

    def _spaces(self) -> list[Space]:
        return self._ghost.spaces() if self._ghost is not None else []

    def _logged(self) -> list[dict[str, Any]]:
        """Return the ghost's own log in the form of PyTorch's history, for back ends that keep none."""
        if self._ghost is None:
            return []
        self.note(Provenance.ASSUMED, _UNLOGGED[_UNCACHED in os.environ], sizes=True)
        return [
            {
                "action": action,
                "addr": event.address,
                "device_free": event.address,
                "size": event.size,
                "stream": event.stream,
                "time_us": event.time_us,
                "user_metadata": metadata_of(event.label),
            }
            for event in self._ghost.allocation_log()
            for action in _HISTORY_NAMES[event.action]
        ]


def _environment() -> dict[str, str]:
    """Return the settings that PyTorch began with: it knows only the last it was given."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return {"environment": next((os.environ[name] for name in names if name in os.environ), "")}


def _fraction() -> dict[str, str]:
    """Return the share of the GPU that may be reserved, as a setting; nothing if that is all of it.

    PyTorch keeps it as whole bytes: the script's own number is the shortest within one of them.
    """
    fraction, total = (
        torch.cuda.get_per_process_memory_fraction(0),
        torch.cuda.get_device_properties(0).total_memory,
    )
    if fraction == 1:
        return {}
    shorter = (round(fraction, digits) for digits in range(1, 16))
    said = next((share for share in shorter if abs(share - fraction) * total < 1), fraction)
    return {"per_process_memory_fraction": format(Decimal(repr(said)), "f")}
