"""The script's process: ``main()`` with ``SETTINGS.json SCRIPT.py ARGS...`` as arguments.

It runs the script until each of its optimizers is about to make its first update, writes the gradients that
they get, and ends the script.
"""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from memfit.patching.after_import import call_after_import
from memfit.patching.patches import Patch
from memfit.records import InputTensor
from memfit.run.parent_pipe import end_process_with_parent
from memfit.run.run_script_as_python import run_script_as_main
from memfit.run.script_end import classify_script_end

_OPTIMIZER = Patch("torch.optim.optimizer:Optimizer", "__init__", why="verify its first update")
_MODULE = Patch("torch.nn.modules.module:Module", "__call__", why="see what a model is passed")

_LISTING = "update.json"
_FINEST_FIRST = ("float64", "float32", "tf32", "float16", "bfloat16")


class FirstUpdateRunSettings(msgspec.Struct, frozen=True):
    """How to run a script until its first update: passed as JSON in a file."""

    folder: str
    """Receives the gradients."""
    module: bool
    """As in ``RunOptions``."""
    on_cpu: bool
    """Whether the CPU stands in for the GPU."""
    dropout: bool
    """Whether dropout drops anything."""
    change: str = ""
    """The file of ``InjectionSettings``; empty for none."""
    steps_in_backward: bool = False
    """Whether the change has parameters updated in the backward, which frees their gradients."""
    pipe: int = -1
    """A descriptor of a pipe that only memfit reads: the script ends with memfit."""


class SavedGradient(msgspec.Struct, frozen=True):
    """The gradient of one parameter, in ``NUMBER.npy``, as bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class FirstUpdate(msgspec.Struct, frozen=True):
    """What a script's first update showed."""

    gradients: tuple[SavedGradient, ...] = ()
    inputs: tuple[InputTensor, ...] = ()
    """What the models were passed, in order."""
    arithmetic: str = ""
    peak: int | None = None
    device: str = "CPU"
    torch: str = ""
    failure: str = ""
    """Why there was no update."""


def read_first_update(folder: Path) -> FirstUpdate:
    """Read what a script's process wrote; a failure if that is nothing."""
    try:
        content = (folder / _LISTING).read_bytes()
    except FileNotFoundError:
        return FirstUpdate(failure="its process ended before the first update.")
    return msgspec.json.decode(content, type=FirstUpdate)


def main() -> None:
    """Run the script."""
    settings = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=FirstUpdateRunSettings)
    command = tuple(sys.argv[2:])
    end_process_with_parent(settings.pipe)
    if settings.on_cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if settings.change:
        from memfit.injection.inject_plan import install

        install(settings.change)
    call_after_import("torch", partial(_watch, settings))
    try:
        run_script_as_main(command, module=settings.module)
    except FirstUpdateReached:
        return
    except BaseException as error:
        end = classify_script_end(error)
        if end.reason == "interrupted":
            raise
        where = f" ({end.where})" if end.where else ""
        why = end.exception or f"exit code {end.exit_code}"
        _write(settings, FirstUpdate(failure=f"it ended with {why}{where}"))
        return
    if not (Path(settings.folder) / _LISTING).exists():
        _write(settings, FirstUpdate(failure="it ended before an optimizer made an update."))


class FirstUpdateReached(BaseException):
    """Ends the script."""


def _write(settings: FirstUpdateRunSettings, update: FirstUpdate) -> None:
    (Path(settings.folder) / _LISTING).write_bytes(msgspec.json.encode(update))


