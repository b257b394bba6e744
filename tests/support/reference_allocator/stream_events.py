"""Freed blocks that other streams used, and the events they wait for.

    stream 1   event, event, event      events of a stream complete in order
    stream 2   event                    a block is free once its last event has completed

While a CUDA graph is captured no event may be queried: blocks freed meanwhile are deferred.

Source: ``insert_events``, ``insert_events_deferred_until_no_capture`` and ``process_events`` of
``DeviceCachingAllocator``, c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.14.1.
"""

from collections import deque

from support.reference_allocator.blocks import Block


class StreamEvent:
    """The end of a stream's use of a block."""

    __slots__ = ("block", "done")

    def __init__(self, block: Block) -> None:
        self.block = block
        self.done = False


class StreamEventQueues:
    """The outstanding events of one allocator."""

    __slots__ = ("deferred", "queues")

    def __init__(self) -> None:
        self.queues: dict[int, deque[StreamEvent]] = {}
        """Outstanding events by stream; no queue is empty."""
        self.deferred: list[Block] = []

    def outstanding(self) -> list[StreamEvent]:
        """Return the outstanding events."""
        return [event for queue in self.queues.values() for event in queue]

    def insert(self, block: Block) -> None:
        """Record an event on each other stream that used a freed block."""
        for stream in block.uses or ():
            block.events += 1
            self.queues.setdefault(stream, deque()).append(StreamEvent(block))
        block.uses = None

    def insert_deferred(self) -> None:
        """Record the events of the deferred blocks, once no graph is captured."""
        for block in self.deferred:
            self.insert(block)
        self.deferred = []

    def end(self, stream: int) -> None:
        """Complete the events of a stream."""
        for event in self.queues.get(stream, ()):
            event.done = True

    def end_all(self) -> None:
        """Complete the events of every stream."""
        for event in self.outstanding():
            event.done = True

    def process(self) -> list[Block]:
        """Return the blocks whose last event has completed, in order of completion."""
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
