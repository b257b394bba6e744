"""Record what a script's second training step runs on the GPU, eager or compiled.

    1st step ends      every workspace and all of the optimizer's state exist
        forward, loss, backward, update           recorded
          in a compiled graph                     its kernels, as Inductor scheduled them
          elsewhere                               the operations, as PyTorch dispatches them
    2nd step ends

Nothing that torch.compile or the allocator could see changes: the step runs as without memfit.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode as _innermost_mode

from memfit.ghost.compile.compiled_kernel_work import KERNELS
from memfit.ghost.runtime_bindings import GhostRuntime
from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch
from memfit.recording.event_labels import LabelBook
from memfit.recording.operation_interception import InterceptionModeAllowingCompilation
from memfit.recording.operation_of_call import operation_of_call, tensors_among
from memfit.records import MarkKind, Operation, WholeStep

_GRAPH = Patch("torch._inductor.output_code:CompiledFxGraph", "__call__", why="record the kernels of a step")
_ISSUED = ("launches", "library_calls", "cudnn_calls")


class WholeStepRecorder:
    """Records the operations of the second training step.

    Args:
        ghost: counts launches and waits.
        book: has the label of each thread.
    """

    def __init__(self, ghost: GhostRuntime, book: LabelBook) -> None:
        self._ghost, self._book = ghost, book
        self._mode = InterceptionModeAllowingCompilation(self._run)
        self._thread = 0
        """That has entered the mode."""
        self._begun = self._ended = False
        self._completed = 0
        self._in_graph = 0
        self._number: dict[Operation, int] = {}
        self._order: list[int] = []
        self._labels: list[int] = []
        self._waits = self._replays = 0

    def install(self, hooks: InstalledHooks) -> None:
        """Hook compiled graphs, as soon as the script imports the compiler, and follow its training steps."""
        hooks.wrap_when_imported(_GRAPH, __call__=self._run_graph)
        self._book.listeners.append(self._marked)

    def _marked(self, kind: MarkKind, index: int) -> None:
        """Begin or end at the end of a training step; at the next forward if it ends in the backward."""
        if kind is MarkKind.TRAINING_STEP:
            self._completed = index + 1
        elif kind is not MarkKind.FORWARD:
            return
        if torch._C._current_graph_task_id() != -1:  # perhaps on a thread of autograd's own
            return
        if self._completed > 1:
            self._end()
        elif self._completed and not self._begun and _innermost_mode() is None:
            self._begun, self._thread = True, threading.get_ident()
            self._waits, self._replays = self._ghost.counter("waits"), self._ghost.counter("replays")
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def _end(self) -> None:
        """Stop recording; leave the mode if no other of the script's is inside of it."""
        if self._thread == threading.get_ident() and _innermost_mode() is self._mode:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._thread = 0
        if self._begun and not self._ended:
            self._replays = self._ghost.counter("replays") - self._replays
            self._ended = True

    def step(self) -> WholeStep | None:
        """Return what was recorded, if the whole step was."""
        if not self._ended or not self._order:
            return None
        return WholeStep(
            tuple(self._number), tuple(self._order), tuple(self._labels), replayed=self._replays > 0
        )

    def _run(self, operation: Any, args: Any, kwargs: Any) -> Any:
        if self._ended or self._in_graph:
            return operation(*args, **kwargs)
        issued, waits = self._issued(), self._ghost.counter("waits")
        result = operation(*args, **kwargs)
        tensors = tensors_among((args, kwargs, result))
        if operation.is_view or not any(each.is_cuda for each in tensors):
            return result
        if any(isinstance(each, FakeTensor) for each in tensors):  # code that is being compiled
            return result
        waited, self._waits = waits > self._waits, self._ghost.counter("waits")
        if waited:
            self._add(Operation("synchronize", -1, -1, (), (), (), 0, 0, "", False, 0.0, 0, waits=True))
        self._add(
            operation_of_call(
                operation,
                args,
                kwargs,
                result,
                launches=self._issued() - issued,
                stream=torch._C._cuda_getCurrentStream(torch.cuda.current_device())[0],
                waits=self._waits > waits,
            )
        )
        return result

    def _issued(self) -> int:
        return sum(map(self._ghost.counter, _ISSUED))

    def _run_graph(self, original: Callable[..., Any], graph: Any, inputs: Any) -> Any:
        if not self._begun or self._ended or self._in_graph:
            return original(graph, inputs)
        for name, flops, moved, dtype in getattr(graph, KERNELS):
            self._add(Operation(name, -1, -1, (), (), (), flops, moved, dtype, False, 0.0, 0, launches=1))
        self._in_graph += 1
        try:
            return original(graph, inputs)
        finally:
            self._in_graph -= 1

    def _add(self, operation: Operation) -> None:
        self._order.append(self._number.setdefault(operation, len(self._number)))
        self._labels.append(self._book.current())
