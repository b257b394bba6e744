"""Seconds of an operation on a card: a roofline whose efficiency was fitted to published measurements.

    records.Operation
      |  kernel_work.py             its kind, bytes, arithmetic, sizes
      |  kernel_formulas.py         a formula per kind, with a card's coefficients: kernel_times.toml
    KernelTime                      seconds, how far off they may be, what they rest on

Coefficients are shares of the card's rates in ``devices.toml``, and sizes: they carry over to cards that
nobody measured. ``python benchmarks/fit_kernel_times.py`` fits them again.
"""

import functools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from memfit.devices import Device, find_device
from memfit.records.step_operations import Operation
from memfit.timing.collective_times import CHANNELS, has_nvlink
from memfit.timing.kernel_formulas import (
    COEFFICIENTS,
    FLOAT8,
    GROUP_INSTRUCTIONS,
    Coefficients,
    rate_of,
    seconds_of_work,
    share_of_large_product,
)
from memfit.timing.kernel_work import KernelWork, issues_nothing, work_of


class Basis(StrEnum):
    """What a time rests on, most certain first."""

    MEASURED = "measured on this card"
    CARD = "fitted to measurements of this card"
    RELATIVE = "fitted to measurements of a related card"
    DATA_SHEET = "the card's data sheet, and assumed efficiencies"


@dataclass(frozen=True, slots=True)
class KernelTime:
    """How long one operation takes on the card, once it has begun."""

    seconds: float
    spread: float
    """In nine cases of ten, the real time is at most this share longer, or as many times shorter."""
    basis: Basis
    kind: str = ""
    """``product, 16 bits``: whose kernels a measurement of the card corrects alike. Empty for none."""
    share: float = 0.0
    """Of the card that it keeps busy; kernels of other streams get the rest. 0 for copies over the link."""


@dataclass(frozen=True, slots=True)
class KernelFactor:
    """How much longer kernels of a kind take on this card than their formula says."""

    ratio: float
    spread: float
    """As in ``KernelTime``."""
    kernels: int
    """So many were measured."""


COLLECTIVES = {"all_reduce", "all_gather", "all_to_all"}
NOTHING = KernelTime(0.0, 0.0, Basis.CARD)
LONG = 1e-4
"""Seconds above which a table's interval is that of long kernels."""
_PRECISIONS = dict.fromkeys(("bfloat16", "float16"), "16 bits")
_TENSOR_CORES = {"bfloat16", "float16", "tf32", *FLOAT8}
_UNMEASURED = {"float64", "complex64", "complex128", *FLOAT8}
"""Precisions of products for which no table has figures, and how far off these may be: a guess."""
_UNMEASURED_SPREAD = 1.0
_STACKED = 2048
"""Bits of a memory bus: only stacked memory (HBM) has more."""
_HOST_SPREAD = 0.3
"""Of copies between host and card; assumed: pinned memory gets most of the link's rate, other memory half."""
_WITH_PRECISION = {"product", "convolution", "convolution_backward"}
_CUDNN = ("convolution", "recurrent")
_OF_RECENT_RESULTS = {
    *("pointwise", "copy", "transpose", "reduction", "dropout", "softmax", "softmax_backward"),
    *("layer_norm", "layer_norm_backward", "batch_norm", "batch_norm_backward"),
}
_SAVED_BY_CACHE = 0.5
"""The share of their traffic, at most, that is read from the L2 cache, where the kernel before has left it.
Assumed: half of traffic is reading."""
_ONE_OF_SEVERAL = {"optimizer", "pointwise", "reduction"}
"""Kinds whose formula is of one kernel, where operations may launch several."""


