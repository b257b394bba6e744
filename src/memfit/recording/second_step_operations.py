"""Record the operations of a script's training step, and leave them in a file.

    1st step    optimizer.step(): from now on, the optimizer's state and every workspace exist
    2nd step    model(inputs) ── loss ── backward() ── optimizer.step()
                └────────────── recorded ──────────────┘

Of several models, or calls of one, that whose backward needs most is kept; of equal ones the last.

If the script compiles something in its first step, only that is recorded: hooks of modules would be compiled
with them. What the GPU runs is in the trace of the run. Calls of modules are therefore hooked after the first
step; the compiler also keeps the ``Module.__call__`` that it found when it was imported.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch
from memfit.recording.model_input_digests import ModelInputRecorder
from memfit.recording.module_names import ModuleNames, called_module
from memfit.recording.operation_interception import call_before_compilations
from memfit.recording.step_operations import LeftStorages, StepOperationRecorder
from memfit.records import StepOperations

_MODULE = Patch("torch.nn.modules.module:Module", "__call__", why="record the operations of a step")
_OPTIMIZER = Patch("torch.optim.optimizer:Optimizer", "__init__", why="learn which parameters it updates")


class SecondStepRecorder:
    """Records the second step of the models that a script trains."""

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
        self._is_compiled = False
        self._samples = ModelInputRecorder()
        self._is_inside = False
        self._kept: tuple[StepOperations, list[int | None]] | None = None
        """The step whose backward needs most so far, and the optimizers of the model's parameters."""

    def install(self, hooks: InstalledHooks) -> None:
        """Hook the calls of models and the steps of optimizers."""
        self._names.follow(hooks)
        hooks.add(register_optimizer_step_pre_hook(self._before_step))
        hooks.call_after(_OPTIMIZER, "__init__", self._number)
        hooks.on_removal(self._eager.remove)
        hooks.add(register_optimizer_step_post_hook(self._after_step))
        call_before_compilations(hooks, self._expect_compiled)
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
        if self._is_compiled:
            numbers = [self._optimizers.get(id(each)) for each in optimizer.param_groups[0]["params"]]
            self._write(StepOperations((), (), (), (), compiled=True), numbers)

    def _after_step(self, *_: Any) -> None:
        self._samples.begin_outside()

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
