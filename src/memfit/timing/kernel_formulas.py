"""Seconds of a kernel from its sizes, the card's rates, and a few coefficients of its kind.

    arithmetic   tiles of the result, in waves over the card, each along k ─────────┐
                                                                                    ├─ the longer, and a floor
    traffic      bytes over the share of the memory's bandwidth that the kernel gets ┘

The rates are those of the card's data sheet.
"""

import math
from collections.abc import Mapping

from memfit.devices import Device
from memfit.timing.collective_times import collective_seconds
from memfit.timing.kernel_work import KernelWork, Sizes

Coefficients = Mapping[str, float]
"""Of one kind on one card, by name. All kinds have ``floor``, seconds of the smallest kernel, and
``bandwidth``, the share of the data sheet's that it gets. Kinds with arithmetic have ``arithmetic``, the
share of the data sheet's rate, and others that the formulas name."""

COEFFICIENTS = {"floor", "bandwidth", "arithmetic", "tile", "depth", "sustained", "width", "tail"}
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
_RATES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", **dict.fromkeys(FLOAT8, "fp8")}
_SPLITS, _MOST_WAVES = (1, 2, 4, 8, 16, 32, 64), 4
"""Into how many parts along k a product may be split, so that a small result occupies a large card, and up to
how many waves of them."""
_HALF_WARM = 3e-4
"""Seconds of arithmetic until a card has lowered its clock half-way to what its power limit sustains."""
_SHARPNESS = 4.0
"""How well the longer of arithmetic and traffic hides the other: the exponent of their norm."""
_TILES_16 = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
_TILES_32 = ((128, 128), (128, 64), (64, 128), (64, 64), (128, 32), (32, 128), (32, 32))
"""Parts of a result that a block of threads computes in NVIDIA's libraries, with tensor cores or not."""
GROUP_INSTRUCTIONS = {9, 10}
"""Major compute capabilities whose tensor cores have their full rate only with instructions of their own
(``wgmma``, ``tcgen05``), which neither cards before nor GeForce cards after them know."""
_OLDER_INSTRUCTIONS = 0.56
"""Of their rate without these: FlashAttention 2 reaches 0.395 of a GH200's and 0.704 of an A100's."""
_UNALIGNED = {8: 1.0, 4: 1.2, 2: 1.6, 1: 3.0}
"""By how much longer tensor cores take if rows begin at any multiple of so many elements. Assumed: padding a
vocabulary of 50,257 to 50,304 made nanoGPT a quarter faster on an A100, by its author's account. Blocks of
memory that begin elsewhere cannot be fetched for the newest instructions."""
_QUERIES, _WIDTHS = 128, 32
"""Rows of an attention that a block of threads computes, and the multiples of its width that it knows."""


def seconds_of_work(work: KernelWork, device: Device, fit: Coefficients, *, warm: bool = False) -> float:
    """Return the seconds of one kernel, or of those of one convolution's backward.

    Args:
        work: what it computes and moves.
        device: the card.
        fit: coefficients of its kind.
        warm: whether the card has worked for long, as in training, and runs at the clock that its power limit
            sustains. Tables of short kernels were measured on cards that had not.
    """
    if work.ranks > 1:
        return collective_seconds(work.traffic, work.ranks, device, fit)
    if work.products:
        traffic = work.traffic / len(work.products)
        products = sum(
            product_seconds(work, sizes, traffic, device, fit, warm=warm) for sizes in work.products
        )
        return fit["floor"] + products + traffic_seconds(work.reordered, device, fit)
    if work.attention is not None:
        return attention_seconds(work, work.attention, device, fit)
    # A product of unknown sizes is as fast as a large one.
    share = share_of_large_product(fit) if "tile" in fit else fit.get("arithmetic", 1.0)
    rate = rate_of(device, work.dtype) * share
    return work.steps * fit["floor"] + max(work.flops / rate, traffic_seconds(work.traffic, device, fit))


def traffic_seconds(traffic: float, device: Device, fit: Coefficients) -> float:
    """Return the seconds that a kernel's bytes take."""
    return traffic / (device.memory_bandwidth * fit["bandwidth"])


