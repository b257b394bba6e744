"""Small tensors on the GPU whose elements are known one by one: flags, sizes, counts, offsets.

    torch.tensor([3, 4], device="cuda")  to("cuda")       elements from the CPU
    bincount  histc  scatter_add_  one_hot(...).sum(0)    counts by class: as even as possible
    x + 1  x *= y  ...                                    computed on the CPU (``computed_on_cpu.py``)
    all_gather  all_reduce  ...                           what this rank sends (``exchanged_sizes.py``)

A script that sends tokens to experts on other ranks counts them by expert, exchanges the counts, copies them
to the CPU and allocates what it will receive. What it reads must add up, or its own collectives refuse it.
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.jit._builtins import _find_builtin, _register_builtin
from torch.utils._device import _device_constructors

from memfit.dispatch_modes import without_dispatch_modes
from memfit.ghost.values.assumed_values import AssumedValues
from memfit.ghost.values.computed_on_cpu import (
    compute_on_cpu,
    may_have_known_elements,
    put_elements,
    written_on_cpu,
)
from memfit.ghost.values.computed_ops import WITH_NUMBERS
from memfit.ghost.values.known_values import KnownValues
from memfit.ghost.values.propagation_rules import KnownInputs, pointwise_value
from memfit.ghost.values.tensor_facts import (
    KnownElements,
    KnownValue,
    TokenCountBasis,
    is_plain_tensor,
    tensor_storage_id,
)
from memfit.patching.patches import Patch, wrapped

_INTEGERS = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
_METHODS = Patch(
    "torch._tensor:Tensor",
    *(*WITH_NUMBERS, *(f"{name}_" for name in WITH_NUMBERS), "sum", "copy_", "fill_", "zero_", "__setitem__"),
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__rtruediv__", "__rfloordiv__"),
    *("__truediv__", "__floordiv__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__"),
    why="know sizes that a script computes",
)
_FUNCTIONS = Patch("torch", *WITH_NUMBERS, "sum", why="know sizes that a script computes")
"""Arithmetic and writes, computed on the CPU, too, if all tensors are known. Other ops: ``gpu_reads.py``."""
_CREATING = Patch(
    "torch",
    *("arange", "eye", "linspace", "logspace", "scalar_tensor", "tril_indices", "triu_indices"),
    why="know sizes that a script computes",
)
_LISTWISE = Patch("torch", "_foreach_*_", why="know sizes that a script computes")
_COUNTING_FUNCTIONS = Patch("torch", "bincount", "histc", why="count by class")
_COUNTING_METHODS = Patch("torch._tensor:Tensor", "bincount", "histc", "scatter_add_", why="count by class")
_ONE_HOT = Patch("torch.nn.functional", "one_hot", why="count by class")


def track_small_tensors(values: AssumedValues) -> None:
    """Follow the elements of small tensors through what a script calls, for the life of the process."""
    count, total = (_noting(note, values) for note in (_count, _count_by_column))
    for name in _METHODS.names:
        if name != "sum":
            _METHODS.wrap(name, partial(_compute, values))
    for name in _FUNCTIONS.names:
        if name != "sum":
            replace_torch_function(_FUNCTIONS, name, partial(wrapped, around=partial(_compute, values)))
    for name in _LISTWISE.present():
        _LISTWISE.wrap(name, partial(_write_lists, values.known))
    for name in _CREATING.names:
        replace_torch_function(_CREATING, name, _noting(_create, values))
    for name in ("bincount", "histc"):
        replace_torch_function(_COUNTING_FUNCTIONS, name, count)
        _COUNTING_METHODS.install(name, count)
    _COUNTING_METHODS.wrap("scatter_add_", partial(_add, values))
    _ONE_HOT.install("one_hot", _noting(_mark, values))
    _METHODS.install("sum", total)
    replace_torch_function(_FUNCTIONS, "sum", total)


def replace_torch_function(
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


def even_class_counts(total: int, like: torch.Tensor) -> torch.Tensor:
    """Return how often each class occurs, as evenly as possible, in the shape and dtype of ``like``.

    >>> even_class_counts(7, torch.empty(3, dtype=torch.int64)).tolist()
    [3, 2, 2]
    """
    classes = like.numel()
    counts = torch.full((classes,), total // classes, device="cpu")
    counts[: total % classes] += 1
    return counts.to(like.dtype).view(like.shape)


def _noting(note: Callable[..., None], values: AssumedValues) -> Callable[..., Any]:
    """Return a wrapper of functions that calls ``note(values, function, result, ...)``, unless compiled."""

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            result = function(*args, **options)
            if not torch.compiler.is_compiling() and result not in values.known:
                with without_dispatch_modes():
                    note(values, function, result, *args, **options)
            return result

        return call

    return noting


def _compute(values: AssumedValues, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function; compute its result, or what it writes, on the CPU, too, if its tensors are known."""
    tensors = [arg for arg in (*args, options.get("out")) if isinstance(arg, torch.Tensor)]
    if torch.compiler.is_compiling() or not any(arg.is_cuda for arg in tensors):
        return function(*args, **options)
    writes = _is_write(function.__name__)
    target = args[0] if writes else options.get("out")
    if target is not None and not target.is_cuda:
        return function(*args, **options)
    if not all(map(may_have_known_elements, tensors)):
        return _call_on_large(values.known, function, target, args, options)
    with without_dispatch_modes():
        written = target is not None and written_on_cpu(values.known, function, args, options, target)
        computed = compute_on_cpu(values.known, function, args, options) if target is None else ()
    result = function(*args, **options)
    with without_dispatch_modes():
        if written:
            values.known.put(*written)
        elif computed:
            put_elements(values.known, result, computed)
    return result


