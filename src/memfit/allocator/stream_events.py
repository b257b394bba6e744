"""Freed blocks that other streams have used, and the events that they wait for.

    stream 1   event, event, event      they end in their order
    stream 2   event                    a block is free once its last one has ended, of any stream

While a CUDA graph is captured no event may be asked for: blocks that are freed then are deferred.

Source: ``insert_events``, ``insert_events_deferred_until_no_capture`` and ``process_events`` of
``DeviceCachingAllocator``, c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.14.1.
"""

from collections import deque

from memfit.allocator.blocks import Block


class StreamEvent:
    """The end of a stream's use of a block."""

    __slots__ = ("block", "done")

    def __init__(self, block: Block) -> None:
        self.block = block
        self.done = False


class StreamEventQueues:
    """The events of one allocator."""

    __slots__ = ("deferred", "queues")

    def __init__(self) -> None:
        self.queues: dict[int, deque[StreamEvent]] = {}
        """Those that are waited for, by stream; no queue is empty."""
        self.deferred: list[Block] = []

    def outstanding(self) -> list[StreamEvent]:
        """Return those that are waited for."""
        return [event for queue in self.queues.values() for event in queue]

    def insert(self, block: Block) -> None:
        """Have a freed block wait for the other streams that used it."""
        for stream in block.uses or ():
            block.events += 1
            self.queues.setdefault(stream, deque()).append(StreamEvent(block))
        block.uses = None

    def insert_deferred(self) -> None:
        """Do so with the blocks that were deferred: nothing is captured any more."""
        for block in self.deferred:
            self.insert(block)
        self.deferred = []

    def end(self, stream: int) -> None:
        """Note that a stream has gone on beyond its events."""
        for event in self.queues.get(stream, ()):
            event.done = True

    def end_all(self) -> None:
        """Note that every stream has."""
        for event in self.outstanding():
            event.done = True

    def process(self) -> list[Block]:
        """Return the blocks whose last event has ended, in that order: they wait no longer."""
        free = []
        for stream, queue in list(self.queues.items()):
            while queue and queue[0].done:
                block = queue.popleft().block
                block.events -= 1
                if block.events == 0:
                    block.waits = False
                    free.append(block)
            if not queue:
                del self.queues[stream]
        return free
