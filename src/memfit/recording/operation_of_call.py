"""Describe one call of an operation: its tensors, its work, and what its arguments say."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memfit.records import Operand, Operation

_SUM = 2
_WITHOUT_KERNEL = ("empty", "new_empty", "_unsafe_view", "_reshape_alias", "lift", "record_stream")
"""What the names of operations begin with that are no views, and run nothing on the GPU."""
_NOWHERE: dict[str, Any] = {
    "call": -1, "source": -1, "reads": (), "creates": (), "writes": (), "random": False, "seconds": 0.0,
    "allocated": 0,
}  # fmt: skip
"""The fields of a call of which neither module nor storages are known."""


def operation_of_call(operation: Any, args: Any, kwargs: Any, result: Any, **more: Any) -> Operation:
    """Return the record of a call.

    Args:
        operation: as PyTorch's dispatcher has it.
        args: its arguments.
        kwargs: its keyword arguments.
        result: what it returned.
        more: further fields of ``Operation``; what it launches is otherwise assumed to be one kernel.

    >>> args = torch.ones(2, 3), torch.ones(3, 4)
    >>> mm = torch.ops.aten.mm.default
    >>> record = operation_of_call(mm, args, {}, mm(*args))
    >>> record.flops, record.moved, record.results
    (48, 104, (Operand(shape=(2, 4), dtype='float32', layout=''),))
    """
    from torch.utils.flop_counter import flop_registry  # it imports Triton

    tensors = tensors_among(result)
    passed = tensors_among((args, kwargs))
    formula = flop_registry.get(operation._overloadpacket)
    is_on_gpu = any(each.is_cuda for each in (*passed, *tensors))
    operands, results = (
        tuple(_operand(part, is_on_gpu=is_on_gpu) for each in some for part in plain_tensors(each))
        for some in (passed, tensors)
    )
    fields: dict[str, Any] = _NOWHERE | {"launches": int(_runs_a_kernel(operation))} | more
    return Operation(
        **fields,
        name=str(operation),
        flops=formula(*args, **kwargs, out_val=result) if formula is not None else 0,
        moved=sum(each.numel() * each.element_size() for each in (*passed, *tensors)),
        dtype=_dtype(tensors[0]) if tensors else "",
        sums=_sums(operation, args, kwargs),
        factor=_factor(operation, args),
        mixed=_mixed_sizes(operation, args, kwargs),
        single=len(tensors) == 1 and tensors[0].numel() == 1,
        operands=operands,
        results=results,
        is_causal=_is_causal(operation, args, kwargs),
    )


def tensors_among(objects: Any) -> list[torch.Tensor]:
    """Return the tensors in nested objects."""
    return [each for each in tree_leaves(objects) if isinstance(each, torch.Tensor)]


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor, or those inside of a wrapper such as a DTensor."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, name)
            if isinstance(part, torch.Tensor):  # a DTensor has its device mesh among them
                yield from plain_tensors(part)
    elif tensor.layout is torch.strided:
        yield tensor


def _operand(tensor: torch.Tensor, *, is_on_gpu: bool) -> Operand:
    """Describe a tensor; the host's are special where the operation runs on the GPU, single numbers apart."""
    is_away = is_on_gpu and not tensor.is_cuda and tensor.ndim
    layout = "host" if is_away else layout_of_strides(tensor.shape, tensor.stride())
    return Operand(tuple(tensor.shape), _dtype(tensor), layout)


@functools.cache
def leaves_gpu_alone(name: str) -> bool:
    """Return whether an operation that is no view runs nothing on the GPU; views in place are among these.

    >>> [leaves_gpu_alone(name) for name in ("empty_like", "detach_", "record_stream", "add_")]
    [True, True, True, False]
    """
    packet = getattr(torch.ops.aten, name, None)
    tags = packet and getattr(packet, packet.overloads()[0]).tags
    return name.startswith(_WITHOUT_KERNEL) or torch.Tag.inplace_view in (tags or ())


@functools.cache
def _runs_a_kernel(operation: Any) -> bool:
    return not (operation.is_view or leaves_gpu_alone(operation._overloadpacket.__name__))


@functools.cache
def _name_of_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(tensor: torch.Tensor) -> str:
    return _name_of_dtype(tensor.dtype)


