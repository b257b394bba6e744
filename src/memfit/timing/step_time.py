"""The time of a recorded training step on a card."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from memfit.devices import Device, find_device
from memfit.errors import UnknownDeviceError
from memfit.records import (
    ASSUMED_HOST_TIMES,
    DRIVER,
    ON_CPU,
    CommunicationTime,
    EventLabel,
    HostTimes,
    MarkKind,
    Phase,
    SecondsPerDriverCall,
    StepTime,
    TimeShare,
    Trace,
    WholeStep,
)
from memfit.timing.collective_times import why_time_is_unknown as why_unknown_on_machine
from memfit.timing.kernel_times import Basis, KernelFactor, KernelTime, KernelTimes
from memfit.timing.kernel_work import is_solved, work_of
from memfit.timing.saved_host_times import saved_host_times
from memfit.timing.saved_kernel_factors import saved_kernel_factors
from memfit.timing.step_timeline import QueuedWork, StepTimeline, step_timeline

_COMMON, _COMMON_OF_MEASURED = 0.18, 0.08
"""Spread of whole steps beside that of their kernels: temperature, power limits, versions of libraries. The
first was chosen when 199 published steps had been predicted: nine of ten are in their interval. The second is
for kernels that were measured on the machine itself, and assumed."""


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A step, operation by operation."""

    times: tuple[KernelTime, ...]
    """Of each operation of the record."""
    queue: tuple[QueuedWork, ...]
    """Of each that ran, in the host's order."""
    timeline: StepTimeline


def step_time_of_trace(trace: Trace) -> StepTime | None:
    """Return how long a training step of a run takes on the device of the run; None if that is not known."""
    device = _device_of(trace)
    if trace.step is None or device is None:
        return None
    factors = saved_kernel_factors(device, trace.versions.get("torch", ""))
    return step_time(trace.step, trace.labels, device, host_times_of_trace(trace), factors=factors)


def simulated_step_of_trace(trace: Trace) -> SimulatedStep | None:
    """Return what each operation of a run's step takes, where ``step_time_of_trace`` returns a time."""
    device = _device_of(trace)
    if trace.step is None or device is None:
        return None
    factors = saved_kernel_factors(device, trace.versions.get("torch", ""))
    kernels = KernelTimes(device, tf32=trace.step.tf32, factors=factors)
    return simulated_step(trace.step, trace.labels, kernels, host_times_of_trace(trace))


def _device_of(trace: Trace) -> Device | None:
    """Return the device of a run; None if it takes an unknown time there."""
    if trace.step is None or _why_not_of_ranks(trace, trace.step):
        return None
    try:
        return find_device(trace.device.name)
    except UnknownDeviceError:  # of a newer memfit's table
        return None


def why_step_time_is_unknown(trace: Trace) -> str:
    """Return why a run on the ghost has no time of a step, as a clause."""
    if trace.step is None:
        completed = sum(mark.kind is MarkKind.TRAINING_STEP for mark in trace.marks)
        if trace.step_fault or completed > 1:
            return trace.step_fault or "the second training step was not recorded"
        made = "only one training step" if completed else "no training step"
        return f"the script completed {made}, and memfit times the second"
    if name := _in_solver(trace.step):
        return f"the step runs {name} in cuSOLVER, and memfit has no figures of that library"
    return _why_not_of_ranks(trace, trace.step) or f"this memfit has no figures of {trace.device.name}"


def _in_solver(step: WholeStep) -> str:
    """Return the name of an operation that cuSOLVER computes; empty if there is none."""
    return next((each.name for each in step.operations if is_solved(each)), "")


def _why_not_of_ranks(trace: Trace, step: WholeStep) -> str:
    machine = 1 if trace.rank is None else trace.rank.nproc or trace.rank.world_size
    return why_unknown_on_machine(step.operations, machine)


def host_times_of_trace(trace: Trace) -> HostTimes:
    """Return what this machine's host takes with the run's PyTorch: as it was measured, or assumed."""
    return saved_host_times(trace.versions.get("torch", "")) or ASSUMED_HOST_TIMES


