"""The sizes along which an operation combines elements although its results keep them.

Where such a size depends on the batch, samples are combined: nn.Transformer attends along the first dimension
by default, and so along the samples of a batch that comes first.
"""

from collections.abc import Callable, Mapping
from typing import Any

_Sizes = Callable[[tuple[Any, ...]], tuple[int, ...]]


def mixed_sizes(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the sizes along which an operation combines elements, as far as it is known.

    Args:
        operation: as PyTorch dispatched it.
        args: of the operation.
        kwargs: of the operation.

    >>> import torch
    >>> mixed_sizes(torch.ops.aten._softmax.default, (torch.ones(3, 5), 1, False), {})
    (5,)
    """
    name = operation._overloadpacket.__name__
    if name in _ALONG_DIMENSIONS:
        return _along(operation, args, kwargs)
    sizes = _SIZES.get(name)
    return () if sizes is None else sizes(args)


def _along(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Of operations with an argument for a dimension, or for several."""
    for place, argument in enumerate(operation._schema.arguments):
        if argument.name in ("dim", "dims"):
            given = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
            some = [given] if isinstance(given, int) else given or range(args[0].ndim)
            return tuple(args[0].shape[each] for each in some) if args[0].ndim else ()
    return ()


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
