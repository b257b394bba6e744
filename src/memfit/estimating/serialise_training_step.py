"""Serialise a live model for the ghost's process: everything but the contents of its tensors.

The user's objects are read, never changed. Classes and functions that the other process cannot import
(from a notebook, or from the script itself) are sent as code by cloudpickle. An object that cannot be sent is
named in the error.
"""

import importlib
import inspect
import io
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from memfit.errors import NotSentError, UsageError
from memfit.estimating.tensor_pickling import StorageCopy, describe_tensor_for_pickle, why_tensor_not_copyable
from memfit.recording.optimizer_accessors import parameters_of

_FAILURES = (pickle.PicklingError, TypeError, AttributeError, RuntimeError, ValueError, OSError, ImportError)
"""Exceptions of objects that cannot be pickled."""


_NO_LOSS = (
    "No loss was given: memfit uses the loss in the model's output or, without one, the sum of the model's "
    "outputs."
)
_DETACHED = "A tensor that the model keeps from an earlier computation was copied without its autograd graph."
_WITH_TARGET = 2
_NO_FILE = "<dynamic-code>"
"""What cloudpickle names the file of every code object, from 3.1.3 on; errors are to name the user's."""
_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class OptimizerCopy:
    """An optimizer without its state: its class, the settings passed to the class, and its parameter groups.

    A copy starts like a new optimizer.
    """

    kind: type[Optimizer]
    defaults: dict[str, Any]
    groups: list[dict[str, Any]]
    others: dict[str, Any]
    """Attributes that its class adds to those of every optimizer."""

    @classmethod
    def of(cls, optimizer: Optimizer) -> "OptimizerCopy":
        """Describe a live optimizer without changing it."""
        common = vars(Optimizer([torch.nn.Parameter(torch.empty(0))], {}))
        # A learning rate scheduler sets a ``step`` of its own on the object.
        others = {key: value for key, value in vars(optimizer).items() if key not in {*common, "step"}}
        return cls(type(optimizer), optimizer.defaults, optimizer.param_groups, others)

    def make(self) -> Optimizer:
        """Recreate the optimizer on the parameters at their present location."""
        takes = inspect.signature(self.kind).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
        if takes_any or self.defaults.keys() <= takes.keys():
            made = self.kind(self.groups, **self.defaults)
        else:  # its defaults are not arguments of its class: recreate it as unpickling does, without state
            made = self.kind.__new__(self.kind)
            Optimizer.__init__(made, self.groups, self.defaults)
        made.__dict__.update(self.others)
        return made


@dataclass(frozen=True)
class TrainingStep:
    """The parts of one training step, and the settings around it that affect memory."""

    model: torch.nn.Module
    inputs: Any
    loss: Any
    """``loss(model, inputs)``, a criterion (a module) for ``(inputs, target)``, or None."""
    optimizer: Any
    """An ``OptimizerCopy``, a function of parameters that makes one, or None."""
    steps: int
    autocast: bool
    flags: dict[str, Any]


class _NotCopyableError(pickle.PicklingError):
    """An object that pickle accepts but would recreate differently."""


class _ModelPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles tensors without their contents, and collects every module it meets."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.roots: list[torch.nn.Module] = []
        """Modules that no other module contains, the model first."""
        self.detached = False
        """Whether a tensor was copied without its autograd graph."""
        self._seen: set[int] = set()
        # Parameters and buffers: created on the CPU, then moved with their module.
        self._moved: set[int] = set()
        self._copies: dict[int, StorageCopy] = {}

    def reducer_override(self, obj: Any) -> Any:
        """Return how to recreate an object that pickle alone would not recreate correctly."""
        if isinstance(obj, torch.Tensor):
            return self._tensor(obj)
        if isinstance(obj, torch.nn.Module):
            return self._module(obj)
        if isinstance(obj, Optimizer):
            return OptimizerCopy.make, (OptimizerCopy.of(obj),)
        if isinstance(obj, types.CodeType) and obj.co_filename != _NO_FILE:
            return _code_in_file, (obj.co_filename, obj.replace(co_filename=_NO_FILE))
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
            return importlib.import_module, (obj.__name__,)  # torch.backends.cudnn and lazily loaded modules
        return super().reducer_override(obj)

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if reason := why_tensor_not_copyable(tensor):
            raise _NotCopyableError(reason)
        self.detached |= not tensor.is_leaf
        return describe_tensor_for_pickle(
            tensor, self._copies, on_gpu=tensor.is_cuda and id(tensor) not in self._moved
        )

    def _module(self, module: torch.nn.Module) -> Any:
        if id(module) not in self._seen:
            self.roots.append(module)
            for part in module.modules():
                self._seen.add(id(part))
                self._moved.update(map(id, (*part._parameters.values(), *part._buffers.values())))
        if getattr(module, "_compiled_call_impl", None) is not None:
            raise _NotCopyableError(
                "the module was compiled in place by module.compile(); pass torch.compile(model) instead"
            )
        if parametrize.is_parametrized(module):
            (original,) = type(module).__bases__
            return _empty_object, (original,), vars(module), None, None, _set_parametrized
        return NotImplemented


