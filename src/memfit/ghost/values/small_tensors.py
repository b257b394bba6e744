"""Small tensors on the GPU whose elements are known one by one: sizes, counts, offsets.

    torch.tensor([3, 4], device="cuda")  to("cuda")       integers from the CPU
    bincount  histc  scatter_add_  one_hot(...).sum(0)    counts by class: as even as possible
    sum  cumsum  long  stack  ...                         computed on the CPU, from known elements
    all_gather  all_to_all_single  ...                    what this rank sends (``exchanged_sizes.py``)

A script that sends tokens to experts on other ranks counts them by expert, exchanges the counts, copies them
to the CPU and allocates what it will receive. What it reads must add up, or its own collectives refuse it.
"""

import functools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.jit._builtins import _find_builtin, _register_builtin
from torch.utils._device import _device_constructors

from memfit.dispatch_modes import without_dispatch_modes
from memfit.ghost.values.assumed_values import AssumedValues
from memfit.ghost.values.known_values import Basis, Elements, Known, Routing, is_plain, storage_id
from memfit.patching.patches import Patch

_SMALL = 4096
"""The largest tensor, in elements, whose elements are kept."""
_INTEGERS = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
_METHODS = Patch(
    "torch._tensor:Tensor",
    *("sum", "cumsum", "max", "amax", "long", "int", "float", "double", "clone", "contiguous", "type"),
    *("reshape", "flatten", "index_select", "add", "sub", "mul"),
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__floordiv__", "__mod__"),
    why="know sizes that a script computes",
)
_FUNCTIONS = Patch(
    "torch",
    *("sum", "cumsum", "max", "amax", "stack", "cat", "flatten", "reshape"),
    why="know sizes that a script computes",
)
"""Methods and functions that are computed on the CPU, too, if all their tensors are known."""
_COUNTING_FUNCTIONS = Patch("torch", "bincount", "histc", why="count by class")
_COUNTING_METHODS = Patch("torch._tensor:Tensor", "bincount", "histc", "scatter_add_", why="count by class")
_ONE_HOT = Patch("torch.nn.functional", "one_hot", why="count by class")


def follow_small_tensors(values: AssumedValues) -> None:
    """Follow the elements of small tensors through what a script calls, for the life of the process."""
    follow, count, total = (_noting(note, values) for note in (_follow, _count, _count_by_column))
    for name in _METHODS.names:
        _METHODS.install(name, follow)
    for name in _FUNCTIONS.names:
        replace_function(_FUNCTIONS, name, follow)
    for name in ("bincount", "histc"):
        replace_function(_COUNTING_FUNCTIONS, name, count)
        _COUNTING_METHODS.install(name, count)
    _COUNTING_METHODS.wrap("scatter_add_", partial(_add, values))
    _ONE_HOT.install("one_hot", _noting(_mark, values))
    _METHODS.install("sum", total)
    replace_function(_FUNCTIONS, "sum", total)


