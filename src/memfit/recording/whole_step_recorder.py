"""Record what a script's second training step runs on the GPU, eager or compiled.

    1st step ends      every workspace and all of the optimizer's state exist
        forward, loss, backward, update           recorded by PyTorch's ExecutionTraceObserver
          in a compiled graph                     its kernels, as Inductor scheduled them
          elsewhere                               the operations
    2nd step ends

The observer's file is read when the script has ended: the step runs as without memfit.
"""

import ctypes
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.profiler import ExecutionTraceObserver

from memfit.ghost.compile.compiled_kernel_work import KERNELS, KernelWork
from memfit.ghost.runtime_bindings import GhostRuntime
from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch
from memfit.recording.event_labels import LabelBook
from memfit.recording.execution_trace import operation_of_node, read_execution_trace
from memfit.recording.operation_interception import OperationInterceptionMode
from memfit.recording.operation_of_call import layout_of_strides
from memfit.recording.step_streams import MARK as STREAM_MARK
from memfit.recording.step_streams import StepStreams
from memfit.records import HostUnits, MarkKind, Operand, Operation, Phase, WholeStep

_GRAPH = Patch("torch._inductor.output_code:CompiledFxGraph", "__call__", why="record the kernels of a step")
_REBUILD = Patch(
    "torch.distributed:Reducer",
    "_rebuild_buckets",
    why="leave out of the recorded step what DistributedDataParallel does only once",
    source="rebuildBuckets, torch/csrc/distributed/c10d/reducer.cpp",
    optional="a build without torch.distributed",
)
_MARK, _GRAPH_MARK, _ONCE_MARK = "memfit:", "memfit:graph:", "memfit:once"
_GRADIENT = "torch::autograd::AccumulateGrad"
_OF_LIBRARIES = tuple(
    f"aten.{name}"
    for name in ("mm", "addmm", "bmm", "baddbmm", "convolution", "cudnn", "_cudnn", "linear", "miopen")
)
_CALLS_OF_OPERATION, _CALLS_OF_MODULE = 2.5, 4.3
"""Calls of Python functions for an operation and a module of a forward. Counted in the networks of
benchmarks/host_times.py: 18 % off in the median. To count them in each run takes longer than the step."""
_STANDARD_ERROR = 2


