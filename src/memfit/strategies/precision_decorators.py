"""Decorators for methods that must run in low or full precision where the rest of the model does not.

    class Head(nn.Module):
        @auto_fp16(apply_to=("features",))       # features in bf16, the operations under autocast
        def forward(self, features, boxes): ...

        @force_fp32(apply_to=("scores",))        # scores in float32, the operations too
        def loss(self, scores, labels): ...

Without ``Precision`` on the model both do nothing. With it they do what MMCV's decorators of these names do:
cast the tensors among the named arguments, in lists, tuples and dicts too, and switch autocast on or off for
the call. "fp16" in the names stands for the dtype that ``Precision`` chose. If the model itself has that
dtype (``autocast=False``), its parameters keep it in ``force_fp32`` too: PyTorch raises an error where
float32 tensors meet them.

Source: mmcv/runner/fp16_utils.py, 1.7.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast
from weakref import WeakSet

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from memfit.errors import UsageError

Method = TypeVar("Method", bound=Callable[..., Any])
LOW = (torch.bfloat16, torch.float16)

_MARK = "_memfit_precision"


def enable_fp16_decorators(model: nn.Module, dtype: torch.dtype, *, autocast: bool) -> Callable[[], None]:
    """Enable the decorators in a model and all its modules; return a function that disables them.

    The mark is an attribute of each module, a tuple of plain values: copies of the model have it, unpickling
    it does not need memfit, and ``state_dict`` leaves it out.
    """
    modules = WeakSet(model.modules())  # the undo must not keep the model alive
    for module in modules:
        vars(module)[_MARK] = (str(dtype).removeprefix("torch."), autocast)

    def unmark() -> None:
        for module in modules:
            vars(module).pop(_MARK, None)

    return unmark


def auto_fp16(apply_to: Iterable[str] = (), *, out_fp32: bool = False) -> Callable[[Method], Method]:
    """Run a module's method in low precision, if the model has ``Precision``.

    Args:
        apply_to: names of the arguments whose float32 tensors are cast; all arguments by default.
        out_fp32: whether low-precision tensors among the results are cast to float32.

    Raises:
        UsageError: on decoration: the function is not a method, is a generator, or lacks such an argument; on
            a call: the object is not a module.

    >>> class Head(nn.Module):
    ...     @auto_fp16(apply_to=("x",))
    ...     def forward(self, x):
    ...         return x.dtype
    >>> Head()(torch.ones(1))  # without Precision
    torch.float32
    """
    return _decorator("auto_fp16", apply_to, lowers=True, casts_back=out_fp32)


def force_fp32(apply_to: Iterable[str] = (), *, out_fp16: bool = False) -> Callable[[Method], Method]:
    """Run a module's method in float32, if the model has ``Precision``.

    Args:
        apply_to: names of the arguments whose low-precision tensors are cast to float32; all by default.
        out_fp16: whether float32 tensors among the results are cast to the low precision.

    Raises:
        UsageError: as for ``auto_fp16``.
    """
    return _decorator("force_fp32", apply_to, lowers=False, casts_back=out_fp16)


def _decorator(
    name: str, apply_to: Iterable[str], *, lowers: bool, casts_back: bool
) -> Callable[[Method], Method]:
    """Return a decorator that casts to low precision or to float32, and results back if ``casts_back``."""
    if callable(apply_to) or isinstance(apply_to, str | staticmethod | classmethod | property):
        raise UsageError(
            f"@{name} needs parentheses: @{name}() casts all arguments. To cast only some, name them: "
            f'@{name}(apply_to=("x", "y")).'
        )
    names = tuple(apply_to)

    def decorate(method: Method) -> Method:
        signature = _signature(name, method, names)

        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            module = args[0] if args else None
            if not isinstance(module, nn.Module):
                raise UsageError(
                    f"@{name} is for methods of torch.nn.Module, but {method.__qualname__} was called on an "
                    f"object of type {type(module).__name__}."
                )
            marked = vars(module).get(_MARK)
            if marked is None:
                return method(*args, **kwargs)
            dtype, autocast = marked
            low: torch.dtype = getattr(torch, dtype)
            here, there = ((torch.float32,), low) if lowers else (LOW, torch.float32)
            bound = signature.bind(*args, **kwargs)
            for argument in names or [*bound.arguments][1:]:
                if argument in bound.arguments:
                    bound.arguments[argument] = _cast(bound.arguments[argument], here, there)
            with _context(low, _device(module, bound.arguments), lowers=lowers, autocast=autocast):
                result = method(*bound.args, **bound.kwargs)
            if not casts_back:
                return result
            return _cast(result, LOW, torch.float32) if lowers else _cast(result, (torch.float32,), low)

        return cast("Method", run)

    return decorate


def _context(low: torch.dtype, device: str, *, lowers: bool, autocast: bool) -> AbstractContextManager[Any]:
    """Return the context of a decorated call."""
    if not lowers:
        return torch.autocast(device, enabled=False)
    return torch.autocast(device, dtype=low) if autocast else nullcontext()


def _signature(name: str, method: Any, names: tuple[str, ...]) -> inspect.Signature:
    """Return the signature of a method that can be decorated."""
    if not inspect.isfunction(method):
        raise UsageError(
            f"@{name} is for methods of torch.nn.Module, but was applied to a "
            f"{type(method).__name__}. If the method has other decorators, write @{name} below them."
        )
    if inspect.isgeneratorfunction(method) or inspect.iscoroutinefunction(method):
        raise UsageError(
            f"@{name}: {method.__qualname__} is a generator or a coroutine, whose body runs after the call. "
            "Decorate the functions that it calls."
        )
    signature = inspect.signature(method)
    known = [*signature.parameters][1:]
    for argument in names:
        if argument not in known:
            raise UsageError(
                f"@{name}: {method.__qualname__} has no argument {argument!r}. Its arguments are "
                f"{', '.join(known)}."
            )
    return signature


def _cast(value: Any, of: tuple[torch.dtype, ...], to: torch.dtype) -> Any:
    """Cast the tensors of some dtypes in a value, also inside lists, tuples and dicts."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(to) if tensor.dtype in of else tensor, value)


def _device(module: nn.Module, arguments: dict[str, Any]) -> str:
    """Return the device type of a call: its first tensor's, or else the module's first parameter's."""
    given = (leaf for leaf in tree_leaves([*arguments.values()][1:]) if isinstance(leaf, torch.Tensor))
    first = next(given, None)
    if first is None:
        first = next(module.parameters(), None)
    return "cpu" if first is None else first.device.type