def replace_function(
    patch: Patch, name: str, replacement: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Replace a function of ``torch``, also where PyTorch identifies functions by identity.

    ``torch.jit.script`` and ``torch.set_default_device`` have their own tables of functions.
    """

    def registered(original: Callable[..., Any]) -> Callable[..., Any]:
        wrapper = replacement(original)
        _register_builtin(wrapper, _find_builtin(original))  # type: ignore[no-untyped-call]
        if original in _device_constructors():
            _device_constructors().add(wrapper)
        return wrapper

    patch.install(name, registered)


def is_small_integer(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor may be sizes."""
    return tensor.numel() <= _SMALL and tensor.dtype in _INTEGERS


def even_counts(total: int, like: torch.Tensor) -> torch.Tensor:
    """Return how often each class occurs, as evenly as possible, in the shape and dtype of ``like``.

    >>> even_counts(7, torch.empty(3, dtype=torch.int64)).tolist()
    [3, 2, 2]
    """
    classes = like.numel()
    counts = torch.full((classes,), total // classes, device="cpu")
    counts[: total % classes] += 1
    return counts.to(like.dtype).view(like.shape)


def _known(values: AssumedValues, tensor: torch.Tensor) -> Elements | None:
    """Return the elements of a tensor, or None."""
    if tensor.is_cpu:
        return Elements(tensor) if is_small_integer(tensor) else None
    if not is_plain(tensor) or not tensor.is_cuda:
        return None
    found = values.known.elements(tensor)
    if found is not None or not is_small_integer(tensor):
        return found
    known = values.known.get(tensor)
    if known is None or known.basis is not Basis.FILLED:
        return None
    return Elements(torch.full(tensor.shape, int(known.value), dtype=tensor.dtype, device="cpu"))


def _noting(note: Callable[..., None], values: AssumedValues) -> Callable[..., Any]:
    """Return a wrapper of functions that calls ``note(values, function, result, ...)``, unless compiled."""

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            result = function(*args, **options)
            if not torch.compiler.is_compiling():
                with without_dispatch_modes():
                    note(values, function, result, *args, **options)
            return result

        return call

    return noting


def _follow(
    values: AssumedValues, function: Callable[..., Any], result: object, *args: Any, **options: Any
) -> None:
    """Compute a result on the CPU, too, if at least one tensor's elements are known."""
    if not values.known.holds_elements:
        return
    results = _tensors(result)
    if not results or any(not _is_small_on_gpu(each) for each in results):
        return
    routings: list[Routing] = []
    on_cpu = [_on_cpu(values, argument, routings) for argument in args]
    named = {name: _on_cpu(values, argument, routings) for name, argument in options.items()}
    if not routings or any(each is _UNKNOWN for each in (*on_cpu, *named.values())):
        return
    with torch.no_grad():
        computed = function(*on_cpu, **named)
    given = {storage_id(each) for each in _tensors((*args, *options.values()))}
    for on_gpu, known in zip(results, _tensors(computed), strict=True):
        if values.known.elements(on_gpu) is None:
            fact = Elements(known.contiguous(), max(routings))
            values.known.put(on_gpu, fact, fresh=storage_id(on_gpu) not in given)  # no view


def _is_small_on_gpu(tensor: torch.Tensor) -> bool:
    return is_plain(tensor) and tensor.is_cuda and tensor.numel() <= _SMALL


_UNKNOWN = object()


def _on_cpu(values: AssumedValues, argument: Any, routings: list[Routing]) -> Any:
    """Return an argument with tensors on the CPU, or ``_UNKNOWN``; note the routing of those on the GPU."""
    if isinstance(argument, list | tuple) and any(isinstance(each, torch.Tensor) for each in argument):
        parts = [_on_cpu(values, each, routings) for each in argument]
        return _UNKNOWN if any(part is _UNKNOWN for part in parts) else parts
    if not isinstance(argument, torch.Tensor):
        return argument
    known = _known(values, argument)
    if known is None:
        return _UNKNOWN
    if argument.is_cuda and values.known.elements(argument) is not None:
        routings.append(known.routing)
    return known.values


def _tensors(result: object) -> Iterable[torch.Tensor]:
    """Return the tensors of a result."""
    parts = result if isinstance(result, tuple | list) else (result,)
    return [part for part in parts if isinstance(part, torch.Tensor)]


def _count(
    values: AssumedValues, _function: object, result: torch.Tensor, *args: Any, **options: Any
) -> None:
    """Note what a function counted: the elements of a vector by class."""
    counted = args[0] if args else options["input"]
    if options.get("weights") is None and _is_small_on_gpu(result) and result.numel():
        values.known.put(result, Elements(even_counts(counted.numel(), result), Routing.SENT), fresh=True)


def _add(
    values: AssumedValues,
    function: Callable[..., torch.Tensor],
    self: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    src: torch.Tensor,
) -> torch.Tensor:
    """Call ``scatter_add_``: ones added to a vector of zeros count the indices."""
    if torch.compiler.is_compiling():
        return function(self, dim, index, src)
    counts = self.dim() == 1 and _value(values, self) == 0 and _value(values, src) == 1
    result = function(self, dim, index, src)
    if counts and _is_small_on_gpu(self):
        values.known.put(result, Elements(even_counts(index.numel(), self), Routing.SENT))
    return result


def _mark(
    values: AssumedValues,
    _function: object,
    result: torch.Tensor,
    tensor: torch.Tensor,
    *_: object,
    **__: object,
) -> None:
    """Note a result of ``one_hot``: of each row, one element is not zero."""
    if is_plain(result) and result.is_cuda:
        values.known.put(result, Known(0, exceptions=tensor.numel()), fresh=True)


def _count_by_column(
    values: AssumedValues, _function: object, result: torch.Tensor, *args: Any, **options: Any
) -> None:
    """Note a sum over the rows of a mask that is zero but for some elements: it counts those by column."""
    mask = args[0] if args else options["input"]
    if not _is_small_on_gpu(result) or not is_plain(mask) or mask.dtype not in {torch.bool, *_INTEGERS}:
        return
    known = values.known.mostly(mask) if mask.dim() > 1 and result.shape == mask.shape[-1:] else None
    if known is not None and not known.value and known.exceptions:
        counts = even_counts(known.exceptions, result)
        values.known.put(result, Elements(counts, Routing.SENT), fresh=True)


def _value(values: AssumedValues, tensor: torch.Tensor) -> object:
    """Return the one value that all elements of a tensor on the GPU are known to have, or None."""
    known: Known | None = values.known.get(tensor) if is_plain(tensor) and tensor.is_cuda else None
    return None if known is None else known.value
