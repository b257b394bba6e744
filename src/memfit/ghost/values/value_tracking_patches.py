"""Wrap functions of ``torch`` and ``torch.Tensor`` where only calls from Python matter.

    full  ones  zeros  *_like  new_*  fill_  zero_      record the value
    empty  empty_like  new_empty  ...                   record that the tensor is new
    mask[indices] = ...  scatter_                       count the elements that may have changed
    to  cpu  copy_  tolist  numpy  on_cpu[...] = ...    replace the values that arrive on the CPU
    data                                                follow the writes to it
    data_ptr  dlpack  storage  set_  swap_tensors       forget: autograd no longer sees all writes
    _fused_*_                                           forget: they write without incrementing versions
    + - * /  copy_  bincount  _foreach_*_  ...          follow small tensors by element (small_tensors.py)
    ProcessGroup.allreduce  allgather  ...              forget what they write (exchanged_sizes.py)
    CUDAGraph.replay                                    forget everything: it repeats the captured writes

PyTorch's C++ code fills and copies tensors, gradients among others, without calling these functions.
"""

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from memfit.dispatch_modes import without_dispatch_modes
from memfit.ghost.runtime_bindings import GhostRuntime
from memfit.ghost.values.assumed_values import AssumedValues
from memfit.ghost.values.computed_on_cpu import may_have_known_elements
from memfit.ghost.values.exchanged_sizes import track_exchanged_values
from memfit.ghost.values.known_values import KnownValues
from memfit.ghost.values.propagation_rules import union_of_known_indices
from memfit.ghost.values.small_tensors import (
    replace_torch_function,
    track_small_tensors,
)
from memfit.ghost.values.tensor_facts import (
    AwaitedElements,
    KnownElements,
    KnownValue,
    is_plain_tensor,
    known_value_of_number,
)
from memfit.patching.patches import Patch, call_before, wrapped

_SMALL = 1 << 16
"""The largest CPU copy, in elements, that is filled with its known value."""

_ZERO, _ONE = KnownValue(0), KnownValue(1)

_FACTORIES: dict[str, KnownValue | int | None] = {
    **dict.fromkeys(("empty", "empty_like", "empty_strided")),
    "full": 1,
    "full_like": 1,
    "ones": _ONE,
    "ones_like": _ONE,
    "zeros": _ZERO,
    "zeros_like": _ZERO,
}
_METHODS: dict[str, KnownValue | int | None] = {
    **dict.fromkeys(("new_empty", "new_empty_strided")),
    "new_full": 2,
    "new_ones": _ONE,
    "new_zeros": _ZERO,
    "fill_": 1,
    "zero_": _ZERO,
}
"""Name -> the result's value, None if it has none yet, or the position of that argument (``fill_value`` or
``value`` by keyword). A tensor without a value is recorded too: its storage may be at the address of one that
was exposed and freed."""

_FACTORY = Patch("torch", *_FACTORIES, why="know the values of new tensors")
_FILLING = Patch("torch._tensor:Tensor", *_METHODS, why="know the values of new and filled tensors")
_WRITING = Patch("torch._tensor:Tensor", "__setitem__", "scatter_", why="know values around few writes")
_COPYING = Patch(
    "torch._tensor:Tensor",
    *("to", "cpu", "cuda", "copy_", "__setitem__", "numpy", "tolist"),
    why="answer what a script copies to the CPU",
)
_DATA = Patch("torch._tensor:Tensor", "data", why="forget values that are written past autograd")
_DETACHING = Patch("torch._tensor:Tensor", "detach", why="know values through the alias that it makes")
_DEEP_COPYING = Patch("torch._tensor:Tensor", "__deepcopy__", why="know values of copies")
_TENSOR_CODE = torch._tensor.__file__
_EXPOSING = Patch(
    "torch._tensor:Tensor",
    *("data_ptr", "__dlpack__", "untyped_storage", "storage", "_typed_storage", "set_"),
    why="forget values whose memory is exposed",
)
_DLPACK = Patch("torch.utils.dlpack", "to_dlpack", also="torch", why="forget values whose memory is exposed")
_PRESERVING = Patch(
    "torch.autograd.grad_mode:_unsafe_preserve_version_counter", "__init__", why="forget values that it hides"
)
_GRAPH = Patch("torch.cuda.graphs:CUDAGraph", "replay", why="forget values that captured writes replace")
_SWAPPING = Patch("torch.utils", "swap_tensors", why="drop the references that it refuses")
_LAZY = Patch(
    "torch.nn.parameter:UninitializedTensorMixin",
    "_allowed_methods",
    why="move modules that do not know their sizes yet",
)
_FUSED = Patch("torch", "_fused_*_", why="forget values that are written past autograd")


