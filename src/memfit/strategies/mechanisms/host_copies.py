"""Copies of device memory to the host and back, and when they are complete."""

from dataclasses import dataclass
from typing import Any

import torch


class HostCopier:
    """Copies between one device and the host, in the stream that computes.

    They are complete when its next work begins; results of a subclass must not be read before ``wait``.
    """

    def __init__(self, device: torch.device, *, pin_memory: bool = True) -> None:
        self._device, self._pin = device, pin_memory

    def host_memory(self, size: int) -> torch.Tensor:
        """Allocate bytes on the host."""
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self._pin)

    def to_host(
        self, on_device: torch.Tensor, on_host: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Any]:
        """Begin a copy of bytes to the host, to new memory or to what ``host_memory`` returned.

        The device memory must stay until the copy is complete.
        """
        if on_host is None:
            on_host = self.host_memory(on_device.numel())
        return on_host, self._copy(on_host, on_device, on_device)

    def to_device(self, on_host: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Begin a copy of bytes that ``to_host`` returned, after that copy."""
        on_device = torch.empty(on_host.shape, dtype=on_host.dtype, device=self._device)
        return on_device, self._copy(on_device, on_host, on_device)

    def wait(self, copy: Any) -> None:
        """Have the device complete a copy before it does anything else: the stream keeps the order."""

    def finish(self) -> None:
        """Have the host wait until every copy is complete."""
        torch.cuda.current_stream(self._device).synchronize()

    def _copy(self, target: torch.Tensor, source: torch.Tensor, _on_device: torch.Tensor) -> Any:
        target.copy_(source, non_blocking=self._pin)


@dataclass(frozen=True, slots=True)
class _PendingCopy:
    """A copy that runs beside a computing stream."""

    done: torch.cuda.Event
    stream: torch.cuda.Stream
    """The computing stream, which owns the device memory."""
    on_device: torch.Tensor
    """The device memory."""


class SideStreamCopier(HostCopier):
    """Copies in a stream of their own, beside the computation.

        compute  ─── x made ─┬──────────── wait ─ x freed ───────┬─ memory for x ────── wait ─ x used
        side                 └─ x to host ───┘                   └─ wait ─ x from host ───┘

    The streams wait for each other's events; the host waits for none. Device memory is allocated and freed in
    the computing stream's order, so that the allocator can reuse it at once: ``record_stream`` would hold it
    for as long as the copy happens to take, and peaks would depend on timing. ``record_stream`` is used in
    one rare case only: a backward that uses in one stream what was fetched in another. Host memory that is
    freed while a copy reads it is held by PyTorch's pinned allocator, which records an event with each copy
    (aten/src/ATen/native/cuda/Copy.cu).

    Copies to the device need not overtake those to the host: one stream does both, in order.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def wait(self, copy: _PendingCopy) -> None:
        """Have the current stream wait for a copy, and the stream beside which the copy began."""
        now = torch.cuda.current_stream(self._device)
        now.wait_event(copy.done)
        if copy.stream != now:
            copy.stream.wait_event(copy.done)
            copy.on_device.record_stream(now)

    def finish(self) -> None:
        """Wait for the side stream."""
        self._side.synchronize()

    def _copy(self, target: torch.Tensor, source: torch.Tensor, on_device: torch.Tensor) -> _PendingCopy:
        now = torch.cuda.current_stream(self._device)
        self._side.wait_stream(now)
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)
            done: torch.cuda.Event = self._side.record_event()
        return _PendingCopy(done, now, on_device)