def layout_of_strides(shape: Sequence[int], strides: Sequence[int]) -> str:
    """Return the layout of a tensor, as in ``Operand``.

    >>> layout_of_strides([2, 3], [3, 1]), layout_of_strides([3, 2], [1, 3])
    ('', 'transposed')
    >>> layout_of_strides([2, 3], [0, 1]), layout_of_strides([2, 3], [6, 1])
    ('expanded', 'strided')
    """
    dimensions = [each for each in zip(shape, strides, strict=False) if each[0] > 1]
    if any(stride == 0 for _, stride in dimensions):
        return "expanded"
    if _are_dense(dimensions):
        return ""
    if _are_dense([*dimensions[:-2], *dimensions[:-3:-1]]):
        return "transposed"
    return "permuted" if _are_dense(sorted(dimensions, key=lambda each: -each[1])) else "strided"


def _are_dense(dimensions: Sequence[tuple[int, int]]) -> bool:
    """Return whether dimensions, as size and stride, are those of elements in order."""
    elements = 1
    for size, stride in reversed(dimensions):
        if stride != elements:
            return False
        elements *= size
    return True


def _is_causal(operation: Any, args: Any, kwargs: Any) -> bool:
    place = _place_of(operation, "is_causal")
    return place >= 0 and bool(args[place] if place < len(args) else kwargs.get("is_causal"))


def _sums(operation: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operation is a loss with ``reduction="sum"``, which is 2 for PyTorch's operations."""
    place = _place_of(operation, "reduction")
    given = args[place] if 0 <= place < len(args) else kwargs.get("reduction")
    return place >= 0 and given == _SUM


def _factor(operation: Any, args: Any) -> float:
    """Return the number by which an operation multiplies a tensor; 1 if it does not."""
    name = operation._overloadpacket.__name__.rstrip("_")
    number = next((each for each in args[1:2] if isinstance(each, int | float) and each), 1)
    return float(number) if name == "mul" else 1 / number if name == "div" else 1.0


@functools.cache
def _place_of(operation: Any, *names: str) -> int:
    """Return the position of an operation's first argument with one of some names; -1 if there is none."""
    arguments = operation._schema.arguments
    return next((place for place, argument in enumerate(arguments) if argument.name in names), -1)


_Sizes = Callable[[tuple[Any, ...]], tuple[int, ...]]


def _mixed_sizes(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the sizes along which an operation combines elements although its results keep them, if known.

    Where such a size depends on the batch, samples are combined: nn.Transformer attends along the first
    dimension by default, and so along the samples of a batch that comes first.

    >>> _mixed_sizes(torch.ops.aten._softmax.default, (torch.ones(3, 5), 1, False), {})
    (5,)
    """
    name = operation._overloadpacket.__name__
    if name not in _ALONG_DIMENSIONS:
        sizes = _SIZES.get(name)
        return () if sizes is None else sizes(args)
    place = _place_of(operation, "dim", "dims")
    if place < 0 or not args[0].ndim:
        return ()
    argument = operation._schema.arguments[place]
    given = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
    some = [given] if isinstance(given, int) else given or range(args[0].ndim)
    return tuple(args[0].shape[each] for each in some)


def _last_of(count: int) -> _Sizes:
    """Of operations over the last dimensions of a tensor."""
    return lambda args: tuple(args[0].shape[-count:])


def _attended(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Of query and key: (batch, heads, sequence, width)."""
    return (*args[0].shape[2:], args[1].shape[2])


def _attended_first(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Of query and key: (batch, sequence, heads, width)."""
    return (args[0].shape[1], args[1].shape[1])


_ALONG_DIMENSIONS = {
    *("_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"),
    *("sort", "argsort", "topk", "flip", "roll"),
}
_SIZES: dict[str, _Sizes] = {
    **dict.fromkeys(
        ("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"), _attended
    ),
    **dict.fromkeys(
        ("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable"), _attended
    ),
    "_scaled_dot_product_flash_attention_for_cpu": _attended,
    **dict.fromkeys(("_flash_attention_forward", "_efficient_attention_forward"), _attended_first),
    "convolution": lambda args: tuple(args[0].shape[1:]),
    "native_layer_norm": lambda args: tuple(args[1]),
    "_fused_rms_norm": lambda args: tuple(args[1]),
    "native_group_norm": lambda args: (args[4], args[5]),
    # Source: _cudnn_rnn and mkldnn_rnn_layer in aten/src/ATen/native/native_functions.yaml, PyTorch 2.14.1.
    "_cudnn_rnn": lambda args: (args[0].shape[int(bool(args[10]))],),
    "mkldnn_rnn_layer": lambda args: (args[0].shape[int(bool(args[14]))],),
    **dict.fromkeys(("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d"), _last_of(2)),
    **dict.fromkeys(("upsample_nearest2d", "upsample_bilinear2d"), _last_of(2)),
}
"""By other operations: the sizes, from their arguments."""
