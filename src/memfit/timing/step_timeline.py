"""A training step as queues: the host issues kernels in order, and each stream runs its own one by one.

    host      issue ─ issue ─ issue ─ ... ─ item(): waits for the GPU ─ issue ─ ...
    stream 0         kernel ──── kernel ── kernel ── waits ─ kernel ...
    stream 7                           collective ────────┘

A kernel begins when the host has issued it, its stream is free, and what its stream waits for has ended.
Steps follow each other: the host may be ahead of the GPU by much of a step, so the time of a step is that
from the end of one to the end of the next.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

_STEPS = 3
"""Steps that are simulated: the last one begins with the lead that the host has in all later ones."""


@dataclass(frozen=True, slots=True)
class QueuedWork:
    """One operation in the order of the host's."""

    issue: float
    """Seconds that the host needs before it has issued it."""
    seconds: float
    """That it runs on the GPU."""
    stream: int = 0
    waits: bool = False
    """Whether the host then waits for its stream."""
    after: tuple[int, ...] = ()
    """Work of other streams that must have ended first, by its place in the step."""


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """When what happens in a step, in the long run. Seconds, from the end of the step before."""

    seconds: float
    busy: dict[int, float] = field(hash=False)
    """By stream: how long it works."""
    working: float
    """How long any stream works."""
    host: float
    """How long the host issues work, waits left out."""
    starts: tuple[float, ...]
    """When each operation begins on the GPU."""
    issued: tuple[float, ...]
    """When the host has issued each; before 0 if the host is so far ahead."""


def step_timeline(work: Iterable[QueuedWork]) -> StepTimeline:
    """Simulate a step that is repeated.

    Args:
        work: of one step, in the host's order.

    >>> kernel = QueuedWork(issue=1e-5, seconds=1e-4)
    >>> timeline = step_timeline([kernel] * 10)
    >>> round(timeline.seconds, 6), round(timeline.host, 6)
    (0.001, 0.0001)
    >>> bound = step_timeline([QueuedWork(issue=1e-4, seconds=1e-5)] * 10)
    >>> round(bound.seconds, 6)
    0.001
    """
    queue = tuple(work)
    now, end, before = 0.0, 0.0, 0.0
    free: defaultdict[int, float] = defaultdict(float)
    starts: list[float] = []
    issued: list[float] = []
    for _ in range(_STEPS):
        before, starts, issued = end, [], []
        for each in queue:
            now += each.issue
            issued.append(now)
            start = max(
                now, free[each.stream], *(starts[place] + queue[place].seconds for place in each.after)
            )
            if each.seconds or each.after:
                free[each.stream] = start + each.seconds
            starts.append(start)
            if each.waits:
                now = max(now, free[each.stream])
        end = max(now, *free.values())
    busy: defaultdict[int, float] = defaultdict(float)
    for each in queue:
        busy[each.stream] += each.seconds
    host = sum(each.issue for each in queue)
    working, until = 0.0, 0.0
    for start, each in sorted(zip(starts, queue, strict=True), key=lambda pair: pair[0]):
        working += max(start + each.seconds - max(start, until), 0.0)
        until = max(until, start + each.seconds)
    since_before = (tuple(moment - before for moment in each) for each in (starts, issued))
    return StepTimeline(end - before, dict(busy), min(working, end - before), host, *since_before)