def product_seconds(
    work: KernelWork, sizes: Sizes, traffic: float, device: Device, fit: Coefficients, *, warm: bool
) -> float:
    """Return the seconds of a matrix product, or of a convolution computed as one, without its floor.

    The library chooses the best of some tiles; so does this. Tiles run in waves: as many at once as there are
    multiprocessors, and the last wave takes as long as a full one. ``tile`` is what a tile loses to its edges
    (in elements: large tiles lose less), ``depth`` what each tile loses before and after its loop along k,
    ``sustained`` by how much longer arithmetic takes where the power limit lowers the clock.
    """
    batch, m, n, k = sizes
    tensor_cores = device.fast(_RATES.get(work.dtype, work.dtype))
    per_tile = rate_of(device, work.dtype) * fit["arithmetic"] / device.multiprocessors
    along = float(k)
    if tensor_cores and work.alignment < max(_UNALIGNED):
        along = k * _UNALIGNED[work.alignment]
        per_tile *= _OLDER_INSTRUCTIONS if device.compute_capability[0] in GROUP_INSTRUCTIONS else 1
    best = math.inf
    for tile in _TILES_16 if tensor_cores else _TILES_32:
        blocks = batch * math.ceil(m / tile[0]) * math.ceil(n / tile[1])
        for parts in _SPLITS:
            if parts > 1 and blocks * parts > _MOST_WAVES * device.multiprocessors:
                break
            waves = math.ceil(blocks * parts / device.multiprocessors)
            arithmetic = (
                waves * 2 * math.prod(tile) * (along / parts + fit["depth"]) * _lost(tile, fit) / per_tile
            )
            arithmetic *= 1 + fit["sustained"] * (1 if warm else arithmetic / (arithmetic + _HALF_WARM))
            partial = 4 * batch * m * n * (parts + 1) if parts > 1 else 0  # sums in float32, and their sum
            moved = traffic_seconds(traffic + partial, device, fit)
            best = min(best, (arithmetic**_SHARPNESS + moved**_SHARPNESS) ** (1 / _SHARPNESS))
    return best


def share_of_large_product(fit: Coefficients) -> float:
    """Return the share of the data sheet's rate that large products reach on a warm card.

    >>> round(share_of_large_product({"arithmetic": 1.46, "tile": 51.7, "sustained": 0.0106}), 3)
    0.9
    """
    return fit["arithmetic"] / (_lost(_TILES_16[0], fit) * (1 + fit["sustained"]))


def _lost(tile: tuple[int, int], fit: Coefficients) -> float:
    return 1 + fit["tile"] * (1 / tile[0] + 1 / tile[1])


def attention_seconds(work: KernelWork, sizes: Sizes, device: Device, fit: Coefficients) -> float:
    """Return the seconds of an attention in one kernel, such as FlashAttention's.

    A block of threads has 128 queries of one head, whose width is rounded up to a multiple of 32.
    ``width`` is what the exponentials of each score cost, in elements of a head; ``depth`` what a block loses
    before and after its loop over keys, in keys; ``tail`` how much of a longest block
    multiprocessors wait for the last one. A causal attention computes what is below the diagonal, in whole
    blocks.
    """
    heads, queries, keys, width = sizes
    blocks = heads * math.ceil(queries / _QUERIES)
    seen = (keys + min(keys, _QUERIES)) / 2 if work.causal else keys
    padded = math.ceil(width / _WIDTHS) * _WIDTHS
    per_score = work.flops / (heads * queries * keys) * (padded + fit["width"]) / width
    mean = blocks * (seen + fit["depth"]) / device.multiprocessors
    scores = _QUERIES * (mean + fit["tail"] * (keys + fit["depth"]))  # of one multiprocessor
    per_multiprocessor = rate_of(device, work.dtype) * fit["arithmetic"] / device.multiprocessors
    return fit["floor"] + scores * per_score / per_multiprocessor + traffic_seconds(work.traffic, device, fit)


def rate_of(device: Device, dtype: str) -> float:
    """Return the data sheet's FLOP/s of a dtype; of float64, by its share of float32's.

    >>> from memfit.devices import find_device
    >>> rate_of(find_device("T4"), "float16") / rate_of(find_device("T4"), "float32")
    8.0
    """
    if dtype == "float32 by tf32":  # three products of halves of each number
        return device.rate("tf32") / 3 if device.fast("tf32") else device.rate("fp32")
    if dtype in {"float64", "complex128"}:
        return device.rate("fp32") * _FLOAT64.get(device.compute_capability, 1 / 64)
    return device.rate(_RATES.get(dtype, dtype))


_FLOAT64 = {(7, 0): 1 / 2, (8, 0): 1.0, (9, 0): 1.0, (10, 0): 1 / 2}
"""By compute capability. Sources: CUDA C++ Programming Guide, throughput of native arithmetic instructions;
data sheets of A100 and H100 (19.5 and 67 TFLOP/s by tensor cores, as much as float32)."""
