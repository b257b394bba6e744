"""Record what a script's second training step runs on the GPU, eager or compiled.

    1st step ends      every workspace and all of the optimizer's state exist
        forward, loss, backward, update           recorded by PyTorch's ExecutionTraceObserver
          in a compiled graph                     its kernels, as Inductor scheduled them
          in a replay of a CUDA graph             the operations that were recorded while it was captured
          elsewhere                               the operations
    2nd step ends

The observer's file is read when the script has ended: the step runs as without memfit.
"""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch

from memfit.ghost.compile.compiled_kernel_work import KERNELS
from memfit.ghost.runtime_bindings import GhostRuntime
from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch
from memfit.recording.cuda_graphs import GraphCaptures
from memfit.recording.event_labels import LabelBook
from memfit.recording.operation_interception import OperationInterceptionMode
from memfit.recording.operation_observer import OperationObserver, trace_node
from memfit.recording.recorded_operations import COMPILED_MARK, ONCE_MARK, REPLAY_MARK, RecordedOperations
from memfit.records import HostUnits, MarkKind, Operation, Phase, WholeStep

_GRAPH = Patch("torch._inductor.output_code:CompiledFxGraph", "__call__", why="record the kernels of a step")
_REBUILD = Patch(
    "torch.distributed:Reducer",
    "_rebuild_buckets",
    why="leave out of the recorded step what DistributedDataParallel does only once",
    source="rebuildBuckets, torch/csrc/distributed/c10d/reducer.cpp",
    optional="a build without torch.distributed",
)
_OBSERVER = Patch(
    "torch.profiler.profiler:ExecutionTraceObserver",
    "register_callback",
    why="let the script have PyTorch's only observer, if it starts one",
)
_RECOMPUTES = Patch(
    "torch.utils.checkpoint:_recomputation_hook",
    "__init__",
    why="count the regions that run again without reentry",
)
_GRADIENT = "torch::autograd::AccumulateGrad"
_OF_LIBRARIES = tuple(
    f"aten.{name}"
    for name in ("mm", "addmm", "bmm", "baddbmm", "convolution", "cudnn", "_cudnn", "linear", "miopen")
)
_CALLS_OF_OPERATION, _CALLS_OF_MODULE = 2.5, 4.3
"""Calls of Python functions for an operation and a module of a forward. Counted in the networks of
benchmarks/host_times.py: 18 % off in the median. To count them in each run takes longer than the step."""
_HOOKS = "FullyShardedDataParallel.", "FSDP::"
_CALLS_OF_HOOK, _CALLS_OF_SHARDED = 88, 90
"""The same for each part of a hook that FSDP names in profiles, and for each parameter that has a gradient of
its own. Counted in small networks under FSDP1 and FSDP2 of PyTorch 2.14.1: at most 11 % off; with
``use_orig_params``, whose parameters have none, 33 % too few."""
_CALLED = (Phase.FORWARD, Phase.RECOMPUTE)
"""Phases in which Python calls operations and modules."""


