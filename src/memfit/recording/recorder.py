"""The recorder: everything that watches a script while it runs, and the Trace that comes of it.

    history (PyTorch's own, exact) ──┐
    labels   what was running ───────┼──> Trace
    holders  what it was for ────────┘

Nothing is touched before the script itself initialises CUDA: the history is switched on by
PyTorch's own queue of calls for that moment.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from memfit.ghost.ffi import Ghost, WorkspaceUse
from memfit.ghost.patching.before_call import before
from memfit.recording import autocast_copies, cublas_workspaces
from memfit.recording.allocator_history import Recording
from memfit.recording.compiled_graphs import BEFORE_FORWARD, CompiledCode
from memfit.recording.hooks import LiftedHooks
from memfit.recording.labels import LabelBook
from memfit.recording.live_objects import living
from memfit.recording.module_hooks import ModuleHooks, running_module
from memfit.recording.module_names import short_names
from memfit.recording.owners import Holdings, parameters_of
from memfit.recording.phases import begin_forwards
from memfit.recording.resolve import called, labelled, mark_spaces, placed
from memfit.recording.saved_tensors import READABLE
from memfit.recording.steps import Steps
from memfit.recording.torch_calls import calls
from memfit.records import (
    DeviceUse,
    MarkKind,
    Note,
    Phase,
    Provenance,
    ScriptEnd,
    Trace,
)
from memfit.trace.history_columns import columns, pools
from memfit.trace.snapshot import segments
from memfit.trace.stack_table import StackTable
from memfit.user_frame import is_user_file

_MOST = 1 << 20
"""Events of a live run's history, should it not come to a training step's end before that."""
_UNREADABLE = (
    "PyTorch before 2.10 does not show what a graph has saved: what the next backward frees counts as "
    "activations, and has no name."
)
_INCOMPLETE = (
    "Objects were passed over that cannot be asked what they hold: their own code raises, or builds them now."
)
_MARKED = {
    "_cuda_resetPeakMemoryStats": MarkKind.RESET_PEAK,
    "_accelerator_resetPeakStats": MarkKind.RESET_PEAK,
    "_cuda_emptyCache": MarkKind.EMPTY_CACHE,
    "_accelerator_emptyCache": MarkKind.EMPTY_CACHE,
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
        live: the script trains in earnest, for as long as it likes, and what it does not need costs nothing:
            objects are asked at the end alone, the backward is not labelled by module, what is long past is
            forgotten (``forget``), and a history that the script itself records is left to it.
    """

    def __init__(
        self,
        ghost: Ghost | None,
        steps: int | None,
        *,
        labels: bool,
        on_change: Callable[[], None],
        end_now: Callable[[], None],
        live: bool = False,
    ) -> None:
        self._ghost = ghost
        self._notes: dict[tuple[str, str], Note] = {}
        self._held = Holdings()
        self._roots: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._stacks = StackTable(is_user_file)
        self._with_labels = labels
        self._live = live
        self.book = LabelBook()
        self._hooks = LiftedHooks()
        self.recording = Recording(ghost, self.book, *((_MOST,) if live else ()))
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
            backward=not live,
        )
        self.compiled = CompiledCode(
            self.book,
            self._hooks,
            self.steps,
            self.modules if labels else None,
            hold_parameters=lambda parameters: self._held.parameters(self.book.moment(), parameters),
        )

    def install(self) -> None:
        """Start watching the process: call once, when torch has been imported."""
        _installed.append(self)
        self._hooks.on_removal(lambda: _installed.remove(self))
        self.steps.install(self._hooks)
        if self._with_labels:
            self.modules.install(self._hooks)
            autocast_copies.watch(self._hooks, self.book)
        if self._with_labels or self._live:
            self._held.checkpoints.watch(self._hooks)
        self.compiled.install()
        if self._live:
            self.recording.give_way(self._hooks)
        torch.cuda._lazy_call(self._start)  # type: ignore[no-untyped-call]
        self._mark_calls()

    def remove(self) -> None:
        """Watch no longer: PyTorch is as it was before."""
        self._hooks.remove()
        self.recording.stop()

    def forget(self) -> None:
        """Forget what is past, at the end of a training step or where no step ends."""
        self.recording.forget()
        self._held.forget()
        if self.steps.completed:
            self.book.mark(MarkKind.TRAINING_STEP, self.steps.completed - 1)

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
        self._notes.setdefault(
            (text, where), Note(provenance, text, where, sizes, workspaces, objects=objects)
        )

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
        if self._hooks.removed or (self._live and not self._with_labels):
            return
        self.recording.start()
        if not self._live:
            self.recording.pass_over(self._hooks, self._passed_over)

    def _passed_over(self) -> None:
        self.note(
            Provenance.EXACT,
            "The script's own call of _record_memory_history was passed over: memfit's recording is on.",
        )

    def _mark_calls(self) -> None:
        for name, kind in _MARKED.items():
            original = getattr(torch._C, name, None)
            if original is not None:
                self._hooks.replace(torch._C, name, before(self._marking(kind), original))

    def _marking(self, kind: MarkKind) -> Callable[..., None]:
        return lambda *_args: self.book.mark(kind, 0)

    def _hold_modules(self, modules: Iterable[torch.nn.Module]) -> None:
        named: dict[torch.nn.Module, str] = {}
        for module in modules:
            with self._held.sparing():
                named[module] = self.modules.names.full_name(module)
        self._held.modules(self.book.moment(), named)

    @property
    def _asks(self) -> bool:
        """Whether objects are asked while the script runs."""
        return self._with_labels and not self._live

    def _enter_root(self, module: torch.nn.Module) -> None:
        if self._asks and module not in self._roots:  # only modules that are labelled are entered
            self._roots.add(module)
            self._hold_modules((module,))
        self.steps.enter_forward()

    def _before_backward(self, roots: Iterable[object]) -> None:
        if self._asks:
            self._held.graph(self.book.moment(), roots, by_hand=not self.steps.optimizers)
            self.modules.claim_loss(roots, sys._getframe(1))
        elif self._with_labels:
            self.modules.label_backward(roots)
        self._held.went_backward()

    def _after_backward(self) -> None:
        if self._asks:
            self._held.gradients_of_graph(self.book.moment())

    def _before_scaled(self, scaler: torch.amp.GradScaler) -> None:
        if self._asks:
            self._held.scaler(self.book.moment(), scaler)

    def _before_optimizer(self, optimizer: Optimizer) -> None:
        if self._asks:
            parameters, moment = list(parameters_of(optimizer)), self.book.moment()
            self._held.given(moment, optimizer)
            self._held.gradients(moment, parameters)
            self._held.parameters(moment, parameters)

    def _after_optimizer(self, optimizer: Optimizer) -> None:
        if self._asks:
            self._held.optimizer_state(self.book.moment(), optimizer)

    # -- after it -----------------------------------------------------------------------------

    def finish(
        self,
        device: DeviceUse,
        end: ScriptEnd,
        command: tuple[str, ...],
        versions: Mapping[str, str],
        *,
        index: int = 0,
        failed: Mapping[str, Any] | None = None,
    ) -> Trace:
        """Turn what was seen into a Trace. The script has ended, or failed; its objects are still alive.

        Args:
            device: what the script ran on.
            end: how it ended.
            command: the script and its arguments.
            versions: of what figures may depend on.
            index: of the device.
            failed: the allocation that has just failed, in the words of PyTorch's history.
        """
        self._ask()
        if compiled := self.compiled.summary():
            self.note(Provenance.EXACT, compiled)
        statistics = {
            name: value
            for name, value in torch.cuda.memory_stats(index).items()
            if isinstance(value, int) and not (self._live and name.endswith(".peak"))  # of the whole run
        }
        with self._located():
            snapshot, in_force = self.recording.read(index, failed)
        history = snapshot["device_traces"][index]
        if self.recording.on and not self._live:  # what runs on keeps what cuBLAS works in
            self._held.workspaces(self.book.moment(), cublas_workspaces.workspaces(snapshot["segments"]))
        if text := self.recording.caveat:
            self.note(Provenance.ASSUMED, text, sizes=True)
        events, stacks, frames = columns(
            history, label_of=self.recording.serial_of, is_user_file=is_user_file, table=self._stacks
        )
        serials = self.recording.serials(events)
        events = called(labelled(events, serials, self.book, self._held), self.book, *calls(history))
        autocast_copies.mark_copies(events, self.book)
        events = begin_forwards(events, self.book)
        labels, tensors = short_names(tuple(self.book.labels), tuple(self._held.tensors))
        missed, saved = mark_spaces(events, serials, self._spaces())
        if missed:
            text = "workspaces were not found in the allocator's history: they count with the rest."
            self.note(Provenance.ASSUMED, f"{missed} {text}", sizes=True)
        return Trace(
            events=events,
            labels=labels,
            stacks=stacks,
            frames=frames,
            marks=placed(self.book.marks, serials),
            segments=segments(snapshot, index),
            device=device,
            end=end,
            settings=in_force,
            statistics=statistics,
            versions=versions,
            command=command,
            notes=tuple(
                replace(note, activations=note.workspaces and len(saved) > 0) for note in self._notes.values()
            ),
            pools=pools(history, snapshot["segments"]),
            tensors=tensors,
        )

    def _ask(self) -> None:
        """Ask the objects: those that were met on the way, or where none was asked there, all."""
        if self._live:
            with self._held.sparing(), torch._C.DisableTorchFunctionSubclass():  # as in living()
                self._ask_living()
        elif self._with_labels:
            never_ran = tuple(self.modules.names.outermost())  # among others: averages
            self._ask_each(self.steps.optimizers, never_ran, tuple(self._roots))
        else:
            return
        if not READABLE:
            self.note(Provenance.ASSUMED, _UNREADABLE)
        if self._held.incomplete:
            self.note(Provenance.ASSUMED, _INCOMPLETE)

    def _ask_living(self) -> None:
        alive = living()
        self._hold_modules(alive.roots)  # now, too: what optimizers keep goes by their names
        self._ask_each(alive.optimizers, alive.roots)
        moment = self.book.moment()
        self._held.graph(moment, alive.differentiable)
        self._held.rest(moment, alive.differentiable, alive.others)

    def _ask_each(self, optimizers: Iterable[Optimizer], *roots: Iterable[torch.nn.Module]) -> None:
        moment = self.book.moment()
        for optimizer in optimizers:
            with self._held.sparing():
                self._held.parameters(moment, parameters_of(optimizer))
                self._held.optimizer_state(moment, optimizer)
        for modules in roots:
            self._hold_modules(modules)

    @contextmanager
    def _located(self) -> Iterator[None]:
        """Label the calling thread with what it does, and in which module, where nobody labels modules."""
        before = self.book.current()
        if not self._with_labels:
            phase, name = self.book.phase, ""
            module = running_module(sys._getframe(1))
            if module is not None:
                name = self.modules.names.full_name(module)
                phase = Phase.RECOMPUTE if self.steps.in_backward else Phase.FORWARD
            elif self.steps.in_backward:
                phase = Phase.BACKWARD
            elif phase in BEFORE_FORWARD and self._held.graph_waits:
                phase = Phase.LOSS
            self.book.use(self.book.intern(phase, name))
        try:
            yield
        finally:
            self.book.use(before)

    def _spaces(self) -> list[WorkspaceUse]:
        return self._ghost.workspace_uses() if self._ghost is not None else []


def installed() -> Recorder | None:
    """Return the recorder that watches this process; None if nobody does."""
    return _installed[-1] if _installed else None


_installed: list[Recorder] = []
