"""The recorder: watches a script while it runs, and turns what it saw into a Trace.

    allocator history   PyTorch's own, exact ────────┐
    labels              what each thread was doing ──┼──> Trace
    owners              what each tensor was for ────┘

The recorder leaves CUDA alone until the script initialises it: the history is switched on by PyTorch's own
queue of calls for that moment.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.optim import Optimizer

from memfit.ghost.runtime_bindings import GhostRuntime
from memfit.patching.installed_hooks import InstalledHooks
from memfit.recording.allocating_functions import torch_functions_of_events
from memfit.recording.allocator_history import AllocatorHistory
from memfit.recording.annotate_events import (
    assign_labels_and_owners,
    assign_torch_functions,
    infer_forward_labels,
    mark_failed_workspace_allocations,
    mark_workspace_allocations,
    place_marks_between_events,
)
from memfit.recording.compiled_graphs import BEFORE_FORWARD, CompiledCodeWatcher
from memfit.recording.deepspeed_buffers import record_deepspeed_buffers
from memfit.recording.event_labels import LabelBook
from memfit.recording.label_running_modules import RunningModuleLabeller, innermost_running_module
from memfit.recording.memory_owners import MemoryOwners, find_live_objects
from memfit.recording.memory_releasing_calls import (
    label_autocast_exits,
    mark_memory_calls,
    name_autocast_copies,
    record_released_workspaces,
    release_cublas_workspaces,
)
from memfit.recording.module_names import shorten_module_names
from memfit.recording.optimizer_accessors import parameters_of
from memfit.recording.parameter_copies import ParameterCopies
from memfit.recording.run_stage_marks import RunStageMarker
from memfit.recording.training_steps import TrainingStepTracker
from memfit.recording.whole_step_recorder import WholeStepRecorder
from memfit.records import DeviceUse, Events, MarkKind, Note, Phase, Provenance, ScriptEnd, Trace
from memfit.trace.pytorch_history_to_columns import distinct_pools_of_history, history_columns
from memfit.trace.snapshot import segments_at_end
from memfit.trace.stack_table import StackTable
from memfit.user_lines import is_user_file

_LIVE_HISTORY_LIMIT = 1 << 20
"""Events kept of a live run, in case it records more than that before a training step ends."""
_UNREADABLE_OBJECTS = (
    "Some objects could not be inspected and were skipped. Their own code raised an exception, or they were "
    "still under construction."
)


class Recorder:
    """Watches one script on one device: ``install``, run the script, ``finish``, ``remove``.

    Args:
        ghost: the ghost that is loaded, or None on a real GPU.
        steps: training steps after which the script is ended; None to let it run to its own end.
        labels: False to record only the history and the steps: figures are the same, but the owners of memory
            and the places where it was allocated are unknown.
        on_change: called at changes of phase, for the progress line.
        end_now: ends the process with a ``ScriptEnd.reason``, if the script catches what should end it.
        live: the script trains for real, for an unlimited time, and recording must cost it next to nothing:
            objects are inspected only at the end, the backward is not labelled by module, old events are
            forgotten (``forget``), and a history that the script itself records is left alone.
    """

    def __init__(
        self,
        ghost: GhostRuntime | None,
        steps: int | None,
        *,
        labels: bool,
        on_change: Callable[[], None],
        end_now: Callable[[str], None],
        live: bool = False,
    ) -> None:
        self._ghost, self._with_labels, self._live = ghost, labels, live
        self._inspects_while_running = labels and not live
        self._notes: dict[tuple[str, str], Note] = {}
        self._owners = MemoryOwners()
        self._copies = ParameterCopies(self._owners)
        self._inspected_models = False
        self._roots: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # outermost modules that have run
        self._stacks = StackTable(is_user_file)
        self.book = LabelBook()
        self._hooks = InstalledHooks()
        self._history = AllocatorHistory(ghost, self.book, *((_LIVE_HISTORY_LIMIT,) if live else ()))
        self.steps = TrainingStepTracker(
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
        self._step = WholeStepRecorder(ghost, self.book, self.steps.captures) if ghost else None
        self.stages = RunStageMarker(
            self.book, self.steps, wanted=steps is None and not live, labelled=labels
        )
        self._modules = RunningModuleLabeller(
            self.book, self._stacks, self.steps, on_root=self._enter_root, backward=not live
        )
        self._compiled = CompiledCodeWatcher(
            self.book, self._hooks, self.steps, self._modules if labels else None, self._owners
        )

    # -- before the script: watching starts ---------------------------------------------------

    def install(self) -> None:
        """Start watching the process: call once, after torch has been imported."""
        _installed.append(self)
        self._hooks.on_removal(lambda: _installed.remove(self))
        self.steps.install(self._hooks)
        self.stages.install(self._hooks)
        if self._with_labels:
            self._modules.install(self._hooks)
            label_autocast_exits(self._hooks, self.book)
            record_deepspeed_buffers(self._hooks, self._owners, self.book.moment)
        if self._with_labels or self._live:
            self._owners.watch(self._hooks)
        self._compiled.install()
        if self._live:
            self._history.yield_to_script(self._hooks)
        else:
            self._history.share_with_script(self._hooks)
        torch.cuda._lazy_call(self._on_cuda_initialised)  # type: ignore[no-untyped-call]
        mark_memory_calls(self._hooks, self.book)
        if not self._live:  # a live run must not pay for snapshots, and needs its workspaces at the end
            record_released_workspaces(self._hooks, self.book, self._history, self._owners)
        if self._step:
            self._step.install(self._hooks)

    def _on_cuda_initialised(self) -> None:
        if self._hooks.removed or (self._live and not self._with_labels):
            return
        self._history.start()

    # -- while the script runs: owners are inspected at the moments when they all exist -------

    def _enter_root(self, module: torch.nn.Module, arguments: tuple[object, ...]) -> None:
        if self._inspects_while_running:  # runs only for labelled modules
            if module not in self._roots:
                self._roots.add(module)
                self._record_modules((module,))
            self._owners.record_arguments(self.book.moment(), arguments)
        self.steps.enter_forward(training=module.training if any(True for _ in module.parameters()) else None)
        self.stages.enter_root(module)

    def _before_backward(self, roots: Iterable[object]) -> None:
        if self._inspects_while_running:
            self._owners.record_graph(self.book.moment(), roots, by_hand=not self.steps.optimizers)
            # What no module has claimed, between the model's output and backward().
            self._modules.claim(roots, since=0, module="", caller=sys._getframe(1))
        elif self._with_labels:
            self._modules.label_backward(roots)
        self._owners.record_backward()

    def _after_backward(self) -> None:
        if self._inspects_while_running:
            self._owners.record_gradients_of_graph(self.book.moment())

    def _before_scaled(self, scaler: torch.amp.GradScaler) -> None:
        if self._inspects_while_running:
            self._owners.record_loss_scale(self.book.moment(), scaler)

    def _before_optimizer(self, optimizer: Optimizer) -> None:
        if self._inspects_while_running:
            parameters, moment = list(parameters_of(optimizer)), self.book.moment()
            self._owners.record_loss_scale(moment, optimizer)
            self._owners.record_gradients(moment, parameters)
            self._owners.record_parameters(moment, parameters)
            if self.steps.completed == 1 and not self._inspected_models:  # while the loop's locals exist
                self._inspected_models = True
                self._inspect_all_models()

    def _after_optimizer(self, optimizer: Optimizer) -> None:
        if self._inspects_while_running:
            self._owners.record_optimizer_state(self.book.moment(), optimizer)
            if self.steps.completed <= 1:
                self._owners.host.after_step(optimizer)
            self._copies.after_first_step(self._roots)

    def _record_modules(self, modules: Iterable[torch.nn.Module]) -> None:
        named: dict[torch.nn.Module, str] = {}
        for module in modules:
            with self._owners.skipping_failures():
                named[module] = self._modules.names.full_name(module)
        self._owners.record_modules(self.book.moment(), named)

    def forget(self) -> None:
        """Forget past events, at the end of a training step or where no step ends."""
        self._history.forget()
        self._owners.forget()
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
        bound: str = "",
    ) -> None:
        """Add a note to the result; repeated notes are added once, and a ``bound`` is marked each time."""
        self._notes.setdefault(
            (text, where), Note(provenance, text, where, sizes, workspaces, objects=objects, bound=bound)
        )
        if bound:
            self.book.mark(MarkKind.SIZE_BOUND, list(self._notes).index((text, where)))

    def place(self) -> str:
        """Return the module of the calling thread's label, or else its phase."""
        label = self.book.labels[self.book.current()]
        return label.module or label.phase

    def labelled_lines(self) -> list[tuple[str, int]]:
        """Return file and line of the frames of the calling thread's label, innermost first.

        In the backward, where Python has no frame, they are the forward's.
        """
        stack = self.book.labels[self.book.current()].stack
        indices = self._stacks.stacks[stack] if stack >= 0 else ()
        frames = [self._stacks.frames[index] for index in indices]
        return [(frame.file, frame.line) for frame in frames]

    # -- after the script: the trace ----------------------------------------------------------

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
        """Return the trace of the run. The script has ended or failed; its objects are still alive.

        Args:
            device: what the script ran on.
            end: how it ended.
            command: the script and its arguments.
            versions: versions of the software that figures may depend on.
            index: of the device.
            failed: the allocation that has just failed, as an event of PyTorch's history.
        """
        self._inspect_objects()
        if compiled := self._compiled.summary():
            self.note(Provenance.EXACT, compiled)
        statistics = self._statistics(index)
        with self._labelling_thread():
            snapshot, settings_in_force = self._history.read(index, failed)
        history = snapshot["device_traces"][index]
        if not self._live:
            release_cublas_workspaces()  # the history has been read: it does not contain these frees
        if text := self._history.caveat:
            self.note(Provenance.ASSUMED, text, sizes=True)
        events, stacks, frames = history_columns(
            history, label_of=self._history.serial_of, is_user_file=is_user_file, table=self._stacks
        )
        serials = events.label  # what serial_of returned for each
        events = assign_labels_and_owners(events, serials, self.book, self._owners)
        events = assign_torch_functions(events, self.book, *torch_functions_of_events(history))
        name_autocast_copies(events, self.book)
        events = infer_forward_labels(events, self.book)
        labels, tensors = shorten_module_names(tuple(self.book.labels), tuple(self._owners.tensors))
        saved = self._mark_workspaces(events, serials)
        return Trace(
            events=events,
            labels=labels,
            stacks=stacks,
            frames=frames,
            marks=place_marks_between_events(self.book.marks, serials),
            segments=segments_at_end(snapshot, index),
            device=device,
            end=end,
            settings=settings_in_force,
            statistics=statistics,
            versions=versions,
            command=command,
            notes=tuple(replace(n, activations=n.workspaces and saved) for n in self._notes.values()),
            pools=distinct_pools_of_history(history, snapshot["segments"]),
            tensors=tensors,
            unpinned=self._owners.host.peak,
            step=self._step.step() if self._step else None,
            step_fault=self._step.fault if self._step else "",
        )

    def _mark_workspaces(self, events: Events, serials: npt.NDArray[np.int32]) -> bool:
        """Mark the workspaces in the ghost's log; return whether a graph has saved one."""
        if self._ghost is None:
            return False
        reported = self._ghost.reported_workspaces()
        missed, saved = mark_workspace_allocations(events, serials, self._ghost.workspace_uses(), reported)
        mark_failed_workspace_allocations(events, serials, reported, self._ghost.plans_without_workspace())
        if missed:
            text = f"{missed} library workspaces, not found in the history, count as other memory."
            self.note(Provenance.ASSUMED, text, sizes=True)
        return len(saved) > 0

    def _inspect_objects(self) -> None:
        """Inspect the objects that were met during the run, or all live ones if the run is live."""
        if self._live:
            with self._owners.skipping_failures(), torch._C.DisableTorchFunctionSubclass():
                self._inspect_live_objects()
        elif self._with_labels:
            self._inspect_all_models()
        else:
            return
        if self._owners.incomplete:
            self.note(Provenance.ASSUMED, _UNREADABLE_OBJECTS)

    def _inspect_all_models(self) -> None:
        """Inspect the models that have run, those that never ran, such as averages, and other copies."""
        outermost = tuple(self._modules.names.outermost())
        self._inspect_models(self.steps.optimizers, outermost, tuple(self._roots))
        self._copies.record(self.book.moment(), self.steps.optimizers, outermost)

    def _inspect_live_objects(self) -> None:
        alive = find_live_objects()
        self._record_modules(alive.roots)  # before the optimizers, whose state is named after parameters
        self._inspect_models(alive.optimizers, alive.roots)
        moment = self.book.moment()
        self._owners.record_graph(moment, alive.differentiable)
        self._owners.record_other_tensors(moment, alive.differentiable, alive.others)

    def _inspect_models(self, optimizers: Iterable[Optimizer], *roots: Iterable[torch.nn.Module]) -> None:
        moment = self.book.moment()
        for optimizer in optimizers:
            with self._owners.skipping_failures():
                self._owners.record_parameters(moment, parameters_of(optimizer))
                self._owners.record_optimizer_state(moment, optimizer)
        for modules in roots:
            self._record_modules(modules)

    @contextmanager
    def _labelling_thread(self) -> Iterator[None]:
        """Label the calling thread with its phase and module within, if modules are not labelled anyway."""
        label_before = self.book.current()
        if not self._with_labels:
            phase, name = self.book.phase, ""
            module = innermost_running_module(sys._getframe(1))
            if module is not None:
                name = self._modules.names.full_name(module)
                phase = Phase.RECOMPUTE if self.steps.in_backward else Phase.FORWARD
            elif self.steps.in_backward:
                phase = Phase.BACKWARD
            elif phase in BEFORE_FORWARD and self._owners.awaits_backward:
                phase = Phase.LOSS
            self.book.use(self.book.intern(phase, name))
        try:
            yield
        finally:
            self.book.use(label_before)

    def _statistics(self, index: int) -> dict[str, int]:
        """Return the allocator's statistics; those of a live run without peaks, which cover all of it."""
        counted = {
            name: each for name, each in torch.cuda.memory_stats(index).items() if isinstance(each, int)
        }
        return {name: each for name, each in counted.items() if not (self._live and name.endswith(".peak"))}

    def remove(self) -> None:
        """Stop watching, and leave PyTorch as it was before."""
        self._hooks.remove()
        self._history.stop()


_installed: list[Recorder] = []


def installed_recorder() -> Recorder | None:
    """Return the recorder that watches this process, if any."""
    return _installed[-1] if _installed else None
