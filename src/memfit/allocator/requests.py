"""What a script asked of the allocator, read from the history of what the allocator did.

    history                                      requests
    segment_alloc, alloc 0x7000                  malloc
    free_requested 0x7000, free_completed        free
    free_requested 0x7000, ... free_completed    free later; the stream that still used it has gone on
    segment_free, not within a malloc            empty_cache
    oom                                          a malloc that failed

Everything else is the allocator's own doing, and is done anew in a replay.
"""

from array import array
from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial

import numpy as np

from memfit.allocator.beginning import beginning, reserved_change
from memfit.allocator.config import AllocatorConfig
from memfit.allocator.walk import Walk
from memfit.errors import FileFormatError, UsageError
from memfit.records import Action, MarkKind, Trace


class Ask(IntEnum):
    """What is asked for."""

    MALLOC = 0
    FREE = 1
    FREE_LATER = 2
    """Freed by the script, and another stream still uses it."""
    GONE_ON = 3
    """That stream has gone on."""
    EMPTY_CACHE = 4
    FAILED = 5
    """A malloc that failed when the history was made."""
    STEP = 6
    """A training step has ended."""


_column = partial(array, "q")  # where compiled code finds them as they are


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests in their order, as columns of equal length."""

    ask: "array[int]" = field(default_factory=_column)
    block: "array[int]" = field(default_factory=_column)
    """Which block: numbered in the order of their mallocs; -1 where none is meant."""
    size: "array[int]" = field(default_factory=_column)
    """Bytes as requested; rounded for ``FAILED``."""
    stream: "array[int]" = field(default_factory=_column)
    event: "array[int]" = field(default_factory=_column)
    """The event of the history that tells of it."""
    reserved_before: int = 0
    """Bytes that were reserved before the history begins: which segments is not known."""

    def add(self, ask: Ask, event: int, block: int = -1, size: int = 0, stream: int = 0) -> None:
        """Add one."""
        self.ask.append(int(ask))
        self.block.append(block)
        self.size.append(size)
        self.stream.append(stream)
        self.event.append(event)

    def add_all(self, ask: Ask, event: int, blocks: list[int]) -> None:
        """Add one for each of some blocks."""
        for block in blocks:
            self.add(ask, event, block)


_ALLOC, _FREE_REQUESTED, _FREE_COMPLETED, _OOM = map(
    int, (Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED, Action.OOM)
)
_MOST = 1 << 47
"""Bytes that a process can address."""
_GIVEN_BACK = frozenset(map(int, (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)))
_GOT = frozenset(map(int, (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)))
_ASKED = {MarkKind.EMPTY_CACHE: Ask.EMPTY_CACHE, MarkKind.TRAINING_STEP: Ask.STEP}


def requests(trace: Trace) -> Requests:
    """Read the requests from a trace.

    What was live before a history that begins late comes first, as mallocs of its blocks' sizes.

    Raises:
        FileFormatError: the history contradicts itself, or does not tell enough.
    """
    try:
        config = AllocatorConfig.read(trace.settings)
    except UsageError as error:
        raise FileFormatError(f"Cannot replay this trace: {error}") from None
    _check(trace, config)
    start = beginning(trace, config)
    found = Requests(reserved_before=start.reserved)
    numbers: dict[int, int] = {}
    for address, (stop, _) in sorted((start.live | start.pending).items()):
        numbers[address] = len(numbers)
        found.add(Ask.MALLOC, 0, numbers[address], stop - address)
        if address in start.pending:
            found.add(Ask.FREE_LATER, 0, numbers[address])
    Walk(trace.events, config, start).to(len(trace.events))  # raises where an event cannot be
    asked = _asked(trace, config, start.reserved)
    live = {address: numbers[address] for address in start.live}
    waiting = {address: numbers[address] for address in start.pending}
    _Reader(trace, found, live, waiting).read(asked)
    return found


def _check(trace: Trace, config: AllocatorConfig) -> None:
    if not config.has_segments:
        made = f"backend:{config.backend}" if config.caching else "PYTORCH_NO_CUDA_MEMORY_CACHING"
        raise FileFormatError(
            f"Cannot replay this trace: it was made with {made}, and its history does not tell enough. "
            "Record it with PyTorch's own caching allocator."
        )
    if any(segment.pool != (0, 0) for segment in trace.segments):
        raise FileFormatError(
            "Cannot replay this trace: it has private pools (of CUDA graphs or torch.cuda.MemPool), and the "
            "file does not say which allocations are theirs."
        )
    events = trace.events
    least = np.isin(events.action, (_ALLOC, _OOM)).astype(int)  # for 0 bytes PyTorch makes no block
    absurd = np.flatnonzero((events.size < least) | (events.size > _MOST))
    if len(absurd):
        event = int(absurd[0])
        raise FileFormatError(
            f"Cannot replay this trace: event {event} of {len(events)}, "
            f"{Action(events.action[event]).name.lower()}, has {events.size[event]:,} bytes, "
            f"and sizes are from 1 to {_MOST:,}. It was cut or changed; record it again."
        )


class _Reader:
    """Turns events into requests.

    Args:
        trace: whose events.
        found: where the requests go.
        live: blocks in use before the first event, by address.
        waiting: blocks that were freed before it, and not yet free.
    """

    def __init__(self, trace: Trace, found: Requests, live: dict[int, int], waiting: dict[int, int]) -> None:
        self._actions = trace.events.action.tolist()
        self._addresses = trace.events.address.tolist()
        self._sizes = trace.events.size.tolist()
        self._streams = trace.events.stream.tolist()
        self._found = found
        self._live = live
        self._waiting = waiting
        self._count = len(live) + len(waiting)
        self._gone: list[int] = []  # blocks whose free was completed since the last malloc
        self._short = False  # whether memory was given back since

    def read(self, asked: list[tuple[int, Ask]]) -> None:
        """Read every event, and put what is marked between them."""
        pending = deque(asked)
        end = len(self._actions)
        for event, (action, address) in enumerate(zip(self._actions, self._addresses, strict=True)):
            while pending and pending[0][0] <= event:
                self._found.add(pending.popleft()[1], event)
            if action in (_ALLOC, _OOM):
                self._malloc(event, failed=action == _OOM)
            elif action == _FREE_REQUESTED:
                self._free(event, address)
            elif action == _FREE_COMPLETED and address in self._waiting:
                self._gone.append(self._waiting.pop(address))
            elif action in _GIVEN_BACK:
                self._short = True
        self._found.add_all(Ask.GONE_ON, end, self._gone)
        for _, ask in pending:
            self._found.add(ask, end)

    def _malloc(self, event: int, *, failed: bool) -> None:
        """Add a malloc; it begins by completing what it can, and waits for the rest if memory is short."""
        found, size, stream = self._found, self._sizes[event], self._streams[event]
        if not self._short:
            found.add_all(Ask.GONE_ON, event, self._gone)
        if failed:
            found.add(Ask.FAILED, event, size=size, stream=stream)
        else:
            self._live[self._addresses[event]] = self._count
            found.add(Ask.MALLOC, event, self._count, size, stream)
            self._count += 1
        if self._short:
            found.add_all(Ask.GONE_ON, event, self._gone)
        self._gone, self._short = [], False

    def _free(self, event: int, address: int) -> None:
        number = self._live.pop(address)
        following = slice(event + 1, event + 2)
        if (self._actions[following], self._addresses[following]) == ([_FREE_COMPLETED], [address]):
            self._found.add(Ask.FREE, event, number)
        else:
            self._waiting[address] = number
            self._found.add(Ask.FREE_LATER, event, number)


def _asked(trace: Trace, config: AllocatorConfig, reserved_before: int) -> list[tuple[int, Ask]]:
    """Return calls that are marked, and those of ``empty_cache`` that are not but have left their trace."""
    marks = [(mark.position, _ASKED[mark.kind]) for mark in trace.marks if mark.kind in _ASKED]
    if not any(ask is Ask.EMPTY_CACHE for _, ask in marks):
        marks += [(event, Ask.EMPTY_CACHE) for event in _emptied(trace, config, reserved_before)]
    return sorted(marks)


def _emptied(trace: Trace, config: AllocatorConfig, reserved_before: int) -> list[int]:
    """Return where segments were given back though no malloc was short of memory."""
    actions, sizes = trace.events.action.tolist(), trace.events.size.tolist()
    reserved = (reserved_before + reserved_change(trace.events).cumsum()).tolist()
    device = trace.device
    # Of a device that is not known, as much is free as was ever reserved.
    room = max(reserved, default=0)
    if trace.statistics.get("num_alloc_retries") == 0:
        room = sum(map(abs, sizes))  # no malloc was ever short
    elif device.total.bytes:
        room = device.total.bytes - device.context.bytes - device.in_use
    collects = config.garbage_collection_threshold > 0 or config.max_split_size is not None
    found, event = [], 0
    while event < len(actions):
        if actions[event] not in _GIVEN_BACK:
            event += 1
            continue
        first = event
        while event < len(actions) and (actions[event] in _GIVEN_BACK or actions[event] == _FREE_COMPLETED):
            event += 1
        for_a_malloc = event < len(actions) and (actions[event] in _GOT or actions[event] == _OOM)
        if for_a_malloc and not collects:
            before = reserved[first - 1] if first else reserved_before
            for_a_malloc = actions[event] == _OOM or before + sizes[event] > room
        if not for_a_malloc:
            found.append(first)
    return found
