"""The operations of a step, in order, from what PyTorch's observer wrote and memfit's marks in it."""

from collections.abc import Sequence
from dataclasses import replace

from memfit.ghost.compile.compiled_kernel_work import KernelWork
from memfit.recording.execution_trace import TraceNode, operation_of_node, read_execution_trace
from memfit.recording.operation_observer import LABEL_MARK
from memfit.recording.operation_of_call import layout_of_strides
from memfit.recording.step_streams import MARK as STREAM_MARK
from memfit.recording.step_streams import StepStreams
from memfit.records import DRIVER, NO_STREAM, ON_CPU, Operand, Operation

COMPILED_MARK, REPLAY_MARK, ONCE_MARK = (f"{LABEL_MARK}{name}" for name in ("compiled:", "replay:", "once"))
"""Around a call of a compiled graph, and after a replay of a CUDA graph, with their numbers; around what no
other step does."""
_FREES = (f"{STREAM_MARK}free", f"{STREAM_MARK}unmap")
_ALLOCATES = (f"{DRIVER}malloc", f"{DRIVER}map")
CompiledCalls = Sequence[tuple[tuple[KernelWork, ...], bool]]
"""The kernels of each call of a compiled graph, and whether it replayed them as a CUDA graph."""


class RecordedOperations:
    """What ran on the GPU.

    Args:
        written: by the observer, during the step.
        compiled: calls of compiled graphs in it.
        captured: what the observer wrote while the CUDA graphs were captured that it replays.
    """

    def __init__(self, written: bytes, compiled: CompiledCalls = (), captured: Sequence[bytes] = ()) -> None:
        self._compiled, self._captured = compiled, captured
        self.operations: list[Operation] = []
        self.labels: list[int] = []
        """Of each, as in ``WholeStep``."""
        self.label_marks: list[int] = []
        """Labels that were put in force, in order."""
        self.replays: list[tuple[int, int]] = []
        """As in ``WholeStep``."""
        self.streams = StepStreams()
        nodes, names = read_execution_trace(written, LABEL_MARK, inner=STREAM_MARK)
        self.names = names
        """How many nodes of each name there are."""
        # A step that only allocates makes the cache grow: later ones find there what they need.
        grows = not any(node.name.startswith(_FREES) for node in nodes)
        label_of: dict[int, int] = {}  # by thread
        for node in nodes:
            thread = node.attribute("tid")
            if node.name.startswith(STREAM_MARK):
                for each in self.streams.read(node.name, thread):
                    if not (grows and each.name in _ALLOCATES):
                        self._add(each, label_of.get(thread, 0))
            elif node.name.removeprefix(LABEL_MARK).isdecimal():
                label = int(node.name.removeprefix(LABEL_MARK))
                if label_of.get(thread) != label:  # no mere moment, as plans' own record asks for
                    self.label_marks.append(label)
                label_of[thread] = label
            else:
                first, stream = len(self.operations), self.streams.of_thread(thread)
                is_replay = self._add_all(node, label_of.get(thread, 0), stream)
                if is_replay and first < len(self.operations):
                    self.replays.append((first, len(self.operations)))

    def _add_all(self, node: TraceNode, label: int, stream: int) -> bool:
        """Add what a node ran; return whether a CUDA graph issued it."""
        if node.name.startswith(REPLAY_MARK):
            graph = RecordedOperations(self._captured[int(node.name.removeprefix(REPLAY_MARK))])
            for each, its_label in zip(graph.operations, graph.labels, strict=True):
                self._add(replace(each, stream=stream), its_label)
            return True
        if node.name.startswith(COMPILED_MARK):
            kernels, is_replay = self._compiled[int(node.name.removeprefix(COMPILED_MARK))]
            for kernel in kernels:
                self._add(_operation_of_kernel(kernel, stream), label)
            return is_replay
        if node.moved_on_cpu:
            self._add(_operation_on_cpu(node), label)
        elif node.name != ONCE_MARK:
            self._add(replace(operation_of_node(node), stream=stream), label)
        return False

    def _add(self, operation: Operation, label: int) -> None:
        self.streams.issued(operation.stream, len(self.operations))
        self.operations.append(operation)
        self.labels.append(label)


def _operation_on_cpu(node: TraceNode) -> Operation:
    fields = f"{ON_CPU}{node.name}", -1, -1, (), (), (), 0, node.moved_on_cpu, "", False, 0.0, 0
    return Operation(*fields, stream=NO_STREAM)


def _operation_of_kernel(work: KernelWork, stream: int) -> Operation:
    name, flops, moved, dtype, *tensors, is_causal = work
    fields = name, -1, -1, (), (), (), flops, moved, dtype, False, 0.0, 0
    operands, results = (
        tuple(Operand(shape, own, layout_of_strides(shape, strides)) for shape, strides, own in some)
        for some in tensors
    )
    return Operation(
        *fields,
        operands=operands,
        results=results,
        is_causal=is_causal,
        launches=min(moved, 1),
        stream=stream,
    )
