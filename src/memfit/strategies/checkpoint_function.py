"""A checkpointed call of a function: for code that is no module of its own.

A module's buffers and a generator's state must be restored for the recomputation, so memfit looks for the
modules and the ``torch.Generator`` objects that a function uses: in its closure, in the globals that it
names, in its arguments, and in the object whose method it is.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from memfit.errors import UsageError
from memfit.strategies.checkpointing import Checkpointing
from memfit.strategies.mechanisms.buffer_snapshots import BufferTracker
from memfit.strategies.mechanisms.recompute_forward import CheckpointedForward, RecomputeSettings

_TRACKERS: WeakKeyDictionary[CodeType, dict[tuple[type, ...], BufferTracker]] = WeakKeyDictionary()
"""What is known of the buffers that a function changes, by its code and the classes of its modules."""
_DEPTH = 3
"""Levels of containers that are searched."""


def checkpoint(
    function: Callable[..., Any], *args: Any, settings: Checkpointing | None = None, **kwargs: Any
) -> Any:
    """Call a function, drop its intermediate results, and compute them again in backward.

    As ``torch.utils.checkpoint.checkpoint`` with ``use_reentrant=False``; besides, modules' buffers change
    once, and the same random numbers are drawn again: those of the global generators (PyTorch's, Python's,
    NumPy's) and of the ``torch.Generator`` objects that the function uses. Arguments that the function
    changes in place are refused; tensors of its closure that it changes in place change twice.

    Args:
        function: any callable; modules and generators that it uses are found in its closure, its globals and
            its arguments.
        args: passed to the function, as ``kwargs`` are.
        settings: ``save_ops``, ``preserve_rng_state`` and ``check``; a function has no ``modules``.
        kwargs: passed to the function.

    Raises:
        UsageError: the function changes an argument, uses a module with buffers that memfit does not find,
            or the settings are those of a model.

    >>> layer = nn.Linear(2, 2)
    >>> x = torch.ones(3, 2, requires_grad=True)
    >>> checkpoint(lambda x: layer(x).relu(), x).sum().backward()
    >>> x.grad.shape
    torch.Size([3, 2])
    """
    settings = settings or Checkpointing()
    if settings.modules or settings.every != 1 or settings.use_reentrant:
        raise UsageError(
            "memfit.checkpoint checkpoints one call: the settings modules, every and use_reentrant are for "
            "memfit.apply and memfit.Engine."
        )
    name = getattr(function, "__qualname__", type(function).__name__)
    used = list(dict.fromkeys(_used_in((function, args, kwargs), _DEPTH)))
    region = _FunctionRegion(
        function,
        _Modules(each for each in used if isinstance(each, nn.Module)),
        RecomputeSettings(name, tuple(settings.save_ops), False, settings.preserve_rng_state, settings.check),
    )
    region.generators = tuple(each for each in used if isinstance(each, torch.Generator))
    return region(*args, **kwargs)


class _Modules(nn.Module):
    """The modules of a function, as parts of one; they are not registered, so nothing learns of it."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        super().__init__()
        self._modules = {str(index): part for index, part in enumerate(parts)}


class _FunctionRegion(CheckpointedForward):
    """A function in place of a module's forward; it holds the function's modules."""

    def __init__(self, function: Callable[..., Any], modules: _Modules, settings: RecomputeSettings) -> None:
        super().__init__(modules, settings, functools.partial(_run, function, modules, settings.name))
        self._held = modules
        code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
        if code is not None:
            kinds = tuple(map(type, modules.modules()))
            self.buffer_tracker = _TRACKERS.setdefault(code, {}).setdefault(kinds, self.buffer_tracker)


def _run(function: Callable[..., Any], known: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a function; refuse modules whose buffers would change twice."""
    if torch.compiler.is_compiling():
        return function(*args, **kwargs)
    found = set(known.modules())

    def expect_known(module: nn.Module, _inputs: Any) -> None:
        if module not in found and any(buffer is not None for buffer in module._buffers.values()):
            raise UsageError(
                f"memfit.checkpoint: {name} uses a {type(module).__name__} with buffers, which memfit did "
                "not find in its closure, its globals or its arguments. The recomputation would change these "
                "buffers again. Pass the module to the function as an argument."
            )

    hook = register_module_forward_pre_hook(expect_known)
    try:
        return function(*args, **kwargs)
    finally:
        hook.remove()


def _used_in(value: Any, depth: int) -> Iterator[nn.Module | torch.Generator]:
    """Yield the modules and generators that a value holds: a container's, a function's, an object's."""
    if isinstance(value, nn.Module | torch.Generator):
        yield value
        return
    if depth == 0 or isinstance(value, str | bytes | torch.Tensor | type):
        return
    held: Iterable[Any] = ()
    if isinstance(value, Mapping):
        held = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        held = value
    elif isinstance(value, functools.partial):
        held = (value.func, value.args, value.keywords)
    elif inspect.ismethod(value):
        held = (value.__self__, value.__func__)
    elif inspect.isfunction(value):
        held = _used_by(value)
    elif hasattr(value, "__dict__") and not inspect.ismodule(value):
        held = vars(value).values()
    for each in held:
        yield from _used_in(each, depth - (not inspect.isfunction(value)))


def _used_by(function: Any) -> Iterator[Any]:
    """Yield what a function can reach by name: closure, globals, defaults."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, nn.Module | torch.Generator | list | tuple | dict):
            yield value
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
