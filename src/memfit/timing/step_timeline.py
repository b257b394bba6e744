"""A training step as queues: the host issues kernels in order, and each stream runs its own one by one.

    host      issue ─ issue ─ issue ─ ... ─ item(): waits for the GPU ─ issue ─ ...
    stream 0         kernel ──── kernel ── kernel ── waits ─ kernel ...
    stream 7                           collective ────────┘

A kernel begins when the host has issued it, its stream is free, and what its stream waits for has ended.
Kernels of several streams share the card: while they need more than there is, all take longer.
Steps follow each other: the host may be ahead of the GPU by much of a step, so the time of a step is that
from the end of one to the end of the next.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

_SEVERAL = 2
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
    share: float = 0.0
    """Of the card that it keeps busy meanwhile, from 0 to 1."""


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
    """When each operation begins on the GPU, if streams did not slow each other."""
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
    crowded = _seconds_of_crowding(queue, starts)
    busy: defaultdict[int, float] = defaultdict(float)
    for each in queue:
        busy[each.stream] += each.seconds
    host = sum(each.issue for each in queue)
    working, until = 0.0, 0.0
    for start, each in sorted(zip(starts, queue, strict=True), key=lambda pair: pair[0]):
        working += max(start + each.seconds - max(start, until), 0.0)
        until = max(until, start + each.seconds)
    since_before = (tuple(moment - before for moment in each) for each in (starts, issued))
    seconds, working = end - before + crowded, min(working, end - before) + crowded
    return StepTimeline(seconds, dict(busy), working, host, *since_before)


def _seconds_of_crowding(queue: Sequence[QueuedWork], starts: Sequence[float]) -> float:
    """Return how much longer all takes because work of several streams needs more than the whole card."""
    if len({each.stream for each in queue if each.share}) < _SEVERAL:
        return 0.0
    changes = sorted(
        change
        for start, each in zip(starts, queue, strict=True)
        for change in ((start, each.share), (start + each.seconds, -each.share))
    )
    crowded, needed = 0.0, 0.0
    for (moment, change), (following, _) in pairwise(changes):
        needed += change
        crowded += (following - moment) * max(needed - 1, 0.0)
    return crowded
