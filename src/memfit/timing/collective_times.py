"""Seconds of a collective from its bytes, its ranks, the link between cards, and a few coefficients.

    small messages    a short start, and a share of the bandwidth ┐
                                                                  ├─ the shorter, as NCCL chooses its protocol
    large messages    a longer start, and all of the bandwidth    ┘

The bytes are those that an algorithm must send over each card's link, so that one bandwidth suits all numbers
of ranks. All ranks are on one machine.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from memfit.devices import Device
from memfit.records.step_operations import Operand, Operation

NAMESPACE = "nccl."
_BYTES = {
    "float64": 8,
    "int64": 8,
    "uint64": 8,
    "float32": 4,
    "int32": 4,
    "uint32": 4,
    "float16": 2,
    "bfloat16": 2,
}
_SHARPNESS = 3.0
"""Of the change from one protocol to the other: NCCL has a third between them."""
CHANNELS = 24
"""Channels that NCCL uses on a machine with NVSwitch; each keeps a multiprocessor busy. Source: logs in
NVIDIA/nccl-tests, issue 100, and NVIDIA/nccl, issue 1259. NVLink SHARP uses 16 (NVIDIA/nccl, issue 1453)."""
_MEASURED = 8
"""Ranks of the largest machine in the tables."""


def has_nvlink(device: Device) -> bool:
    """Return whether cards reach each other over NVLink, in the machines that are made for them.

    >>> from memfit.devices import find_device
    >>> has_nvlink(find_device("H100")), has_nvlink(find_device("H100 PCIe"))
    (True, False)
    """
    return device.peer_bandwidth != device.host_bandwidth


def link_bytes(operation: Operation) -> float:
    """Return how many bytes a collective sends over the link of each rank, at least.

    Source: the factors of nccl-tests, doc/PERFORMANCE.md.

    >>> million = (Operand((1_000_000,), "float32"),)
    >>> fields = "nccl.all_reduce", -1, -1, (), (), (), 0, 0, "float32", False, 0.0, 0
    >>> link_bytes(Operation(*fields, operands=million, results=million, ranks=8))
    7000000.0
    """
    sent, received = (_size(tensors) for tensors in (operation.operands, operation.results))
    most, others = max(sent, received), operation.ranks - 1
    match operation.name.removeprefix(NAMESPACE):
        case "all_reduce":
            return 2 * most * others / operation.ranks
        case "all_gather" | "reduce_scatter" | "gather" | "all_to_all":
            return most * others / operation.ranks
    return most


def kind_of_collective(operation: Operation) -> str:
    """Return the key of a collective in ``kernel_times.toml``; those without a table are like others.

    >>> fields = "nccl.broadcast", -1, -1, (), (), (), 0, 0, "float32", False, 0.0, 0
    >>> kind_of_collective(Operation(*fields, ranks=8))
    'all_gather'
    """
    name = operation.name.removeprefix(NAMESPACE)
    return {"all_reduce": name, "all_to_all": name, "send_recv": "all_to_all"}.get(name, "all_gather")


def collective_seconds(sent: float, ranks: int, device: Device, fit: Mapping[str, float]) -> float:
    """Return the seconds of a collective.

    ``floor`` and ``hop`` are the start of the protocol for small messages, with two ranks and for each more;
    ``start`` is what that for large ones takes besides; ``small`` is the share of its bandwidth that the
    first has. ``bandwidth`` is the share of the link's that two ranks get, and ``bandwidth_8`` eight.

    Args:
        sent: bytes over the link of each rank.
        ranks: that take part, on one machine.
        device: the card of each.
        fit: the coefficients.
    """
    doublings = math.log2(min(ranks, _MEASURED)) - 1
    share = fit["bandwidth"] * (fit["bandwidth_8"] / fit["bandwidth"]) ** (doublings / 2)
    at_full_rate = sent / (device.peer_bandwidth * share)
    begins = fit["floor"] + fit["hop"] * (ranks - 2)
    if not at_full_rate:
        return begins
    both = at_full_rate / fit["small"], fit["start"] + at_full_rate
    return begins + float(sum(each**-_SHARPNESS for each in both) ** (-1 / _SHARPNESS))


def why_time_is_unknown(operations: Sequence[Operation], machine: int) -> str:
    """Return why the time of a step with these collectives is not known; empty if it is.

    Args:
        operations: of the step.
        machine: how many ranks are on one machine.
    """
    known: tuple[tuple[Callable[[Operation], bool], str], ...] = (
        (
            lambda each: each.ranks > machine,
            "its ranks are on several machines, whose network memfit does not know",
        ),
        (
            lambda each: each.name == "nccl.send_recv" and not (each.operands and each.results),
            "a rank waits for what others compute before they send it, as in a pipeline",
        ),
    )
    return next((why for is_so, why in known if any(map(is_so, operations))), "")


def _size(tensors: Sequence[Operand]) -> float:
    return sum(math.prod(each.shape) * _BYTES.get(each.dtype, 1) for each in tensors)
