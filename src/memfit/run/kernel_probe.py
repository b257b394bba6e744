"""A process that times kernels on this machine's card.

    warm up        products, until the card has the clock that it sustains
    each kernel    3 runs; then 5 times: the host gets ahead, and so many runs between two events of CUDA

``main()`` prints a ``KernelMeasurement``, as JSON. Elsewhere the device is an argument, and so is the clock.
"""

import math
import os
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
import torch

from memfit.card.detect_card import detect_card
from memfit.recording.operation_interception import OperationInterceptionMode
from memfit.recording.operation_of_call import operation_of_call, tensors_among
from memfit.records import KernelMeasurement, Operation, TimedKernel
from memfit.run.kernels_to_time import Kernels, Run

Clock = Callable[[Run, int], float]
"""Returns the seconds of one of so many runs in a row."""
_SECONDS, _WARM_UP = 40.0, 2.0
"""After which no further kernel is timed, and for which the card works before the first."""
_LAUNCHED, _GROUPS, _MOST_RUNS, _GROUP_SECONDS = 3, 5, 20, 0.01
_AHEAD = 4_000_000
"""Cycles for which the card waits, about 2 ms, while the host issues what is timed."""
_AMPERE = 8
"""Major compute capability since which cards compute in bfloat16 and TF32."""


def time_kernels(
    kernels: Kernels, clock: Clock, *, warm_up: float = _WARM_UP, most: float = _SECONDS
) -> tuple[list[TimedKernel], list[str]]:
    """Time kernels, and return them, and the names of those that did not run.

    Args:
        kernels: of a device.
        clock: of the same.
        warm_up: seconds for which the device works before.
        most: seconds after which no further kernel begins.
    """
    found, skipped = [], []
    began = time.monotonic()
    for number, each in enumerate(kernels.all()):
        if time.monotonic() - began > most:
            skipped.append(f"{each.what}: not reached in {most:g} s")
            continue
        torch.backends.cuda.matmul.allow_tf32 = each.tf32
        try:
            run = each.make()
            operations = operations_of(run, kernels.device)
            while not number and time.monotonic() - began < warm_up:
                clock(run, _MOST_RUNS)
            found.append(TimedKernel(each.what, operations, seconds_of_run(run, clock), each.tf32))
        except (RuntimeError, NotImplementedError) as error:  # out of memory, or no such kernel for this card
            skipped.append(f"{each.what}: {str(error).splitlines()[0]}")
    return found, skipped


def seconds_of_run(run: Run, clock: Clock) -> float:
    """Return the median seconds of a run that follows others."""
    first = clock(run, _LAUNCHED)
    runs = min(max(math.ceil(_GROUP_SECONDS / first), 1), _MOST_RUNS)
    return statistics.median(clock(run, runs) for _ in range(_GROUPS))


def operations_of(run: Run, device: torch.device) -> tuple[Operation, ...]:
    """Run something once, and return the operations that launch kernels on a device."""
    operations: list[Operation] = []

    def note(operation: Any, args: Any, kwargs: Any) -> Any:
        result = operation(*args, **kwargs)
        if any(each.device == device for each in tensors_among((args, kwargs, result))):
            operations.append(operation_of_call(operation, args, kwargs, result))
        return result

    with OperationInterceptionMode(note):
        run()
    return tuple(each for each in operations if each.launches)


def seconds_on_card(run: Run, runs: int) -> float:
    """Return the seconds of one of so many runs in a row on the card, between two of its events."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(_AHEAD)  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(runs):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / runs


def main() -> None:
    """Time kernels on the first card, and print them."""
    card = detect_card("time kernels")
    is_ampere = torch.cuda.get_device_capability(0)[0] >= _AMPERE
    halves = (torch.bfloat16, torch.float16) if is_ampere else (torch.float16,)
    kernels = Kernels(torch.device("cuda", 0), halves, is_ampere)
    found, skipped = time_kernels(kernels, seconds_on_card)
    day = datetime.now(UTC).date().isoformat()
    of = card.name, card.driver, card.cuda, str(torch.__version__), day
    os.write(1, msgspec.json.encode(KernelMeasurement(*of, tuple(found), tuple(skipped))))
