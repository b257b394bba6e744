"""A stand-in for a side stream, whose copies are as late as they may be."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memfit.dispatch_modes import without_dispatch_modes
from memfit.strategies import apply
from memfit.strategies.mechanisms import offloaded_optimizer_state


@dataclass(eq=False)
class QueuedCopy:
    """A copy that was begun."""

    target: "Region"
    source: "Region"
    kept: torch.Tensor | None


class Region:
    """Bytes of a storage that others keep alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._region = tensor.storage_offset(), tensor.shape, tensor.stride()

    @property
    def is_freed(self) -> bool:
        return self._storage.expired()

    def bytes(self) -> torch.Tensor:
        whole = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        return torch.empty(0, dtype=torch.uint8).set_(whole, *self._region)


class LateStream:
    """Makes each copy as late as a real stream may: when something waits for it.

    Until then the target holds bytes of 255, which are NaN as numbers, and releasing the source's memory too
    early fails the test.
    """

    def __init__(self) -> None:
        self.queue: deque[QueuedCopy] = deque()
        self.log: list[str] = []
        self.hosts: list[torch.Tensor] = []
        """The memory that plays the host's."""

    def host_memory(self, size: int) -> torch.Tensor:
        self.hosts.append(torch.empty(size, dtype=torch.uint8))
        return self.hosts[-1]

    def to_host(self, on_device: torch.Tensor, on_host: torch.Tensor | None = None):
        if on_host is None:
            on_host = torch.empty_like(on_device)
        return on_host.fill_(255), self._put("out", on_host, on_device)

    def to_device(self, on_host: torch.Tensor):
        on_device = torch.full_like(on_host, 255)
        return on_device, self._put("back", on_device, on_host)

    def wait(self, job: QueuedCopy) -> None:
        self.log.append("wait")
        while job in self.queue:
            self._make(self.queue.popleft())

    def finish(self) -> None:
        self.log.append("finish")
        while self.queue:
            self._make(self.queue.popleft())

    def _put(self, what: str, target: torch.Tensor, source: torch.Tensor) -> QueuedCopy:
        # PyTorch's pinned allocator keeps host memory until the copy is done; nothing keeps device memory.
        self.log.append(what)
        self.queue.append(QueuedCopy(Region(target), Region(source), source if what == "back" else None))
        return self.queue[-1]

    def _make(self, due: QueuedCopy) -> None:
        if not due.target.is_freed:
            assert not due.source.is_freed, "device memory was released during its copy"
            with without_dispatch_modes():  # the stream works by itself: a fault in the script is not its own
                due.target.bytes().copy_(due.source.bytes())


@contextmanager
def late_state_copies() -> Iterator[list[LateStream]]:
    """Have optimizer state of the CPU move between two places in its memory, in several blocks.

    Yields:
        The streams: to the place that plays the device, and to the one that plays the host.
    """
    made: list[LateStream] = []

    def late(_: torch.device) -> LateStream:
        made.append(LateStream())
        return made[-1]

    with (
        mock.patch.object(offloaded_optimizer_state, "host_copier_for_device", late),
        mock.patch.object(apply, "BLOCK_BYTES", 64),
    ):
        yield made