def patch_torch_to_track_values(values: AssumedValues, ghost: GhostRuntime) -> None:
    """Wrap every function of the table above, for the life of the process."""
    for name, value in _FACTORIES.items():
        replace_torch_function(_FACTORY, name, partial(wrapped, around=partial(_record, values, value)))
    for name, value in _METHODS.items():
        _FILLING.wrap(name, partial(_record, values, value))
    _track_indexed_writes(values)

    def arrived(source: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        with without_dispatch_modes():
            return _arrived(values, ghost, source, copy)

    _answer_copies(arrived)
    _forget_exposed(values)
    _forget_uncounted(values)
    track_small_tensors(values)
    track_exchanged_values(values)
    _LAZY.install("_allowed_methods", _MethodsByName)


class _MethodsByName(list[Any]):
    """Methods that PyTorch looks for by identity: a wrapper, which has the name of a method, is the same."""

    def __contains__(self, method: object) -> bool:
        return getattr(method, "__name__", "") in {each.__name__ for each in self}


def _record(
    values: AssumedValues,
    value: KnownValue | int | None,
    function: Callable[..., Any],
    *args: Any,
    **options: Any,
) -> Any:
    """Call a function and record its result's value: ``value``, or the argument at that position."""
    result = function(*args, **options)
    if not torch.compiler.is_compiling() and is_plain_tensor(result) and result.is_cuda:
        known = _number_at(value, args, options) if isinstance(value, int) else value
        values.known.put(result, known, fresh=not function.__name__.endswith("_"))
    return result


def _number_at(position: int, args: tuple[object, ...], options: dict[str, object]) -> KnownValue | None:
    if len(args) > position:
        return known_value_of_number(args[position])
    return known_value_of_number(options.get("fill_value", options.get("value")))


def _track_indexed_writes(values: AssumedValues) -> None:
    """Keep the known value of a tensor that is written by index: it holds for all other elements."""

    def write(
        written: Callable[..., int | None],
        method: Callable[..., Any],
        self: torch.Tensor,
        *args: Any,
        **options: Any,
    ) -> Any:
        known = values.known.mostly(self) if is_plain_tensor(self) and self.is_cuda else None
        result = method(self, *args, **options)
        count = written(self, *args, **options) if known is not None else None
        if known is not None and count is not None and self not in values.known:
            at = args[0] if written is _selected and self.dim() == 1 else None
            new = values.known.selection(at) if isinstance(at, torch.Tensor) else None
            where = union_of_known_indices([(known.exceptions, known.selection), (count, new)])
            fact = known._replace(exceptions=known.exceptions + count, selection=where)
            values.known.put(self, fact)
        return result

    _WRITING.wrap("__setitem__", partial(write, _selected))
    _WRITING.wrap("scatter_", partial(write, _scattered))


def _scattered(_tensor: torch.Tensor, *args: Any, **options: Any) -> int:
    """Count the elements that ``scatter_(dim, index, ...)`` writes."""
    index = options["index"] if "index" in options else args[1 - ("dim" in options)]
    return int(index.numel())


def _selected(tensor: torch.Tensor, index: object, _value: object) -> int | None:
    """Count the elements that integer indices select from the first dimensions; None for any other index."""
    indices = index if isinstance(index, tuple) else (index,)
    shapes = []
    for part in indices:
        if isinstance(part, torch.Tensor) and part.dtype in (torch.int64, torch.int32):
            shapes.append(part.shape)
        elif not isinstance(part, int) or isinstance(part, bool):
            return None
    selected = math.prod(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    return selected * math.prod(tensor.shape[len(indices) :])


def _arrived(
    values: AssumedValues, ghost: GhostRuntime, source: torch.Tensor, copy: torch.Tensor
) -> torch.Tensor:
    """Propagate what is known to a copy, or put it into a copy on the CPU; return the copy.

    One element is answered as ``item()`` answers it.
    """
    if source.is_cpu:
        if may_have_known_elements(source):
            on_cpu = source.detach().to(copy.dtype, memory_format=torch.contiguous_format, copy=True)
            values.known.put(copy, KnownElements(on_cpu), fresh=True)
        return copy
    if copy.is_cuda:
        if copy is not source and (fact := _fact_of_copy(values, source, copy.dtype)) is not None:
            values.known.put(copy, fact, fresh=True)
        return copy
    elements = values.known.elements(source)
    known = values.known.get(source)
    if elements is not None and copy.is_cpu:
        copy.data.copy_(elements.values)  # bypasses autograd: the copy keeps its history
        values.note_elements(elements)
    elif copy.is_cpu and source.numel() and (known is not None or not ghost.last_read_known()):
        if source.numel() == 1 or (known is not None and source.numel() <= _SMALL):
            copy.data.fill_(values.answer(source, known))  # bypasses autograd: the copy keeps its history
        else:
            values.fill_copy(source, copy, known)
    return copy


def _fact_of_copy(
    values: AssumedValues, source: torch.Tensor, dtype: torch.dtype
) -> KnownValue | KnownElements | AwaitedElements | None:
    """Return what is known of a copy on the GPU; what another rank sends is not awaited."""
    awaited = values.known.awaited(source)
    if awaited is not None:
        return AwaitedElements(partial(_converted, awaited, dtype), awaited.depth)
    elements = values.known.elements(source)
    if elements is None:
        return values.known.mostly(source)
    return elements._replace(values=elements.values.to(dtype).contiguous())


def _converted(awaited: AwaitedElements, dtype: torch.dtype) -> KnownElements | None:
    had = awaited.have()
    return had and had._replace(values=had.values.to(dtype).contiguous())


def _answer_copies(arrived: Callable[..., torch.Tensor]) -> None:
    """Answer what a script copies to the CPU, or writes into tensors there."""

    def move(method: Callable[..., Any], self: torch.Tensor, *args: Any, **options: Any) -> Any:
        result = method(self, *args, **options)
        if self is result or not (is_plain_tensor(self) and is_plain_tensor(result)):
            return result
        return arrived(self, result) if self.is_cuda or result.is_cuda else result

    def copy(
        copy_: Callable[..., Any], self: torch.Tensor, src: torch.Tensor, *args: Any, **options: Any
    ) -> Any:
        result = copy_(self, src, *args, **options)
        from_ghost = self.is_cpu and isinstance(src, torch.Tensor) and src.is_cuda and is_plain_tensor(src)
        return arrived(src, result) if from_ghost and self.shape == src.shape else result

    def write(setitem: Callable[..., None], self: torch.Tensor, index: Any, value: Any) -> None:
        setitem(self, index, value)
        if self.is_cpu and isinstance(value, torch.Tensor) and value.is_cuda and is_plain_tensor(value):
            with torch.no_grad():
                arrived(value, self[index])

    for name in ("to", "cpu", "cuda"):
        _COPYING.wrap(name, move)
    _COPYING.wrap("copy_", copy)
    _COPYING.wrap("__setitem__", write)
    _COPYING.wrap("numpy", _to_array)
    _COPYING.wrap("tolist", _to_list)


def _to_array(numpy: Callable[..., Any], self: torch.Tensor, *, force: bool = False) -> Any:
    """Copy with ``cpu()`` first, as ``_to_list`` does."""
    return numpy(self.cpu() if force and is_plain_tensor(self) and self.is_cuda else self, force=force)


def _to_list(tolist: Callable[..., Any], self: torch.Tensor) -> Any:
    return tolist(self.cpu() if is_plain_tensor(self) and self.is_cuda else self)


def _forget_exposed(values: AssumedValues) -> None:
    """Forget tensors whose memory is exposed to writes that autograd does not count."""

    def expose(*given: object, **_: object) -> None:
        if sys._getframe(2).f_code.co_filename == _TENSOR_CODE:  # a copy or a file is made of it
            return
        for each in given:
            for part in each if isinstance(each, tuple | list) else (each,):
                if isinstance(part, torch.Tensor) and is_plain_tensor(part) and part.is_cuda:
                    values.known.expose(part)

    def release(t1: torch.Tensor, t2: torch.Tensor) -> None:
        values.known.release(t1)  # swap_tensors refuses tensors with weak references
        values.known.release(t2)

    _DATA.install("data", partial(_following, values, expose))
    _DEEP_COPYING.wrap("__deepcopy__", partial(_copy_deeply, values.known))
    for name in _DETACHING.names:
        _DETACHING.wrap(name, partial(_detach, values.known))
    for name in _EXPOSING.names:
        _EXPOSING.install(name, partial(call_before, expose))
    _DLPACK.install("to_dlpack", partial(call_before, expose))
    _PRESERVING.install("__init__", partial(call_before, expose))
    _GRAPH.install("replay", partial(call_before, lambda _: values.known.clear()))
    _SWAPPING.install("swap_tensors", partial(call_before, release))


def _copy_deeply(known: KnownValues, function: Callable[..., Any], tensor: torch.Tensor, memo: Any) -> Any:
    """Call ``__deepcopy__``: what is known of the tensor is known of its copy."""
    copy = function(tensor, memo)
    if is_plain_tensor(tensor) and tensor.is_cuda and is_plain_tensor(copy):
        with without_dispatch_modes():
            known.put(copy, known.elements(tensor) or known.get(tensor), fresh=True)
    return copy


def _detach(known: KnownValues, function: Callable[..., Any], tensor: torch.Tensor, **options: Any) -> Any:
    """Call ``detach``: what is known of the tensor outlives it in the result."""
    alias = function(tensor, **options)
    if not torch.compiler.is_compiling() and isinstance(tensor, torch.Tensor) and tensor.is_cuda:
        with without_dispatch_modes():
            known.keep_with_alias(tensor, alias)
    return alias


def _following(values: AssumedValues, expose: Callable[..., None], data: Any) -> property:
    """Return a property that follows what is written to ``Tensor.data``, and forgets what it is set to."""

    def get_data(self: torch.Tensor) -> torch.Tensor:
        alias: torch.Tensor = data.__get__(self)
        if is_plain_tensor(self) and self.is_cuda:
            with without_dispatch_modes():
                values.known.follow_alias(self, alias)
        return alias

    def set_data(self: torch.Tensor, other: torch.Tensor) -> None:
        expose(self, other)
        data.__set__(self, other)

    return property(get_data, set_data, doc=data.__doc__)


def _forget_uncounted(values: AssumedValues) -> None:
    """Forget what fused optimizers write, which does not increment versions."""

    def forgetting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        arguments = getattr(torch.ops.aten, name).default._schema.arguments
        written = [arg.alias_info is not None and arg.alias_info.is_write for arg in arguments]

        def forget(*args: object, **options: object) -> None:
            by_name = zip(written, (options.get(arg.name) for arg in arguments), strict=True)
            for is_written, given in (*zip(written, args, strict=False), *by_name):
                for tensor in given if is_written and isinstance(given, list | tuple) else ():
                    values.known.forget(tensor)

        return call_before(forget, function)

    for name in _FUSED.present():
        _FUSED.install(name, partial(forgetting, name))