def _code_in_file(file: str, code: types.CodeType) -> types.CodeType:
    return code.replace(co_filename=file)


@dataclass(frozen=True, slots=True)
class SerialisedModel:
    """A model and its training step, serialised."""

    data: bytes
    """What ``deserialise_training_step`` reads."""
    name: str
    """Name of the estimate in its summary."""
    notes: tuple[str, ...]
    """Assumptions made, each a sentence for the summary."""
    calls_loss: bool
    """Whether the loss is a function of ``(model, inputs)``."""


def collect_training_step(
    model: torch.nn.Module, inputs: Any, loss: Any, optimizer: Any, steps: int
) -> TrainingStep:
    """Combine the arguments of ``estimate`` with the values of PyTorch's switches."""
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"estimate takes a torch.nn.Module, not {type(model).__name__}.")
    for name, value in (("loss", loss), ("optimizer", optimizer)):
        if not (value is None or callable(value) or isinstance(value, Optimizer)):
            raise UsageError(
                f"{name}={value!r} is not callable. help(memfit.estimate) lists the accepted values."
            )
    if isinstance(loss, type):
        raise UsageError(f"loss={loss.__name__} is a class. Pass an instance: loss={loss.__name__}().")
    _check_optimizer(model, optimizer)
    if isinstance(loss, torch.nn.Module) and not (isinstance(inputs, tuple) and len(inputs) == _WITH_TARGET):
        raise UsageError(
            f"The loss {type(loss).__name__} needs a target. Pass inputs=(model_inputs, target)."
        )
    return TrainingStep(
        model=model,
        inputs=inputs,
        loss=loss,
        optimizer=OptimizerCopy.of(optimizer) if isinstance(optimizer, Optimizer) else optimizer,
        steps=steps,
        autocast=torch.is_autocast_enabled("cuda"),
        flags=torch_backend_flags(),
    )


def _check_optimizer(model: torch.nn.Module, optimizer: Any) -> None:
    """Refuse an optimizer that ``training_loop.py`` cannot step, or that belongs to another model."""
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    if issubclass(kind, Optimizer) and not _steps_without_closure(kind):
        raise UsageError(
            f"{kind.__name__}.step() needs a closure that repeats the forward and backward passes. "
            "memfit.estimate has no such closure. Measure the script itself: memfit dry-run train.py."
        )
    if not isinstance(optimizer, Optimizer):
        return
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if trained and trained.isdisjoint(map(id, parameters_of(optimizer))):
        raise UsageError(
            f"The {kind.__name__} holds none of the parameters of this {type(model).__name__}. It was "
            "created for another model, or the model was recreated afterwards. Create the optimizer from "
            "model.parameters()."
        )


def _steps_without_closure(kind: type[Optimizer]) -> bool:
    """Return whether an optimizer's ``step()`` needs no argument; that of LBFGS needs a closure."""
    _, *takes = inspect.signature(kind.step).parameters.values()
    return all(each.default is not each.empty or each.kind in _ANY_NUMBER for each in takes)


def serialise_training_step(step: TrainingStep) -> SerialisedModel:
    """Serialise a training step.

    Raises:
        NotSentError: an object cannot be sent; the message names its path, its type, and the reason.
    """
    file = io.BytesIO()
    pickle.dump(sys.path, file)  # first: the rest is imported along it
    pickler = _ModelPickler(file)
    try:
        pickler.dump(step)
        pickler.dump(pickler.roots)
    except (*_FAILURES, RecursionError):
        where, culprit, why = _culprit(step)
        raise NotSentError(
            f"Cannot send {where} (type {_type_name(culprit)}) to the ghost's process: {why}. Change this "
            "object, remove it from the model, or measure the script itself: memfit dry-run train.py."
        ) from None
    assumed = {_NO_LOSS: step.loss is None and step.optimizer is not None, _DETACHED: pickler.detached}
    notes = tuple(note for note, applies in assumed.items() if applies)
    calls_loss = step.loss is not None and not isinstance(step.loss, torch.nn.Module)
    return SerialisedModel(
        file.getvalue(), f"memfit.estimate({type(step.model).__name__})", notes, calls_loss
    )


