"""A block of optimizer state, which moves between the host and the device as a whole."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from memfit.strategies.mechanisms.host_copies import HostCopies

Memory = dict[torch.dtype, torch.Tensor]
"""Bytes, by the dtype of the tensors in them: ``torch.save`` refuses memory that several dtypes share."""
_ALIGNMENT = 512  # bytes, as PyTorch's allocator aligns: kernels load vectors as they do without offload


class StateBlock:
    """The state of some parameters: tensors whose memory moves together.

    The tensors stay the same objects. Their ``data`` is memory of the host or, while in use, of the device.
    Parameters among them (float32 copies of the model's) keep their device and shape for the sake of their
    gradients: while their values are on the host, each of their elements is the same NaN.

    Args:
        device: of the parameters.
        to_device, to_host: the copies in each direction.
    """

    def __init__(self, device: torch.device, to_device: HostCopies, to_host: HostCopies) -> None:
        self.device = device
        self._to_device, self._to_host = to_device, to_host
        self._tensors: list[torch.Tensor] = []
        self._layouts: list[torch.Tensor] = []  # of the tensors, without memory
        self._on_host: Memory | None = None
        self._arriving: dict[torch.dtype, tuple[torch.Tensor, Any]] | None = None
        self._in_use: Memory | None = None
        self._target: Memory | None = None  # while the tensors' memory is being replaced
        self._nan: torch.Tensor | None = None

    def fetch(self) -> None:
        """Begin to copy the state to the device, unless it is there or on its way."""
        if self._on_host is not None and self._in_use is None and self._arriving is None:
            self._arriving = {
                dtype: self._to_device.to_device(memory) for dtype, memory in self._on_host.items()
            }

    def forget_fetched(self) -> None:
        """Free what was fetched and not used."""
        if self._arriving is not None:
            for _, copy in self._arriving.values():
                self._to_device.wait(copy)
            self._arriving = None

    def enter(self, state: list[torch.Tensor]) -> None:
        """Have the optimizer find its state, which consists of these tensors, on the device."""
        own = {id(tensor) for tensor in self._tensors}
        found = [tensor for tensor in state if id(tensor) in own]
        if len(found) < len(own):  # the state was replaced, as by load_state_dict
            self.forget_fetched()
            for tensor in found:
                tensor.data = self.value_of(tensor).to(self.device)
            self._tensors, self._layouts, self._on_host, self._in_use = [], [], None, None
            return
        self.fetch()
        if self._arriving is not None:
            for _, copy in self._arriving.values():
                self._to_device.wait(copy)
            memory = {dtype: fetched for dtype, (fetched, _) in self._arriving.items()}
            self._in_use, self._target, self._arriving = memory, memory, None
            self.complete()

    def leave(self, state: list[torch.Tensor]) -> Callable[[], None]:
        """Begin to copy the state to the host; return what waits for that and then frees device memory."""
        tensors = [tensor for tensor in state if tensor.device == self.device and _is_dense(tensor)]
        at_rest = self._in_use is None and self._on_host is not None
        if at_rest or not tensors:
            return lambda: None
        on_host, layouts = self._on_host, self._layouts
        same = list(map(id, tensors)) == list(map(id, self._tensors))
        if self._in_use is not None and on_host is not None and same:
            leaving = list(self._in_use.values())
            arriving = [on_host[dtype] for dtype in self._in_use]
        else:  # new tensors, as in the first update
            layouts = [torch.empty_like(tensor, device="meta") for tensor in tensors]
            on_host = {
                dtype: self._to_host.host_memory(sum(_padded(one) for one in layouts if one.dtype == dtype))
                for dtype in dict.fromkeys(tensor.dtype for tensor in tensors)
            }
            leaving = [_bytes_of(tensor) for tensor in tensors]
            arriving = [_bytes_of(view) for view in _views(on_host, layouts)]
        copies = [self._to_host.to_host(*pair)[1] for pair in zip(leaving, arriving, strict=True)]
        self._tensors, self._layouts = tensors, layouts
        self._on_host, self._target, self._in_use = on_host, on_host, None
        self.complete()

        def release() -> None:
            for copy in copies:
                self._to_host.wait(copy)
            leaving.clear()

        return release

    def complete(self) -> None:
        """Complete a replacement of the tensors' memory that an exception, such as Ctrl-C, interrupted."""
        if self._target is None:
            return
        for tensor, view in zip(self._tensors, _views(self._target, self._layouts), strict=True):
            is_stand_in = self._target is self._on_host and isinstance(tensor, nn.Parameter)
            tensor.data = self._stand_in(tensor) if is_stand_in else view
        self._target = None

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the memory of one of the tensors, wherever it is."""
        if self._in_use is None and self._on_host is not None:
            for own, view in zip(self._tensors, _views(self._on_host, self._layouts), strict=True):
                if own is tensor:
                    return view
        return tensor

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._nan is None:
            self._nan = torch.full((1,), math.nan, dtype=tensor.dtype, device=self.device)
        return self._nan.as_strided(tensor.size(), [0] * tensor.dim())


def _views(memory: Memory, layouts: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors in a block's memory."""
    starts = dict.fromkeys(memory, 0)
    for tensor in layouts:
        start = starts[tensor.dtype]
        own = memory[tensor.dtype][start : start + tensor.numel() * tensor.element_size()]
        yield own.view(tensor.dtype).as_strided(tensor.size(), tensor.stride())
        starts[tensor.dtype] += _padded(tensor)


def _padded(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor in a block."""
    return -(tensor.numel() * tensor.element_size() // -_ALIGNMENT) * _ALIGNMENT


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a dense tensor as bytes."""
    size, start = tensor.element_size(), tensor.storage_offset() * tensor.element_size()
    plain = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return plain.set_(tensor.untyped_storage(), start, (tensor.numel() * size,), (1,))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements fill its memory, so that its bytes are its value."""
    return tensor.layout is torch.strided and bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))
