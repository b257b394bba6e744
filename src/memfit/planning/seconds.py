"""How long an operation takes on a card: the roofline model.

An operation takes as long as its arithmetic or its memory traffic at the card's full rate, whichever is
longer, and at least as long as Python and PyTorch need to launch a kernel. Ratios of times are meant, not
times: no kernel reaches the full rate.

Source: S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model",
Communications of the ACM 52 (4), 2009.
"""

from collections.abc import Callable

from memfit.devices import Device
from memfit.records import Operation, StepOperations

LAUNCH = 5e-6
"""Seconds from one kernel of eager PyTorch to the next, at least. Assumed: not measured on a card."""
RULE = "roofline of the card: full arithmetic rate or memory bandwidth, at least 5 us per kernel"
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def roofline(device: Device) -> Callable[[Operation], float]:
    """Return how many seconds an operation takes on a card.

    >>> from memfit.devices import find_device
    >>> flops, moved = 2 * 4096**3, 3 * 4096**2 * 2
    >>> product = Operation(
    ...     "aten.mm.default", 0, -1, (5, 6), (7,), (), flops, moved, "bfloat16", False, 0.0, 0
    ... )
    >>> f"{1e3 * roofline(find_device('A100-80GB'))(product):.2f} ms"
    '0.44 ms'
    """

    def seconds(operation: Operation) -> float:
        if not operation.creates and not operation.writes and not operation.flops:
            return 0.0  # a view
        rate = device.rate(_DTYPES.get(operation.dtype, operation.dtype))
        return max(operation.flops / rate, operation.moved / device.memory_bandwidth, LAUNCH)

    return seconds


def host_copies(device: Device) -> Callable[[int], float]:
    """Return how many seconds it takes to copy bytes to the host and back, beside nothing else."""
    return lambda size: 2 * size / device.host_bandwidth


def step_seconds(step: StepOperations, seconds: Callable[[Operation], float]) -> float:
    """Return the seconds of the forward and the backward of a step."""
    return sum(seconds(operation) for operation in (*step.forward, *step.backward))