def _watch(settings: FirstUpdateRunSettings) -> None:
    """Hook optimizers and models: torch has just been imported."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from memfit.patching.installed_hooks import InstalledHooks
    from memfit.random_state import seed_generators
    from memfit.verification.make_runs_comparable import (
        install_cpu_stand_in,
        switch_dropout_off,
        switch_gradient_changes_off,
    )

    hooks = InstalledHooks()
    seed_generators()
    switch_gradient_changes_off(hooks)
    if not settings.dropout:
        switch_dropout_off(hooks)
    if settings.on_cpu:
        install_cpu_stand_in(hooks)
    watched = FirstUpdateWatcher(settings)
    hooks.call_after(_OPTIMIZER, "__init__", watched.created)
    hooks.wrap(_MODULE, "__call__", watched.called)
    register_optimizer_step_pre_hook(watched.steps)


class FirstUpdateWatcher:
    """Collects the gradients of each optimizer's first update."""

    def __init__(self, settings: FirstUpdateRunSettings) -> None:
        self._settings = settings
        self._folder = Path(settings.folder)
        self._optimizers: list[Any] = []
        self._stepped: list[Any] = []
        self._names: dict[int, str] = {}
        self._models: list[Any] = []
        self._gradients: list[SavedGradient] = []
        self._inputs: list[InputTensor] = []
        self._arithmetic: set[str] = set()
        self._freed: dict[int, Any] = {}
        """By parameter: its gradient, if the plan frees gradients in the backward."""
        self._inside = False

    def created(self, optimizer: Any) -> None:
        """Count an optimizer."""
        self._optimizers.append(optimizer)
        for group in optimizer.param_groups if self._settings.steps_in_backward else ():
            for parameter in group["params"]:
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._computed)

    def _computed(self, parameter: Any) -> None:
        """Copy a gradient before the plan's own hook, which comes later, uses and frees it."""
        self._freed[id(parameter)] = parameter.grad.detach().to("cpu", copy=True)

    def called(self, original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Note the names and the inputs of a model that the script calls."""
        import torch

        if self._inside or torch._C._current_graph_task_id() != -1 or not torch.is_grad_enabled():
            return original(module, *args, **kwargs)
        self._inside = True
        try:
            parameters = dict(module.named_parameters())
            if parameters:
                self._note_names(module, parameters)
                self._note_inputs((args, kwargs))
                self._note_arithmetic(module)
            return original(module, *args, **kwargs)
        finally:
            self._inside = False

    def _note_names(self, model: Any, parameters: Any) -> None:
        if any(model is each for each in self._models):
            return
        self._models.append(model)
        taken = set(self._names.values())  # a generator and its discriminator may both have a 0.weight
        for name, parameter in parameters.items():
            own = f"{name} of model {len(self._models)}" if name in taken else name
            self._names.setdefault(id(parameter), own)

    def _note_inputs(self, passed: Any) -> None:
        import torch
        from torch.utils._pytree import tree_leaves

        from memfit.recording.model_input_digests import digest_tensor_rows

        tensors = [each for each in tree_leaves(passed) if isinstance(each, torch.Tensor) and each.ndim]
        self._inputs += map(digest_tensor_rows, tensors)

    def _note_arithmetic(self, model: Any) -> None:
        import torch

        parameters = list(model.parameters())
        kinds = {each.dtype for each in parameters if each.is_floating_point()}
        for device in {each.device.type for each in parameters}:
            if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
                kinds.add(torch.get_autocast_dtype(device))
            if device == "cuda" and _multiplies_in_tf32(model):
                kinds.discard(torch.float32)
                self._arithmetic.add("tf32")
        self._arithmetic |= {str(kind).removeprefix("torch.") for kind in kinds}

    def steps(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Collect the gradients of an update that is about to be made, after its closure if it has one."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._collect(optimizer)
            return None

        def evaluated() -> Any:
            loss = closure()
            self._collect(optimizer)
            return loss

        others = {name: value for name, value in kwargs.items() if name != "closure"}
        return (optimizer, evaluated, *args[2:]), others

    def _collect(self, optimizer: Any) -> None:
        if any(each is optimizer for each in self._stepped):  # another never makes an update
            self._end()
        self._stepped.append(optimizer)
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        for number, parameter in enumerate(parameters):
            gradient = parameter.grad if parameter.grad is not None else self._freed.get(id(parameter))
            if gradient is not None:
                name = self._names.get(id(parameter), f"parameter {number} of optimizer {len(self._stepped)}")
                self._save(name, gradient)
        if len(self._stepped) == len(self._optimizers):
            self._end()

    def _save(self, name: str, gradient: Any) -> None:
        import numpy as np
        import torch

        plain = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
        content = plain.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        np.save(self._folder / f"{len(self._gradients)}.npy", content)
        dtype = str(plain.dtype).removeprefix("torch.")
        self._gradients.append(SavedGradient(name, dtype, tuple(plain.shape)))

    def _end(self) -> None:
        import torch

        on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        _write(
            self._settings,
            FirstUpdate(
                tuple(self._gradients),
                tuple(self._inputs),
                max(self._arithmetic, key=_coarseness, default="float32"),
                torch.cuda.max_memory_allocated() if on_gpu else None,
                torch.cuda.get_device_name() if on_gpu else "CPU",
                str(torch.__version__),
            ),
        )
        raise FirstUpdateReached


def _coarseness(kind: str) -> int:
    return _FINEST_FIRST.index(kind) if kind in _FINEST_FIRST else len(_FINEST_FIRST)


def _multiplies_in_tf32(model: Any) -> bool:
    """Return whether a model in float32 multiplies in TF32 on a GPU; cuDNN's layers do by default.

    Source: torch/backends/cuda/__init__.py, torch/backends/cudnn/__init__.py, PyTorch 2.14.1.
    """
    import torch

    by_cudnn = (torch.nn.modules.conv._ConvNd, torch.nn.RNNBase)
    return torch.get_float32_matmul_precision() != "highest" or (
        torch.backends.cudnn.allow_tf32 and any(isinstance(each, by_cudnn) for each in model.modules())
    )
