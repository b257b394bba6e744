"""Round numbers as a tensor of a dtype does that holds them."""

import math
import struct

import torch

Number = bool | int | float


def round_to_dtype(value: Number, dtype: torch.dtype) -> Number | None:
    """Round a value to ``dtype``; None if it is out of range, or the dtype is complex.

    >>> (
    ...     round_to_dtype(0.1, torch.float16),
    ...     round_to_dtype(1e9, torch.float16),
    ...     round_to_dtype(3.0, torch.bool),
    ... )
    (0.0999755859375, inf, True)
    >>> round_to_dtype(300, torch.uint8) is None
    True
    """
    if dtype == torch.bool:
        return bool(value)
    if dtype.is_floating_point:
        return _rounded_float(float(value), dtype)
    if dtype.is_complex or not math.isfinite(value):
        return None
    limits = torch.iinfo(dtype)
    return int(value) if limits.min <= value <= limits.max else None


def _rounded_float(value: float, dtype: torch.dtype) -> float | None:
    if dtype == torch.float64 or not math.isfinite(value):
        return value
    try:
        if dtype == torch.float32:
            return float(struct.unpack("f", struct.pack("f", value))[0])
        if dtype == torch.float16:
            return float(struct.unpack("e", struct.pack("e", value))[0])
        if dtype == torch.bfloat16:  # the upper half of a float32, rounded to nearest, ties to even
            (bits,) = struct.unpack("I", struct.pack("f", value))
            bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
            return float(struct.unpack("f", struct.pack("I", bits))[0])
    except OverflowError:  # a finite value beyond the largest of the format
        return math.copysign(math.inf, value)
    return None  # the 8-bit and smaller formats