def deserialise_training_step(data: bytes) -> tuple[TrainingStep, list[torch.nn.Module]]:
    """Recreate a training step, and the modules that no other contains. Their tensors are on the CPU."""
    file = io.BytesIO(data)
    sys.path[:] = pickle.load(file)  # noqa: S301 - written by the process that started this one
    unpickler = pickle.Unpickler(file)  # noqa: S301
    step: TrainingStep = unpickler.load()
    roots: list[torch.nn.Module] = unpickler.load()
    return step, roots


def _empty_object(kind: type[torch.nn.Module]) -> torch.nn.Module:
    return kind.__new__(kind)


def _set_parametrized(module: torch.nn.Module, state: dict[str, Any]) -> None:
    module.__dict__.update(state)
    parametrize._inject_new_class(module)
    for name in module.parametrizations:  # type: ignore[union-attr]
        parametrize._inject_property(module, name)


# -- objects that cannot be sent -----------------------------------------------------------------------


def _culprit(step: TrainingStep) -> tuple[str, object, str]:
    """Find the innermost object that cannot be pickled; return its path, the object, and the reason."""
    found: object = step
    path, why = "", _failure(step)
    seen = {id(step)}
    while True:
        for name, part in _parts(found):
            if id(part) in seen:
                continue
            seen.add(id(part))
            if reason := _failure(part):
                path, found, why = (path + name), part, reason
                break
        else:
            return path, found, why


def _failure(part: object) -> str:
    try:
        _ModelPickler(io.BytesIO()).dump(part)
    except RecursionError:
        return "it is nested too deeply"
    except _FAILURES as error:
        return str(error).rstrip(".") or type(error).__name__
    return ""


def _parts(whole: object) -> Iterator[tuple[str, object]]:
    """Yield the parts of an object, each with the Python expression that reaches it from there."""
    match whole:
        case TrainingStep():
            yield from vars(whole).items()
        case torch.nn.Module():
            tables = (whole._modules, whole._parameters, whole._buffers)
            yield from ((f".{name}", part) for table in tables for name, part in table.items())
            # nn.Module does not pickle the last of these.
            skipped = {"_modules", "_parameters", "_buffers", "_compiled_call_impl"}
            yield from ((f".{name}", value) for name, value in vars(whole).items() if name not in skipped)
        case dict():
            yield from ((f"[{key!r}]", value) for key, value in whole.items())
        case list() | tuple():
            yield from ((f"[{index}]", value) for index, value in enumerate(whole))
        case types.MethodType():
            yield ".__self__", whole.__self__
            yield ".__func__", whole.__func__
        case types.FunctionType():
            found = inspect.getclosurevars(whole)
            yield from ((f" -> {name}", part) for name, part in {**found.nonlocals, **found.globals}.items())
        case torch.Tensor():
            return
        case _ if hasattr(whole, "__dict__") and not isinstance(whole, type):
            yield from ((f".{name}", value) for name, value in vars(whole).items())


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


_cuda, _cudnn = torch.backends.cuda, torch.backends.cudnn
_SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "deterministic": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "flash attention": (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    "efficient attention": (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    "math attention": (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    "cuDNN attention": (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
    "cuDNN": (lambda: _cudnn.enabled, lambda value: setattr(_cudnn, "enabled", value)),
    "cuDNN benchmark": (lambda: _cudnn.benchmark, lambda value: setattr(_cudnn, "benchmark", value)),
    "cuDNN determinism": (
        lambda: _cudnn.deterministic,
        lambda value: setattr(_cudnn, "deterministic", value),
    ),
    "autocast dtype": (
        lambda: torch.get_autocast_dtype("cuda"),
        lambda value: torch.set_autocast_dtype("cuda", value),
    ),
    "autocast cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
}
"""Name -> functions that read and set the switch."""


def torch_backend_flags() -> dict[str, Any]:
    """Return the values of the switches in this process."""
    return {name: read() for name, (read, _) in _SWITCHES.items()}


def set_torch_backend_flags(values: Mapping[str, Any]) -> None:
    """Set the switches to values that ``torch_backend_flags`` returned in another process."""
    for name, value in values.items():
        read, write = _SWITCHES[name]
        if read() != value:
            write(value)