class WholeStepRecorder:
    """Records the operations of the second training step."""

    def __init__(self, ghost: GhostRuntime, book: LabelBook, captures: GraphCaptures) -> None:
        self._ghost, self._book, self._captures = ghost, book, captures
        self._observer: OperationObserver | None = None
        self._file: Path | None = None
        self._is_due = self._is_whole = False
        self._compiled: list[tuple[Any, bool]] = []
        """Kernels of each call of a compiled graph, and whether it replayed them as a CUDA graph."""
        self._in_compiled = 0
        self._capture: OperationObserver | None = None
        self._captured: list[bytes] = []
        """What the observer wrote of each CUDA graph that the script captured."""
        self._replays = 0
        """Of CUDA graphs in the step whose kernels are not known."""
        self._tf32 = False
        self._nodes = self._intercepted = self._regions = 0
        self.fault = ""
        """Why ``step`` returns None, as a clause, if the step could not be recorded, or not be read."""

    def install(self, hooks: InstalledHooks) -> None:
        """Hook compiled graphs, as soon as the script imports the compiler, and follow its training steps."""
        hooks.wrap_when_imported(_GRAPH, __call__=self._run_compiled)
        hooks.wrap_when_imported(_REBUILD, _rebuild_buckets=self._run_once)
        hooks.wrap_when_imported(_RECOMPUTES, __init__=self._recompute)
        hooks.wrap_when_imported(_OBSERVER, register_callback=self._leave_observer)
        self._book.listeners.append(self._marked)
        os.register_at_fork(before=self._give_up)  # a fork of the process would write to the same file

    def _marked(self, kind: MarkKind, _: int) -> None:
        """Begin or end at the end of a training step; at the next mark if it ends in the backward."""
        if kind is MarkKind.CAPTURE_BEGIN:
            self._begin_capture()
        elif kind is MarkKind.CAPTURE_END:
            self._end_capture()
        self._is_due |= kind is MarkKind.TRAINING_STEP
        if not self._is_due or self._capture is not None:
            return
        if torch._C._current_graph_task_id() != -1:  # on a thread of autograd's own
            return
        self._is_due = False
        if self._observer is not None:
            self._is_whole = True
            self._end()
        elif self._file is None and not self.fault:
            self._begin()

    def _begin(self) -> None:
        self._compiled.clear()
        self._tf32 = torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32"
        self._replays = -self._ghost.counter("replays")
        self._observer = OperationObserver(self._ghost, self._book)
        self._file = self._observer.file
        self._nodes, self._regions = torch._C._autograd._get_sequence_nr(), 0
        self._intercepted = OperationInterceptionMode.intercepted

    def _end(self) -> None:
        observer, self._observer = self._observer, None
        if observer is None:
            return
        self._nodes = torch._C._autograd._get_sequence_nr() - self._nodes
        self._intercepted = OperationInterceptionMode.intercepted - self._intercepted
        observer.stop()
        self._replays += self._ghost.counter("replays")

    def _give_up(self) -> None:
        """Record a later step instead."""
        if self._observer is not None:
            self._end()
            self._forget()

    def _leave_observer(self, original: Callable[..., Any], *args: Any) -> Any:
        """Leave the observer to the script: PyTorch crashes if two are stopped."""
        self._give_up()
        self._end_capture()
        if self._file is None:
            self.fault = "the script uses PyTorch's ExecutionTraceObserver itself"
        return original(*args)

    def _forget(self) -> None:
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file = None

    def _begin_capture(self) -> None:
        """Record what is captured in a CUDA graph, for its replays; later steps do not capture it again."""
        self._give_up()
        if self._file is None and not self.fault and not self._in_compiled:
            self._capture = OperationObserver(self._ghost, self._book)
            self._captures.keep_for_replays(partial(self._replayed, len(self._captured)))

    def _end_capture(self) -> None:
        if self._capture is not None:
            self._capture.stop()
            self._captured.append(self._capture.file.read_bytes())
            self._capture.file.unlink()
            self._capture = None

    def _replayed(self, number: int) -> None:
        if self._observer is not None:
            self._replays -= 1
            with trace_node(f"{REPLAY_MARK}{number}"):
                pass

    def step(self) -> WholeStep | None:
        """Return what was recorded, if the whole step was."""
        if self._is_due and self._observer is not None:  # the last update was in the backward
            self._is_whole = True
        self._end()
        try:
            return self._read(self._file) if self._file is not None and self._is_whole else None
        except (msgspec.MsgspecError, ValueError, TypeError, LookupError, AttributeError) as error:
            # Another version's file, perhaps: the run's memory is known all the same.
            self.fault = f"memfit cannot read what PyTorch's observer wrote ({type(error).__name__}: {error})"
            return None
        finally:
            self._forget()

    def _read(self, file: Path) -> WholeStep | None:
        if self._replays:
            self.fault = "the step replays a CUDA graph that memfit did not see captured"
            return None
        if any(kernels is None for kernels, _ in self._compiled):
            self.fault = "a compiled graph came from a cache, which does not list its kernels"
            return None
        with _without_garbage_collection():
            step = RecordedOperations(file.read_bytes(), self._compiled, self._captured)
        if not step.operations:
            self.fault = "the second training step ran nothing on the GPU"
            return None
        number: dict[Operation, int] = {}
        order = [number.setdefault(operation, len(number)) for operation in step.operations]
        return WholeStep(
            tuple(number),
            tuple(order),
            tuple(step.labels),
            self._host(step),
            self._tf32,
            compiled=bool(self._compiled),
            after=tuple(step.streams.after),
            replays=tuple(step.replays),
        )

    def _host(self, step: RecordedOperations) -> HostUnits:
        """Return what the host did.

        A region that runs again detaches each tensor that it saves. Autograd's threads have numbers of their
        own: nodes of recomputations are counted as their operations.
        """
        replayed = {place for first, end in step.replays for place in range(first + 1, end)}
        issued = [n for n, each in enumerate(step.operations) if each.launches and n not in replayed]
        phases = [self._book.labels[step.labels[place]].phase for place in issued]
        again = phases.count(Phase.RECOMPUTE)
        regions = self._regions or sum(  # with reentry, which runs whole modules again
            here is Phase.RECOMPUTE and before is not Phase.RECOMPUTE for before, here in pairwise(phases)
        )
        called = sum(phase in _CALLED for phase in phases)
        # Two for each module: where it begins, and where it ends.
        modules = sum(self._book.labels[label].phase in _CALLED for label in step.label_marks) // 2
        calls = sum(step.operations[place].name.startswith(_OF_LIBRARIES) for place in issued)
        gradients = step.names[_GRADIENT]
        hooks = sum(count for name, count in step.names.items() if name.startswith(_HOOKS))
        return HostUnits(
            python_calls=_CALLS_OF_OPERATION * called + _CALLS_OF_MODULE * modules,
            hook_calls=_CALLS_OF_HOOK * hooks + _CALLS_OF_SHARDED * gradients * (hooks > 0),
            operations=len(issued),
            autograd_nodes=self._nodes + again,
            gradients=gradients,
            updated_parameters=gradients,
            checkpointed_regions=regions,
            checkpointed_tensors=step.names["aten::detach"] if regions else 0,
            watched_operations=max(step.names["PythonDispatchMode"] - self._intercepted, 0),
            launches=len(issued) - calls,
            library_calls=calls,
        )

    def _recompute(self, original: Callable[..., None], *args: Any) -> None:
        self._regions += self._observer is not None
        original(*args)

    def _run_once(self, original: Callable[..., Any], *args: Any) -> Any:
        with trace_node(ONCE_MARK), self._ghost.leaving_no_marks():
            return original(*args)

    def _run_compiled(self, original: Callable[..., Any], graph: Any, inputs: Any) -> Any:
        self._in_compiled += 1  # what is captured there need not be recorded: its kernels are known
        try:
            if self._observer is None:
                return original(graph, inputs)
            number, before = len(self._compiled), self._ghost.counter("replays")
            self._compiled.append((getattr(graph, KERNELS, None), False))  # None: from a script's own cache
            with trace_node(f"{COMPILED_MARK}{number}"):
                result = original(graph, inputs)
            if replays := self._ghost.counter("replays") - before:
                self._compiled[number] = self._compiled[number][0], True
                self._replays -= replays
            return result
        finally:
            self._in_compiled -= 1


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Do not look for cycles again and again while many objects are made: it takes three times as long."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
