"""The script's process: ``main()`` with ``SETTINGS.json SCRIPT.py ARGS...`` as arguments.

It runs the script until each of its optimizers is about to make its first update, writes the gradients that
they get, and ends the script. Gradients are those of the backward: clipping is left out.
"""

import hashlib
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from memfit.ghost.patching.after_import import after_import
from memfit.run.script import end_of, run_as_main

_LISTING = "update.json"


class UpdateSettings(msgspec.Struct, frozen=True):
    """How to run a script until its first update: passed as JSON in a file."""

    folder: str
    """Receives the gradients."""
    module: bool
    """As in ``RunOptions``."""
    change: str
    """The file of an ``Intervention``; empty for none."""
    on_cpu: bool
    """Whether the CPU stands in for the GPU."""


class SavedGradient(msgspec.Struct, frozen=True):
    """The gradient of one parameter, in ``NUMBER.npy``, as bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class FirstUpdate(msgspec.Struct, frozen=True):
    """What a script's first update showed."""

    gradients: tuple[SavedGradient, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    """By tensor that the models were passed: a digest of each of its rows, over all calls."""
    arithmetic: str = ""
    peak: int | None = None
    device: str = "CPU"
    torch: str = ""
    failure: str = ""
    """Why there was no update."""


def read_update(folder: Path) -> FirstUpdate:
    """Read what a script's process wrote; a failure if that is nothing."""
    try:
        content = (folder / _LISTING).read_bytes()
    except FileNotFoundError:
        return FirstUpdate(failure="its process ended before the first update.")
    return msgspec.json.decode(content, type=FirstUpdate)


def main() -> None:
    """Run the script."""
    settings = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=UpdateSettings)
    command = tuple(sys.argv[2:])
    if settings.on_cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if settings.change:
        from memfit.strategies.inject_plan import install

        install(settings.change)
    after_import("torch", partial(_watch, settings))
    try:
        run_as_main(command, module=settings.module)
    except UpdateReached:
        return
    except BaseException as error:
        end = end_of(error)
        if end.reason == "interrupted":
            raise
        where = f" ({end.where})" if end.where else ""
        why = end.exception or f"exit code {end.exit_code}"
        _write(settings, FirstUpdate(failure=f"it ended with {why}{where}"))
        return
    if not (Path(settings.folder) / _LISTING).exists():
        _write(settings, FirstUpdate(failure="it ended before an optimizer made an update."))


class UpdateReached(BaseException):
    """Ends the script."""


def _write(settings: UpdateSettings, update: FirstUpdate) -> None:
    (Path(settings.folder) / _LISTING).write_bytes(msgspec.json.encode(update))


def _watch(settings: UpdateSettings) -> None:
    """Hook optimizers and models: torch has just been imported."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from memfit.recording.hooks import InstalledHooks

    hooks = InstalledHooks()
    if settings.on_cpu:
        from memfit.verification.cpu_stand_in import stand_in

        stand_in(hooks)
    watched = _Update(settings)
    hooks.wrap(torch.optim.Optimizer, "__init__", watched.created)
    hooks.wrap(torch.nn.Module, "__call__", watched.called)
    hooks.wrap(torch.nn.utils, "clip_grad_norm_", _norm)
    hooks.replace(torch.nn.utils, "clip_grad_value_", lambda *_args, **_kwargs: None)
    register_optimizer_step_pre_hook(watched.steps)


def _norm(original: Any, parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG001
    return original(parameters, float("inf"), *args, **kwargs)


class _Update:
    """Collects the gradients of each optimizer's first update."""

    def __init__(self, settings: UpdateSettings) -> None:
        self._settings = settings
        self._folder = Path(settings.folder)
        self._optimizers: list[Any] = []
        self._stepped: list[Any] = []
        self._names: dict[int, str] = {}
        self._taken: set[str] = set()
        self._gradients: list[SavedGradient] = []
        self._rows: list[list[str]] = []
        self._arithmetic: set[str] = set()
        self._inside = False

    def created(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Count an optimizer."""
        original(optimizer, *args, **kwargs)
        self._optimizers.append(optimizer)

    def called(self, original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Note the names and the inputs of a model that the script calls."""
        import torch

        if self._inside or torch._C._current_graph_task_id() != -1 or not torch.is_grad_enabled():
            return original(module, *args, **kwargs)
        self._inside = True
        try:
            parameters = dict(module.named_parameters())
            if parameters:
                for name, parameter in parameters.items():
                    self._names.setdefault(id(parameter), name)
                self._note_inputs((args, kwargs))
                self._note_arithmetic(parameters.values())
            return original(module, *args, **kwargs)
        finally:
            self._inside = False

    def _note_inputs(self, passed: Any) -> None:
        import torch
        from torch.utils._pytree import tree_leaves

        tensors = [each for each in tree_leaves(passed) if isinstance(each, torch.Tensor) and each.ndim]
        for number, tensor in enumerate(tensors):
            if number == len(self._rows):
                self._rows.append([])
            content = tensor.detach().cpu().contiguous()
            self._rows[number] += [_digest(row) for row in content]

    def _note_arithmetic(self, parameters: Any) -> None:
        import torch

        kinds = {each.dtype for each in parameters if each.is_floating_point()}
        for device in {each.device.type for each in parameters}:
            if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
                kinds.add(torch.get_autocast_dtype(device))
        self._arithmetic |= {str(kind).removeprefix("torch.") for kind in kinds}

    def steps(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Collect the gradients of an update that is about to be made, after its closure if it has one.

        Args:
            optimizer: the optimizer.
            args: of its ``step``, the optimizer first.
            kwargs: the same.
        """
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
            if parameter.grad is not None:
                self._save(self._unique_name(parameter, number), parameter.grad)
        if len(self._stepped) == len(self._optimizers):
            self._end()

    def _unique_name(self, parameter: Any, number: int) -> str:
        """Return a parameter's name; two models may use the same."""
        name = self._names.get(id(parameter), f"parameter {number}")
        if name in self._taken or id(parameter) not in self._names:
            name += f" of optimizer {len(self._stepped)}"
        self._taken.add(name)
        return name

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
                tuple(map(tuple, self._rows)),
                min(self._arithmetic, key=lambda kind: getattr(torch, kind).itemsize, default="float32"),
                torch.cuda.max_memory_allocated() if on_gpu else None,
                torch.cuda.get_device_name() if on_gpu else "CPU",
                str(torch.__version__),
            ),
        )
        raise UpdateReached


def _digest(row: Any) -> str:
    import torch

    return hashlib.sha256(row.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