class KernelTimes:
    """Seconds of operations on one card.

    Args:
        device: the card, from ``find_device``.
        tf32: whether matrix products of float32 are computed in TF32, as PyTorch does on request.
        without_own: pretend that nobody measured this card, to see what that costs.
        factors: by kind, as measured on this card.

    >>> from memfit.devices import find_device
    >>> from memfit.records.step_operations import Operand
    >>> square = Operand((4096, 4096), "bfloat16")
    >>> fields = "aten.mm.default", -1, -1, (), (), (), 0, 0, "bfloat16", False, 0.0, 0
    >>> product = Operation(*fields, operands=(square, square), results=(square,), launches=1)
    >>> time = KernelTimes(find_device("A100")).of(product)
    >>> f"{1e3 * time.seconds:.2f} ms, {time.basis}"
    '0.54 ms, fitted to measurements of this card'
    """

    def __init__(
        self,
        device: Device,
        *,
        tf32: bool = False,
        without_own: bool = False,
        factors: Mapping[str, KernelFactor] = MappingProxyType({}),
    ) -> None:
        self._device = device
        self._tf32 = tf32 and device.fast("tf32")
        self._without_own = without_own
        self._factors = factors
        self._fits: dict[str, CardFit] = {}
        self._times: dict[tuple[object, ...], KernelTime] = {}

    def of(self, operation: Operation) -> KernelTime:
        """Return the time of an operation; of a view, and of what launches nothing, 0."""
        sizes = operation.operands, operation.results, operation.flops, operation.moved
        key = (
            operation.name,
            operation.dtype,
            operation.is_causal,
            operation.launches,
            operation.ranks,
            *sizes,
        )
        if key not in self._times:
            self._times[key] = NOTHING if issues_nothing(operation) else self._time(operation)
        return self._times[key]

    def seconds_at_full_rate(self, operation: Operation) -> float:
        """Return the seconds of an operation's arithmetic at the rate of the card's data sheet."""
        return operation.flops / rate_of(self._device, self.work(operation).dtype)

    def work(self, operation: Operation) -> KernelWork:
        """Return what an operation asks of this card, in the precision in which it computes."""
        work = work_of(operation)
        if work.kind.startswith(_CUDNN) and self._device.fast("tf32"):
            return on_tensor_cores(work)
        if work.kind == "product" and work.dtype == "float32" and self._tf32:
            return replace(work, dtype="tf32")
        return work

    def _time(self, operation: Operation) -> KernelTime:
        work = self.work(operation)
        if work.over_link:
            return KernelTime(work.traffic / self._device.host_bandwidth, _HOST_SPREAD, Basis.DATA_SHEET)
        if work.kind in _OF_RECENT_RESULTS:
            cached = max(0.0, 1 - work.traffic / self._device.l2_cache)
            work = replace(work, traffic=work.traffic * (1 - _SAVED_BY_CACHE * cached))
        kind = kind_with_precision(work)
        if kind not in self._fits:
            self._fits[kind] = find_coefficients(kind, self._device, without_own=self._without_own)
        fit = self._fits[kind]
        seconds = seconds_of_work(work, self._device, fit.values, warm=True)
        if work.kind in _ONE_OF_SEVERAL:
            seconds += fit.values["floor"] * max(operation.launches - 1, 0)
        if work.ranks > 1:
            share = min(1.0, CHANNELS / self._device.multiprocessors)
        else:  # its start and its end leave the card to others
            share = 1 - min(1.0, work.steps * operation.launches * fit.values["floor"] / seconds)
        corrected = work.kind if not work.flops else f"{work.kind}, {_PRECISIONS.get(work.dtype, work.dtype)}"
        if factor := self._factors.get(corrected):
            return KernelTime(seconds * factor.ratio, factor.spread, Basis.MEASURED, corrected, share)
        if work.flops and work.dtype in _UNMEASURED:
            return KernelTime(seconds, _UNMEASURED_SPREAD, Basis.DATA_SHEET, corrected, share)
        return KernelTime(seconds, fit.long if seconds > LONG else fit.spread, fit.basis, corrected, share)


def on_tensor_cores(work: KernelWork) -> KernelWork:
    """Return a convolution or a recurrent network as cards since Ampere compute it.

    float32 is TF32 by default, unlike in matrix products. Images with channels first are copied.
    """
    dtype = "tf32" if work.dtype == "float32" else work.dtype
    return replace(work, dtype=dtype, reordered=0 if work.channels_last else 2 * work.traffic)


@dataclass(frozen=True, slots=True)
class CardFit:
    """Coefficients of a kind on a card."""

    values: Coefficients
    spread: float
    """Of times computed with them, as in ``KernelTime``; ``long``: of times above ``LONG``."""
    long: float
    basis: Basis


def find_coefficients(kind: str, device: Device, *, without_own: bool = False) -> CardFit:
    """Return coefficients of a kind: the card's own, else its nearest relative's, else assumed ones.

    Args:
        kind: as ``kind_with_precision`` returns it.
        device: the card.
        without_own: pass over the card's own.
    """
    table = kernel_table()["kind"][kind]
    cards, name = table.get("card", {}), _card(device)
    if name in cards and not without_own:
        own = cards[name]
        return CardFit(_under_load(own, device, kind), own["spread"], own["long"], Basis.CARD)
    if "assumed" in table:
        return CardFit(table["assumed"], table["spread"], table["spread"], Basis.DATA_SHEET)
    if "like" in table:
        like = find_coefficients(table["like"], device, without_own=without_own)
        values = {
            key: value * table["share"].get(key, 1.0)
            for key, value in like.values.items()
            if key in COEFFICIENTS
        }
        return CardFit(values, *_spreads_without_own(kind), Basis.DATA_SHEET)
    near = nearest_relative(device, [other for other in cards if other != name], kind)
    if near is None:
        raise LookupError(f"No card has coefficients of {kind!r} in kernel_times.toml: add `like`.")
    spread, long = _spreads_without_own(kind)
    known = carried_over(kind, cards[near], near, device, without_own=without_own)
    if "shared" in table and not has_nvlink(device):
        spread = long = table["shared"]["spread"]
        known = {**known, "bandwidth_8": known["bandwidth_8"] * table["shared"]["bandwidth_8"]}
    return CardFit(known, spread, long, Basis.RELATIVE)