class WholeStepRecorder:
    """Records the operations of the second training step.

    Args:
        ghost: counts the replays of CUDA graphs.
        book: has the label of each thread.
    """

    def __init__(self, ghost: GhostRuntime, book: LabelBook) -> None:
        self._ghost, self._book = ghost, book
        self._observer: ExecutionTraceObserver | None = None
        self._file: Path | None = None
        self._is_due = self._is_whole = False
        self._graphs: list[Any] = []
        self._replays = 0
        self._tf32 = False
        self._nodes = self._intercepted = 0
        self.fault = ""
        """Why ``step`` returned None, as a clause, if it could not read what was recorded."""

    def install(self, hooks: InstalledHooks) -> None:
        """Hook compiled graphs, as soon as the script imports the compiler, and follow its training steps."""
        hooks.wrap_when_imported(_GRAPH, __call__=self._run_graph)
        hooks.wrap_when_imported(_REBUILD, _rebuild_buckets=self._run_once)
        self._book.listeners.append(self._marked)
        os.register_at_fork(before=self._give_up)

    def _marked(self, kind: MarkKind, _: int) -> None:
        """Begin or end at the end of a training step; at the next mark if it ends in the backward."""
        if kind is MarkKind.TRAINING_STEP:
            self._is_due = True
        if not self._is_due or torch._C._current_graph_task_id() != -1:  # on a thread of autograd's own
            return
        self._is_due = False
        if self._observer is not None:
            self._is_whole = True
            self._end()
        elif self._file is None:
            self._begin()

    def _begin(self) -> None:
        handle, name = tempfile.mkstemp(prefix="memfit-step-", suffix=".json")
        os.close(handle)
        self._file, self._replays = Path(name), self._ghost.counter("replays")
        self._graphs.clear()
        self._tf32 = torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32"
        self._observer = ExecutionTraceObserver()
        with _without_words_of_observer():
            self._observer.register_callback(name)
            self._observer.start()
        self._ghost.mark_streams(_torch_cpu())
        self._nodes = torch._C._autograd._get_sequence_nr()
        self._intercepted = OperationInterceptionMode.intercepted
        self._book.on_use = self._used
        self._used(self._book.current())

    def _end(self) -> None:
        observer, self._observer = self._observer, None
        if observer is None:
            return
        self._book.on_use = None
        self._ghost.mark_streams(None)
        self._nodes = torch._C._autograd._get_sequence_nr() - self._nodes
        self._intercepted = OperationInterceptionMode.intercepted - self._intercepted
        with _without_words_of_observer():
            observer.stop()
            observer.unregister_callback()
        self._replays = self._ghost.counter("replays") - self._replays

    def _give_up(self) -> None:
        """Record a later step instead: a fork of the process would write to the same file."""
        if self._observer is not None:
            self._end()
            self._forget()

    def _forget(self) -> None:
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file = None

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
        number: dict[Operation, int] = {}
        order: list[int] = []
        labels: list[int] = []
        label_of: dict[int, int] = {}  # by thread
        marks = 0  # two for each module: where it begins, and where it ends
        streams = StepStreams()
        nodes, names = read_execution_trace(file, _MARK, inner=STREAM_MARK)
        for node in nodes:
            thread = node.attribute("tid")
            if node.name.startswith(STREAM_MARK):
                found = streams.read(node.name, thread)
            elif node.name.startswith(_GRAPH_MARK):
                kernels = self._graphs[int(node.name.removeprefix(_GRAPH_MARK))]
                if kernels is None:
                    self.fault = "a compiled graph came from a cache, which does not list its kernels"
                    return None
                found = [_kernel(each) for each in kernels]
            elif node.name == _ONCE_MARK:
                continue
            elif node.name.startswith(_MARK):
                label = int(node.name.removeprefix(_MARK))
                is_new = label_of.get(thread) != label  # no mere moment, as plans' own record asks for
                marks += is_new and self._book.labels[label].phase in (Phase.FORWARD, Phase.RECOMPUTE)
                label_of[thread] = label
                continue
            else:
                found = [operation_of_node(node)]
            if not node.name.startswith(STREAM_MARK) and (stream := streams.of_thread(thread)):
                found = [replace(each, stream=stream) for each in found]
            for operation in found:
                streams.issued(operation.stream, len(order))
                order.append(number.setdefault(operation, len(number)))
                labels.append(label_of.get(thread, 0))
        if not order:
            self.fault = "the second training step ran nothing on the GPU"
            return None
        return WholeStep(
            tuple(number),
            tuple(order),
            tuple(labels),
            self._host(names, tuple(number), order, labels, marks // 2),
            self._tf32,
            compiled=bool(self._graphs),
            replayed=self._replays > 0,
            after=tuple(streams.after),
        )

    def _host(
        self,
        names: Counter[str],
        operations: Sequence[Operation],
        order: Sequence[int],
        labels: Sequence[int],
        modules: int,
    ) -> HostUnits:
        """Return what the host did.

        A region that runs again detaches each tensor that it saves. Autograd's threads have numbers of their
        own: nodes of recomputations are counted as their operations.
        """
        phases = [self._book.labels[label].phase for label in labels]
        again = phases.count(Phase.RECOMPUTE)
        regions = sum(
            here is Phase.RECOMPUTE and before is not Phase.RECOMPUTE for before, here in pairwise(phases)
        )
        called = sum(phase in (Phase.FORWARD, Phase.RECOMPUTE) for phase in phases)
        calls = sum(operations[at].name.startswith(_OF_LIBRARIES) for at in order)
        gradients = names[_GRADIENT]
        return HostUnits(
            python_calls=_CALLS_OF_OPERATION * called + _CALLS_OF_MODULE * modules,
            operations=len(order),
            autograd_nodes=self._nodes + again,
            gradients=gradients,
            updated_parameters=gradients,
            checkpointed_regions=regions,
            checkpointed_tensors=names["aten::detach"] if regions else 0,
            watched_operations=max(names["PythonDispatchMode"] - self._intercepted, 0),
            launches=len(order) - calls,
            library_calls=calls,
        )

    def _used(self, label: int) -> None:
        """Leave a mark in the trace: from here on, the calling thread does what a label says."""
        with _node(f"{_MARK}{label}"):
            pass

    def _run_once(self, original: Callable[..., Any], *args: Any) -> Any:
        with _node(_ONCE_MARK), self._ghost.leaving_no_marks():
            return original(*args)

    def _run_graph(self, original: Callable[..., Any], graph: Any, inputs: Any) -> Any:
        if self._observer is None:
            return original(graph, inputs)
        self._graphs.append(getattr(graph, KERNELS, None))  # None: from a cache of the script's own
        with _node(f"{_GRAPH_MARK}{len(self._graphs) - 1}"):
            return original(graph, inputs)


def _torch_cpu() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


def _kernel(work: KernelWork) -> Operation:
    name, flops, moved, dtype, *tensors, is_causal = work
    fields = name, -1, -1, (), (), (), flops, moved, dtype, False, 0.0, 0
    operands, results = (
        tuple(Operand(shape, own, layout_of_strides(shape, strides)) for shape, strides, own in some)
        for some in tensors
    )
    return Operation(*fields, operands=operands, results=results, is_causal=is_causal, launches=1)


@contextmanager
def _without_words_of_observer() -> Iterator[None]:
    """Keep from standard error what the observer writes there; what others write meanwhile passes."""
    with tempfile.TemporaryFile() as caught, _swapping:
        kept = os.dup(_STANDARD_ERROR)
        os.dup2(caught.fileno(), _STANDARD_ERROR)
        try:
            yield
        finally:
            os.dup2(kept, _STANDARD_ERROR)
            os.close(kept)
        caught.seek(0)
        others = [line for line in caught if b"execution_trace_observer" not in line]
        if others:
            os.write(_STANDARD_ERROR, b"".join(others))


_swapping = threading.Lock()


@contextmanager
def _node(name: str) -> Iterator[None]:
    """Add a node to the trace: what runs within is inside of it."""
    handle = torch.autograd._record_function_with_args_enter(name)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.autograd._record_function_with_args_exit(handle)  # type: ignore[attr-defined]