def _call_on_large(
    known: KnownValues, function: Callable[..., Any], target: torch.Tensor | None, args: Any, options: Any
) -> Any:
    """Call a function; its result has one value if its tensors have, and it is arithmetic."""
    is_arithmetic = (
        function.__name__ not in ("copy_", "fill_", "zero_", "__setitem__") and "out" not in options
    )
    fact = None
    if is_arithmetic and (target is None or known.is_whole(target)):
        fact = pointwise_value(function, KnownInputs(known), *args, **options)
    result = function(*args, **options)
    if fact is not None:
        known.put(result, fact, fresh=target is None)
    return result


def _write_lists(known: KnownValues, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call an op that writes to a list of tensors; compute what it writes to each that is small and known."""
    if torch.compiler.is_compiling() or not any(each in known for each in args[0]):
        return function(*args, **options)
    facts: dict[int, Any] = {}
    with without_dispatch_modes():
        for at, tensor in enumerate(args[0]):
            of_one = [each[at : at + 1] if isinstance(each, tuple | list) else each for each in args]
            written = written_on_cpu(known, function, of_one, options, tensor) if tensor in known else None
            facts[tensor_storage_id(tensor)] = written
            known.put(*(written or (tensor, None)))  # another in the list may be a view of the same tensor
    try:
        result = function(*args, **options)
    except BaseException:
        for tensor in args[0]:
            known.forget(tensor)
        raise
    for written in facts.values():
        if written is not None:
            known.put(*written)
    return result


def _create(
    values: AssumedValues,
    function: Callable[..., torch.Tensor],
    result: torch.Tensor,
    *args: Any,
    **options: Any,
) -> None:
    """Note the elements of a new tensor that follow from numbers."""
    if "out" not in options and _is_small_on_gpu(result):
        put_elements(
            values.known, result, compute_on_cpu(values.known, function, args, options, creates=True)
        )


def _is_write(name: str) -> bool:
    """Return whether a method writes to its tensor.

    >>> [_is_write(name) for name in ("add", "add_", "__add__", "__iadd__", "__setitem__")]
    [False, True, False, True, True]
    """
    return name.startswith(("__i", "__set")) or (name.endswith("_") and not name.endswith("__"))


def _is_small_on_gpu(tensor: torch.Tensor) -> bool:
    return is_plain_tensor(tensor) and tensor.is_cuda and may_have_known_elements(tensor)


def _count(
    values: AssumedValues, _function: object, result: torch.Tensor, *args: Any, **options: Any
) -> None:
    """Note what a function counted: the elements of a vector by class."""
    counted = args[0] if args else options["input"]
    if options.get("weights") is None and _is_small_on_gpu(result) and result.numel():
        values.known.put(
            result,
            KnownElements(even_class_counts(counted.numel(), result), TokenCountBasis.SENT),
            fresh=True,
        )


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
    if counts and _is_small_on_gpu(self) and self not in values.known:
        values.known.put(result, KnownElements(even_class_counts(index.numel(), self), TokenCountBasis.SENT))
    return result


def _mark(
    values: AssumedValues,
    function: Callable[..., Any],
    result: torch.Tensor,
    tensor: torch.Tensor,
    *args: Any,
    **options: Any,
) -> None:
    """Note a result of ``one_hot``: if its elements are unknown, one of each row is not zero."""
    if not is_plain_tensor(result) or not result.is_cuda:
        return
    is_small = may_have_known_elements(result)
    computed = compute_on_cpu(values.known, function, (tensor, *args), options) if is_small else ()
    if not computed or not put_elements(values.known, result, computed):
        values.known.put(result, KnownValue(0, exceptions=tensor.numel()), fresh=True)


def _count_by_column(
    values: AssumedValues, _function: object, result: torch.Tensor, *args: Any, **options: Any
) -> None:
    """Note a sum over the rows of a mask that is zero but for some elements: it counts those by column."""
    mask = args[0] if args else options["input"]
    if (
        not _is_small_on_gpu(result)
        or not is_plain_tensor(mask)
        or mask.dtype not in {torch.bool, *_INTEGERS}
    ):
        return
    known = values.known.mostly(mask) if mask.dim() > 1 and result.shape == mask.shape[-1:] else None
    if known is not None and not known.value and known.exceptions:
        counts = even_class_counts(known.exceptions, result)
        values.known.put(result, KnownElements(counts, TokenCountBasis.SENT), fresh=True)


def _value(values: AssumedValues, tensor: torch.Tensor) -> object:
    """Return the one value that all elements of a tensor on the GPU are known to have, or None."""
    known: KnownValue | None = (
        values.known.get(tensor) if is_plain_tensor(tensor) and tensor.is_cuda else None
    )
    return None if known is None else known.value