def step_time(
    step: WholeStep,
    labels: Sequence[EventLabel],
    device: Device,
    host: HostTimes = ASSUMED_HOST_TIMES,
    *,
    without_own: bool = False,
    factors: Mapping[str, KernelFactor] = MappingProxyType({}),
) -> StepTime | None:
    """Return how long a recorded step takes on a card; None if that is not known.

    A card's clock and its libraries make all kernels slower or faster together: their errors are taken to be
    the same, and so are those of collectives. What the host is responsible for is independent of both.

    Args:
        step: the operations.
        labels: of the trace: what ``step.labels`` refers to.
        device: the card.
        host: what its host takes.
        without_own: pretend that nobody measured this card.
        factors: by kind of kernel, as measured on this card.
    """
    if _in_solver(step):
        return None
    kernels = KernelTimes(device, tf32=step.tf32, without_own=without_own, factors=factors)
    simulated = simulated_step(step, labels, kernels, host)
    times, queue, timeline = simulated.times, simulated.queue, simulated.timeline
    if not timeline.seconds:
        return None
    without = step_timeline(_with_collectives(step, queue, lambda _: 0.0))
    slower = step_timeline(_with_collectives(step, queue, lambda n: 1 + times[n].spread))
    computed, shared = (
        [n for n in step.order if (step.operations[n].ranks > 1) is so] for so in (False, True)
    )
    places = [
        labels[label]
        for n, label in zip(step.order, step.labels, strict=True)
        if step.operations[n].ranks == 1
    ]
    seconds = [times[n].seconds for n in computed]
    exposed = max(timeline.seconds - without.seconds, 0.0)
    busy = without.working + exposed
    basis = _basis(times, computed)
    on_cpu = sum(seconds_on_cpu(step, labels))
    spread = math.hypot(
        _COMMON_OF_MEASURED if basis == Basis.MEASURED else _COMMON,
        sum(times[n].seconds * times[n].spread for n in computed) / timeline.seconds,
        slower.seconds / timeline.seconds - 1,
        _HOST_SPREAD * max(timeline.seconds - busy, 0.0) / timeline.seconds,
        _SPREAD_OF_RANKS if shared else 0.0,
        _CPU_SPREAD * on_cpu / timeline.seconds,
    )
    samples, tokens = samples_and_tokens(step, labels)
    return StepTime(
        seconds=timeline.seconds,
        low=timeline.seconds / (1 + spread),
        high=timeline.seconds * (1 + spread),
        card=device.name,
        basis=basis,
        gpu_seconds=without.working,
        host_seconds=timeline.host,
        host_basis="measured on this machine, with an assumed driver" if host.measured else "assumed",
        kinds=_shares(zip((work_of(step.operations[n]).kind for n in computed), seconds, strict=True)),
        modules=_shares(zip((place.module for place in places), seconds, strict=True)),
        phases=_shares(zip((place.phase for place in places), seconds, strict=True)),
        utilization=sum(kernels.seconds_at_full_rate(step.operations[n]) for n in step.order)
        / timeline.seconds,
        samples=samples,
        tokens=tokens,
        cpu_seconds=on_cpu,
        communication=CommunicationTime(
            seconds=sum(times[n].seconds for n in shared),
            exposed=exposed,
            ranks=max(step.operations[n].ranks for n in shared),
            basis=_basis(times, shared),
        )
        if shared
        else None,
    )


def simulated_step(
    step: WholeStep, labels: Sequence[EventLabel], kernels: KernelTimes, host: HostTimes
) -> SimulatedStep:
    """Return what each operation of a step takes, and when; the arguments are those of ``step_time``."""
    times = tuple(kernels.of(operation) for operation in step.operations)
    after: defaultdict[int, tuple[int, ...]] = defaultdict(tuple)
    for place, before in step.after:
        after[place] += (before,)
    queue = tuple(
        QueuedWork(
            issue,
            times[number].seconds,
            step.operations[number].stream,
            step.operations[number].waits,
            after[place],
            times[number].share,
        )
        for place, (number, issue) in enumerate(
            zip(step.order, seconds_to_issue(step, labels, host), strict=True)
        )
    )
    return SimulatedStep(times, queue, step_timeline(queue))


def _with_collectives(
    step: WholeStep, queue: Sequence[QueuedWork], factor: Callable[[int], float]
) -> list[QueuedWork]:
    """Return the work with collectives that take so many times as long, by their operation."""
    return [
        replace(work, seconds=work.seconds * factor(number)) if step.operations[number].ranks > 1 else work
        for number, work in zip(step.order, queue, strict=True)
    ]


def _basis(times: Sequence[KernelTime], chosen: Iterable[int]) -> str:
    """Return what most of the time of some operations rests on."""
    bases: defaultdict[str, float] = defaultdict(float)
    for number in chosen:
        bases[times[number].basis] += times[number].seconds
    return max(bases, key=bases.__getitem__, default="")


