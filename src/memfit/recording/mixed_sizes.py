"""The sizes along which an operation combines elements although its results keep them.

Where such a size depends on the batch, samples are combined: nn.Transformer attends along the first dimension
by default, and so along the samples of a batch that comes first.
"""

from collections.abc import Callable
from typing import Any

_Sizes = Callable[[tuple[Any, ...]], tuple[int, ...]]


def mixed_sizes(operation: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the sizes along which an operation combines elements, as far as ``_SIZES`` has it.

    Args:
        operation: as PyTorch dispatched it.
        args: of the operation.

    >>> import torch
    >>> mixed_sizes(torch.ops.aten._softmax.default, (torch.ones(3, 5), 1, False))
    (5,)
    """
    sizes = _SIZES.get(operation._overloadpacket.__name__)
    return () if sizes is None else sizes(args)


def _along(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Of operations with a dimension, or several, after the tensor."""
    tensor, *rest = args
    dimensions = next((each for each in rest if isinstance(each, int | list | tuple)), -1)
    some = [dimensions] if isinstance(dimensions, int) else dimensions
    return tuple(tensor.shape[each] for each in some) if tensor.ndim else ()


def _last_of(count: int) -> _Sizes:
    """Of operations over the last dimensions of a tensor."""
    return lambda args: tuple(args[0].shape[-count:])


def _attended(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Of query and key: (batch, heads, sequence, width)."""
    return (*args[0].shape[2:], args[1].shape[2])


def _attended_first(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Of query and key: (batch, sequence, heads, width)."""
    return (args[0].shape[1], args[1].shape[1])


_SIZES: dict[str, _Sizes] = {
    **dict.fromkeys(("_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp", "flip"), _along),
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
"""By operation: the sizes, from its arguments."""
