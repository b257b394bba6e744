"""Record the operations of a script's training step, and leave them in a file.

    1st step    optimizer.step(): from now on, the optimizer's state and every workspace exist
    2nd step    model(inputs) ── loss ── backward() ── optimizer.step()
                └────────────── recorded ──────────────┘

Of several models, or calls of one, that whose backward needs most is kept; of equal ones the last.

If the script compiles something in its first step, only what the GPU runs is recorded: hooks of modules would
be compiled with them. Calls of modules are therefore hooked after the first step; the compiler also keeps the
``Module.__call__`` that it found when it was imported.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from memfit.ghost.compile.compiled_kernel_work import KERNELS
from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch
from memfit.recording.model_input_digests import ModelInputRecorder
from memfit.recording.module_names import ModuleNames, called_module
from memfit.recording.operation_interception import (
    InterceptionModeAllowingCompilation,
    call_before_compilations,
)
from memfit.recording.step_operations import LeftStorages, StepOperationRecorder
from memfit.records import StepOperations
from memfit.records.step_operations import Operation

_MODULE = Patch("torch.nn.modules.module:Module", "__call__", why="record the operations of a step")
_OPTIMIZER = Patch("torch.optim.optimizer:Optimizer", "__init__", why="learn which parameters it updates")
_GRAPH = Patch("torch._inductor.output_code:CompiledFxGraph", "__call__", why="record the kernels of a step")

_SOMETHING = 0
"""The storage that stands for what kernels create: which tensors those are is not known."""


class SecondStepRecorder:
    """Records the second step of the models that a script trains.

    Args:
        file: receives ``StepOperations`` as JSON.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._names = ModuleNames()
        self._created = 0  # optimizers
        self._optimizers: dict[int, int] = {}
        """By parameter: which optimizer has it."""
        self._stepped = False
        self._recorder: StepOperationRecorder | None = None
        self._left: LeftStorages | None = None
        """What the step recorded last has left."""
        self._model: torch.nn.Module | None = None
        self._most = -1
        self._eager = InstalledHooks()
        """What torch.compile must not see."""
        self._compiled = CompiledStepRecorder(self._expect_compiled)
        self._is_compiled = False
        self._samples = ModelInputRecorder()
        self._is_inside = False
        self._kept: tuple[StepOperations, list[int | None]] | None = None
        """The step whose backward needs most so far, and the optimizers of the model's parameters."""
        self._stepping: torch.optim.Optimizer | None = None
        """The optimizer that made the first step."""

    def install(self, hooks: InstalledHooks) -> None:
        """Hook the calls of models and the steps of optimizers."""
        self._names.follow(hooks)
        hooks.add(register_optimizer_step_pre_hook(self._before_step))
        hooks.call_after(_OPTIMIZER, "__init__", self._number)
        hooks.on_removal(self._eager.remove)
        hooks.add(register_optimizer_step_post_hook(self._after_step))
        self._compiled.install(hooks)
        self._samples.install(hooks)

    def move(self, file: Path) -> None:
        """Leave the operations in another file, in a fork of the process."""
        self._file = file

    def _expect_compiled(self) -> None:
        self._eager.remove()
        self._is_compiled = True

    def _number(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            self._optimizers |= dict.fromkeys(map(id, group["params"]), self._created)
        self._created += 1

    def _called(
        self, original: Callable[..., Any], module: torch.nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        trains = torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
        if trains and called_module(module) is module:
            if module is self._model and self._recorder is not None and self._recorder.has_backward:
                self._finish()  # the next micro-batch: from now on, gradients exist all the time
            if self._recorder is None and any(each.requires_grad for each in module.parameters()):
                _, _, path = self._names.full_name(module).partition(".")
                self._model = module
                self._recorder = StepOperationRecorder(module, path, self._left)
                self._recorder.start()
            if not self._is_inside and self._recorder is not None:
                self._is_inside = True
                self._samples.end_outside()
                self._samples.passes((args, kwargs), is_model=module is self._model)
                try:
                    return original(module, *args, **kwargs)
                finally:
                    self._is_inside = False
                    self._samples.begin_outside()
        return original(module, *args, **kwargs)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._stepped and not self._is_compiled:
            self._eager.wrap(_MODULE, "__call__", self._called)
        self._stepped = True
        self._samples.end_outside()
        self._finish()
        if self._kept is not None:
            self._write(*self._kept)
        if self._compiled.is_recording and optimizer is self._stepping:
            step = self._compiled.stop()
            if step is not None:
                numbers = [self._optimizers.get(id(each)) for each in optimizer.param_groups[0]["params"]]
                self._write(step, numbers)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._samples.begin_outside()
        if self._is_compiled and self._stepping is None:
            self._stepping = optimizer
            self._compiled.start()

    def _finish(self) -> None:
        if self._recorder is None or self._model is None:
            return
        step = self._recorder.stop()
        self._left, self._recorder = self._recorder.left, None
        numbers = [self._optimizers.get(id(each)) for each in self._model.parameters()]
        saved = {storage for call in step.calls for storage in call.saves}
        most = sum(step.storages[storage] for storage in saved)
        if most >= self._most:
            self._most, self._kept = most, (step, numbers)

    def _write(self, step: StepOperations, numbers: list[int | None]) -> None:
        """Leave a step in the file, with the first of some optimizers that is known."""
        step = replace(
            step,
            optimizer=next((each for each in numbers if each is not None), None),
            samples=self._samples.found(),
        )
        self._file.write_bytes(msgspec.json.encode(step))


class CompiledStepRecorder:
    """Records what a training step of compiled code runs: kernels of graphs, and operations beside them.

        optimizer.step()                          of the first step
        forward, loss, backward                   recorded
          in a compiled graph                     its kernels, as Inductor scheduled them
          elsewhere                               the operations on the GPU, as PyTorch dispatches them
        optimizer.step()                          of the second step

    Nothing that torch.compile could see changes, so that the step runs as without memfit.

    Args:
        on_compile: called whenever ``torch.compile`` begins to compile.
    """

    def __init__(self, on_compile: Callable[[], None]) -> None:
        self._on_compile = on_compile
        self._mode = InterceptionModeAllowingCompilation(self.run)
        self.is_recording = False
        self._in_graph = 0
        self._kernels: list[Operation] = []
        self._graphs = 0

    def install(self, hooks: InstalledHooks) -> None:
        """Hook compilations and graphs, as soon as the script imports the compiler."""
        call_before_compilations(hooks, self._on_compile)
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
