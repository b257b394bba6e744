"""What a script asked of the allocator, read from the history of what the allocator did.

    history                                      requests
    segment_alloc, alloc 0x7000                  malloc
    free_requested 0x7000, free_completed        free
    free_requested 0x7000, ... free_completed    free later; the stream that still used it has gone on
    segment_free, not within a malloc            empty_cache
    oom                                          a malloc that failed

Everything else is the allocator's own doing, and is done anew in a replay.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum

from memfit.allocator.beginning import beginning, reserved_change
from memfit.allocator.config import AllocatorConfig
from memfit.errors import FileFormatError
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


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests in their order, as columns of equal length."""

    ask: list[int] = field(default_factory=list)
    block: list[int] = field(default_factory=list)
    """Which block: numbered in the order of their mallocs; -1 where none is meant."""
    size: list[int] = field(default_factory=list)
    """Bytes as requested; rounded for ``FAILED``."""
    stream: list[int] = field(default_factory=list)
    event: list[int] = field(default_factory=list)
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


_ALLOC, _FREE_REQUESTED, _FREE_COMPLETED, _OOM = map(
    int, (Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED, Action.OOM)
)
_GIVEN_BACK = frozenset(map(int, (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)))
_GOT = frozenset(map(int, (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)))
_ASKED = {MarkKind.EMPTY_CACHE: Ask.EMPTY_CACHE, MarkKind.TRAINING_STEP: Ask.STEP}


def requests(trace: Trace) -> Requests:
    """Read the requests from a trace.

    What was live before a history that begins late comes first, as mallocs of its blocks' sizes.

    Raises:
        FileFormatError: the history contradicts itself, or does not tell enough.
    """
    config = AllocatorConfig.read(trace.settings)
    _check(trace, config)
    start = beginning(trace, config)
    found = Requests(reserved_before=start.reserved)
    numbers: dict[int, int] = {}
    for address, (stop, _) in sorted((start.live | start.pending).items()):
        numbers[address] = len(numbers)
        found.add(Ask.MALLOC, 0, numbers[address], stop - address)
        if address in start.pending:
            found.add(Ask.FREE_LATER, 0, numbers[address])
    asked = _asked(trace, config, start.reserved)
    live = {address: numbers[address] for address in start.live}
    waiting = {address: numbers[address] for address in start.pending}
    _read(trace, found, live, waiting, asked)
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


def _read(
    trace: Trace,
    found: Requests,
    live: dict[int, int],
    waiting: dict[int, int],
    asked: list[tuple[int, Ask]],
) -> None:
    """Add the requests of every event; ``live`` and ``waiting`` are what was there before, by address."""
    events = trace.events
    actions, addresses = events.action.tolist(), events.address.tolist()
    rows = zip(actions, addresses, events.size.tolist(), events.stream.tolist(), strict=True)
    pending = deque(asked)
    count = len(live) + len(waiting)
    for event, (action, address, size, stream) in enumerate(rows):
        while pending and pending[0][0] <= event:
            found.add(pending.popleft()[1], event)
        if action == _ALLOC:
            live[address] = count
            found.add(Ask.MALLOC, event, count, size, stream)
            count += 1
        elif action == _FREE_REQUESTED:
            if address not in live:
                raise _unknown(event, len(events), address)
            number = live.pop(address)
            following = slice(event + 1, event + 2)
            if (actions[following], addresses[following]) == ([_FREE_COMPLETED], [address]):
                found.add(Ask.FREE, event, number)
            else:
                waiting[address] = number
                found.add(Ask.FREE_LATER, event, number)
        elif action == _FREE_COMPLETED and address in waiting:
            found.add(Ask.GONE_ON, event, waiting.pop(address))
        elif action == _OOM:
            found.add(Ask.FAILED, event, size=size, stream=stream)
    for _, ask in pending:
        found.add(ask, len(events))


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
    room = device.total.bytes - device.context.bytes - device.in_use if device.total.bytes else None
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
        if for_a_malloc and not collects and room is not None:
            before = reserved[first - 1] if first else reserved_before
            for_a_malloc = actions[event] == _OOM or before + sizes[event] > room
        if not for_a_malloc:
            found.append(first)
    return found


def _unknown(event: int, total: int, address: int) -> FileFormatError:
    return FileFormatError(
        f"Cannot replay this trace: event {event} of {total}, free_requested at {address:#x}, frees a block "
        "that is not in use. Part of the history is missing; record it again from the start."
    )
