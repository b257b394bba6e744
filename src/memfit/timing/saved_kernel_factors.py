"""What ``memfit doctor --time`` measured of this machine's card: kept, and how it corrects fitted times.

    TimedKernel     measured seconds / predicted seconds, of each kernel
         |  the median of a kind
    KernelFactor    by which all kernels of that kind take longer; how far the others were from it

Measurements are kept, and not factors: when memfit's coefficients change, so do the factors.
"""

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import msgspec

from memfit.devices import Device
from memfit.errors import FileFormatError
from memfit.input_files import read_input_file
from memfit.native_build import cache_folder
from memfit.records import KernelMeasurement
from memfit.timing.kernel_times import KernelFactor, KernelTimes

_KIND = "kernel-times"
_MAX_FILE = 1 << 20  # bytes; a measurement takes some ten thousand
_LEAST_SPREAD = 0.05
"""Of kernels whose kind was measured: theirs are of other sizes. Assumed."""
_QUANTILE = 0.9


def kernel_times_file(card: str, torch_version: str) -> Path:
    """Return where the measurement of a card with a version of torch is kept.

    Args:
        card: its name in ``devices.toml``.
        torch_version: as ``torch.__version__``.
    """
    name = re.sub(r"[^\w.+]+", "_", f"{card}-{torch_version}")
    return cache_folder(_KIND) / f"{name}.json"


def saved_kernel_factors(device: Device, torch_version: str) -> Mapping[str, KernelFactor]:
    """Return the factors by kind, as measured on this machine; empty without a measurement.

    Args:
        device: a whole card. A measurement of the card never applies to a slice of it.
        torch_version: as ``torch.__version__``.
    """
    try:
        content = read_input_file(kernel_times_file(device.name, torch_version), _MAX_FILE)
        return kernel_factors(msgspec.json.decode(content, type=KernelMeasurement), device)
    except (FileFormatError, msgspec.DecodeError):
        return {}


def kernel_factors(measurement: KernelMeasurement, device: Device) -> dict[str, KernelFactor]:
    """Return by kind how much longer kernels took than memfit predicts for a card.

    What runs several kernels counts for the kind that should take longest.
    """
    times = {tf32: KernelTimes(device, tf32=tf32) for tf32 in (False, True)}
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    for kernel in measurement.kernels:
        parts = [times[kernel.tf32].of(operation) for operation in kernel.operations]
        predicted = sum(part.seconds for part in parts)
        if predicted:
            ratios[max(parts, key=lambda part: part.seconds).kind].append(kernel.seconds / predicted)
    return {kind: _factor(some) for kind, some in ratios.items()}


def _factor(ratios: list[float]) -> KernelFactor:
    median = statistics.median(ratios)
    off = sorted(max(each / median, median / each) - 1 for each in ratios)
    spread = off[math.ceil(_QUANTILE * len(off)) - 1]
    return KernelFactor(median, max(spread, _LEAST_SPREAD), len(ratios))
