"""Copies of device memory to the host and back, and when they are complete."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Copies(Protocol):
    """Copies between one device and the host. What they return is not to be read before ``wait``."""

    def out(self, there: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Begin a copy to the host, of bytes on the device. They must stay until it is complete."""

    def back(self, here: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Begin a copy to the device, of bytes that ``out`` returned, after it."""

    def wait(self, copy: Any) -> None:
        """Let the device do nothing further before a copy is complete."""


class InOrder:
    """Copies in the stream that computes: complete when what follows begins."""

    def __init__(self, device: torch.device, *, pin_memory: bool) -> None:
        self._device, self._pin = device, pin_memory

    def out(self, there: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Copy to the host."""
        here = torch.empty(there.shape, dtype=there.dtype, pin_memory=self._pin)
        return here.copy_(there, non_blocking=self._pin), None

    def back(self, here: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Copy to the device."""
        there = torch.empty(here.shape, dtype=here.dtype, device=self._device)
        return there.copy_(here, non_blocking=self._pin), None

    def wait(self, copy: None) -> None:
        """Nothing is out of order."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One that was begun beside a stream that computes."""

    done: torch.cuda.Event
    stream: torch.cuda.Stream
    """Which one, and whose device memory it is."""
    there: torch.Tensor
    """The device memory."""


class SideStream:
    """Copies in a stream of their own, beside what is computed.

        compute  ─── x made ─┬──────────── wait ─ x freed ───────┬─ memory for x ────── wait ─ x used
        side                 └─ x to host ───┘                   └─ wait ─ x from host ───┘

    Waits are events between the streams; the host waits for none. Device memory is taken and given back in
    the computing stream's order, so that the allocator may reuse it at once: ``record_stream`` would keep
    it for as long as the copy happens to take, and peaks would hang on timing. It is for the odd case only:
    a backward that uses in one stream what was fetched in another. Host memory that is freed while a copy
    reads it is kept by PyTorch's pinned allocator, which records an event with each copy
    (aten/src/ATen/native/cuda/Copy.cu).

    Copies to the device need not wait for those to the host: one stream does both, in order.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def out(self, there: torch.Tensor) -> tuple[torch.Tensor, Copy]:
        """Begin a copy to pinned memory, after what the computing stream has been given so far."""
        here = torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
        return here, self._copy(here, there, there)

    def back(self, here: torch.Tensor) -> tuple[torch.Tensor, Copy]:
        """Begin a copy to memory whose last use the computing stream may not have come to yet."""
        there = torch.empty(here.shape, dtype=here.dtype, device=self._device)
        return there, self._copy(there, here, there)

    def wait(self, copy: Copy) -> None:
        """Have the computing stream wait, and the one that it was begun beside."""
        now = torch.cuda.current_stream(self._device)
        now.wait_event(copy.done)
        if copy.stream != now:
            copy.stream.wait_event(copy.done)
            copy.there.record_stream(now)

    def _copy(self, to: torch.Tensor, source: torch.Tensor, there: torch.Tensor) -> Copy:
        now = torch.cuda.current_stream(self._device)
        self._side.wait_stream(now)
        with torch.cuda.stream(self._side):
            to.copy_(source, non_blocking=True)
            done: torch.cuda.Event = self._side.record_event()
        return Copy(done, now, there)