def seconds_to_issue(step: WholeStep, labels: Sequence[EventLabel], host: HostTimes) -> list[float]:
    """Return how long the host needs before it has issued each operation of a step, in order.

    Python runs outside of the backward: the seconds of its calls are shared by the operations there, and the
    others by all. A replay of a CUDA graph issues its operations with the first of them.
    """
    is_backward = [labels[label].phase is Phase.BACKWARD for label in step.labels]
    issues = [not step.operations[number].name.startswith((DRIVER, ON_CPU)) for number in step.order]
    for first, end in step.replays:
        issues[first + 1 : end] = [False] * (end - first - 1)
    python = step.host.python_calls * host.one.python_calls
    beside = (host.step_seconds(step.host) - python) / max(sum(issues), 1)
    calls = [issued and not backward for issued, backward in zip(issues, is_backward, strict=True)]
    calling = python / max(sum(calls), 1)
    driver = [_seconds_of_driver(operation.name) for operation in step.operations]
    return [
        driver[number] + on_cpu + beside * issued + calling * called
        for number, on_cpu, issued, called in zip(
            step.order, seconds_on_cpu(step, labels), issues, calls, strict=True
        )
    ]


def seconds_on_cpu(step: WholeStep, labels: Sequence[EventLabel]) -> list[float]:
    """Return how long the host computes in each operation of a step on tensors of its own, in order.

    What runs before the forward, and in a data loader's threads, prepares data: that is no part of the time.
    """
    return [
        operation.moved / _CPU_BANDWIDTH
        if operation.name.startswith(ON_CPU) and label.phase not in _PREPARES
        else 0.0
        for operation, label in (
            (step.operations[number], labels[label])
            for number, label in zip(step.order, step.labels, strict=True)
        )
    ]


def _seconds_of_driver(name: str) -> float:
    """Return the seconds of a call of the driver's for memory, the work apart that it waits for; else 0."""
    return float(
        getattr(SecondsPerDriverCall(), name.removeprefix(DRIVER), 0.0) if name.startswith(DRIVER) else 0.0
    )


def _shares(parts: Iterable[tuple[str, float]]) -> tuple[TimeShare, ...]:
    sums: defaultdict[str, float] = defaultdict(float)
    for name, seconds in parts:
        sums[name] += seconds
    longest = sorted(sums.items(), key=lambda each: -each[1])
    return tuple(TimeShare(name, seconds) for name, seconds in longest if seconds)


_SPREAD_OF_RANKS = 0.5
"""Of a step of several ranks besides: one that is late, collectives and kernels that slow each other, links
unlike those of the tables. Assumed, when 29 published steps had been predicted."""
_HOST_SPREAD = 0.5
"""Of the host's time; assumed: processors differ as much."""
_CPU_BANDWIDTH, _CPU_SPREAD = 50e9, 2.0
"""Bytes per second that operations on the CPU read and write, with all of its cores, and the spread of their
time; assumed."""
_PREPARES = (Phase.SETUP, Phase.INPUT)


def samples_and_tokens(step: WholeStep, labels: Sequence[EventLabel]) -> tuple[int | None, int | None]:
    """Return how many samples and tokens the step trains on, as far as its operations say.

    The first embedding of indices, or else the first convolution, of the forward has a sample per row of its
    input; micro-batches run it again, in the same module. Where a step has several updates with forwards
    between them, as that of a GAN, models may see a sample more than once: neither is known.
    """
    found, samples, tokens, has_updated = None, 0, 0, False
    for number, label in zip(step.order, step.labels, strict=True):
        operation, place = step.operations[number], labels[label]
        has_updated |= place.phase is Phase.OPTIMIZER
        if has_updated and place.phase is Phase.FORWARD:
            return None, None
        kind = operation.name.partition(".")[2].partition(".")[0]
        place_in = {"embedding": 1, "convolution": 0, "cudnn_convolution": 0}.get(kind)
        if place.phase is not Phase.FORWARD or place_in is None or len(operation.operands) <= place_in:
            continue
        shape = operation.operands[place_in].shape
        if len(shape) > 1 and found in (None, (kind, place.module)):
            found = kind, place.module
            samples += shape[0]
            tokens += math.prod(shape) if kind == "embedding" else 0
    return samples or None, tokens or None
