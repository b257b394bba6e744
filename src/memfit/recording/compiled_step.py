"""Record what a training step of compiled code runs: kernels of graphs, and operations outside of them.

    optimizer.step()                          of the first step
    forward, loss, backward                   recorded
      in a compiled graph                     its kernels, as Inductor scheduled them
      elsewhere                               the operations on the GPU, as PyTorch dispatches them
    optimizer.step()                          of the second step

Nothing that torch.compile could see changes, so that the step runs as without memfit.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from memfit.ghost.compile.kernel_work import KERNELS
from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch
from memfit.recording.dispatched_operations import OperationsBesideGraphs
from memfit.records.step_operations import Operation, StepOperations

_COMPILATIONS = Patch(
    "torch._dynamo.callback:CompilationCallbackHandler", "run_start_callbacks", why="notice compilations"
)
_GRAPH = Patch("torch._inductor.output_code:CompiledFxGraph", "__call__", why="record the kernels of a step")

_SOMETHING = 0
"""The storage that stands for what kernels create: which tensors those are is not known."""


def before_compilations(hooks: InstalledHooks, call: Callable[[], None]) -> None:
    """Call a function whenever ``torch.compile`` begins to compile, not where it decorates a function."""

    def started(original: Callable[..., None], *args: Any) -> None:
        call()
        original(*args)

    hooks.wrap_when_imported(_COMPILATIONS, run_start_callbacks=started)


class CompiledStepRecorder:
    """Records what runs from ``start`` to ``stop``.

    Args:
        on_compile: called whenever ``torch.compile`` begins to compile.
    """

    def __init__(self, on_compile: Callable[[], None]) -> None:
        self._on_compile = on_compile
        self._mode = OperationsBesideGraphs(self.run)
        self.is_recording = False
        self._in_graph = 0
        self._kernels: list[Operation] = []
        self._graphs = 0

    def install(self, hooks: InstalledHooks) -> None:
        """Hook compilations and graphs, as soon as the script imports the compiler."""
        before_compilations(hooks, self._on_compile)
        hooks.wrap_when_imported(_GRAPH, __call__=self._run_graph)

    def start(self) -> None:
        """Begin to record."""
        self.is_recording = True
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> StepOperations | None:
        """Stop recording; return what was recorded, or None if Inductor has compiled nothing of it."""
        self.is_recording = False
        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if not self._graphs:
            return None
        return StepOperations((0,), (), tuple(self._kernels), (), compiled=True)

    def run(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation, and record it if it is not part of a graph."""
        result = operation(*args, **kwargs)
        if self._in_graph:
            return result
        tensors = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor)]
        if any(isinstance(each, FakeTensor) for each in tensors):  # code that is being compiled
            return result
        if any(each.is_cuda for each in tensors) and not operation.is_view:
            formula = flop_registry.get(operation._overloadpacket)
            self._add(
                str(operation),
                formula(*args, **kwargs, out_val=result) if formula is not None else 0,
                sum(each.numel() * each.element_size() for each in tensors),
                str(tensors[-1].dtype).removeprefix("torch."),
            )
        return result

    def _run_graph(self, original: Callable[..., Any], graph: Any, inputs: Any) -> Any:
        if not self.is_recording:
            return original(graph, inputs)
        self._graphs += 1
        for name, flops, moved, dtype in getattr(graph, KERNELS):
            self._add(name, flops, moved, dtype)
        self._in_graph += 1
        try:
            return original(graph, inputs)
        finally:
            self._in_graph -= 1

    def _add(self, name: str, flops: int, moved: int, dtype: str) -> None:
        creates = (_SOMETHING,) if flops or moved else ()
        self._kernels.append(Operation(name, -1, -1, (), creates, (), flops, moved, dtype, False, 0.0, 0))