def _spreads_without_own(kind: str) -> tuple[float, float]:
    """Return how far off a kind's times are where the card has no table of it: of all, and of long ones.

    Never less far than where a card has one; a kind that is ``like`` another, than that one without.
    """
    table = kernel_table()["kind"][kind]
    known = [(each["spread"], each["long"]) for each in table.get("card", {}).values()]
    known += [table["relative"]] if "relative" in table else []
    known += [_spreads_without_own(table["like"])] if "like" in table else []
    known += [(table["spread"],) * 2] if "spread" in table else []
    return max(spread for spread, _ in known), max(long for _, long in known)


def carried_over(
    kind: str, values: Coefficients, near: str, device: Device, *, without_own: bool = False
) -> Coefficients:
    """Return a relative's coefficients as they apply to a card.

    A convolution is computed as a matrix product: where a kind is ``scaled_by`` products, it reaches less or
    more of the card's rate than on the relative as large products do.

    Args:
        kind: as ``kind_with_precision`` returns it.
        values: the relative's coefficients.
        near: the relative.
        device: the card.
        without_own: pass over the card's own products.
    """
    product = kernel_table()["kind"][kind].get("scaled_by")
    if product is None:
        return values if without_own else _under_load(values, device, kind)
    own = find_coefficients(product, device, without_own=without_own).values
    its = find_coefficients(product, measured_device(near)).values
    scale = share_of_large_product(own) / share_of_large_product(its)
    return {**values, "arithmetic": values["arithmetic"] * scale}


def _card(device: Device) -> str:
    """Return the name of a card, also of one that a device is a slice of."""
    return device.name.split(":")[0]


def _under_load(values: Coefficients, device: Device, kind: str) -> Coefficients:
    """Return coefficients as they are under load, where the table knows that of the card itself."""
    known = kernel_table()["under_load"].get(kind, {}).get(_card(device), {})
    if "boost" in known:
        values = {**values, "arithmetic": values["arithmetic"] * known["boost"]}
    return {**values, "sustained": known["sustained"]} if "sustained" in known else values


def nearest_relative(device: Device, names: list[str], kind: str = "") -> str | None:
    """Return which of some measured cards is most like a card; None if there are none.

    What the table prefers comes first, for collectives the same sort of link, then the same compute
    capability. Attention is next like that of cards with the same instructions for matrices, everything like
    that of cards with the same sort of memory; then the next capability counts, the next rate, and the next
    bandwidth. Neither preference nor memory counts for what is ``scaled_by`` products, which know the clock.

    >>> from memfit.devices import find_device
    >>> nearest_relative(find_device("RTX 4090"), ["A100-80GB", "L40S", "T4"])
    'L40S'
    """
    collective = kind in COLLECTIVES
    preferred = next(
        (name for name in kernel_table()["prefer"].get(_card(device), ()) if name in names), None
    )
    by_products = "scaled_by" in kernel_table()["kind"].get(kind, {})
    if preferred is not None and not (collective or by_products):
        return str(preferred)
    attention = kind.startswith(("flash", "efficient", "cudnn", "flex"))

    def distance(name: str) -> tuple[float, ...]:
        other = measured_device(name)
        (major, minor), (its_major, its_minor) = device.compute_capability, other.compute_capability
        return (
            collective and has_nvlink(device) != has_nvlink(other),
            device.compute_capability != other.compute_capability,
            attention and (major in GROUP_INSTRUCTIONS) != (its_major in GROUP_INSTRUCTIONS),
            not by_products and (device.memory_bus_width > _STACKED) != (other.memory_bus_width > _STACKED),
            abs(10 * major + minor - 10 * its_major - its_minor),
            abs(math.log(device.rate("fp16") / other.rate("fp16"))),
            abs(math.log(device.memory_bandwidth / other.memory_bandwidth)),
        )

    return min(names, key=distance, default=None)


@functools.cache
def kernel_table() -> Mapping[str, Any]:
    """Return what is in ``kernel_times.toml``."""
    return tomllib.loads(Path(__file__).with_name("kernel_times.toml").read_text(encoding="utf-8"))


@functools.cache
def measured_device(name: str) -> Device:
    """Return a card that was measured: of ``devices.toml``, or another, by its differences from one of those.

    >>> measured_device("GH200").memory_bandwidth > measured_device("H100-80GB").memory_bandwidth
    True
    """
    other = kernel_table()["other_card"].get(name)
    if other is None:
        return find_device(name)
    figures = dict(other)
    like = find_device(figures.pop("like"))
    return replace(like, name=name, rates=dict(like.rates) | figures.pop("rates", {}), **figures)


def kind_with_precision(work: KernelWork) -> str:
    """Return the key of a kind in ``kernel_times.toml``: products differ between tensor cores and others.

    >>> (
    ...     kind_with_precision(KernelWork("product", "bfloat16", 0.0)),
    ...     kind_with_precision(KernelWork("copy", "int8", 0.0)),
    ... )
    ('product_16', 'copy')
    """
    if work.kind not in _WITH_PRECISION:
        return work.kind
    return f"{work.kind}_{16 if work.dtype in _TENSOR_CORES else 32}"
