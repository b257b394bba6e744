"""Saved tensors on the host between a forward and its backward.

    forward    a saved, copy begun ──> b saved, a's memory free ──> c saved, b's memory free
    backward   c still on the device ──> b fetched while c is used ──> a fetched while b is used    prefetch=1

The unit that moves is a storage, not a tensor: its memory is free when no tensor uses it any more, and
tensors that share it are moved once. A storage that was written to in between counts as another one.
"""

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.multiprocessing.reductions import StorageWeakRef

from memfit.dispatch_modes import without_dispatch_modes
from memfit.recording.tensor_storage import storage_of
from memfit.strategies.mechanisms.host_copies import HostCopier
from memfit.strategies.mechanisms.inspect_tensors import tensor_version
from memfit.strategies.mechanisms.replayable_operations import PlaceInStorage


class _KeptTensor:
    """A saved tensor that stays on the device.

    With hooks, autograd leaves it to them to check whether the tensor was written to before its use.
    """

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self._version = tensor_version(tensor)

    def unpack(self) -> torch.Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: it was changed in place; autograd raises the same without hooks.
        """
        if tensor_version(self._tensor) != self._version:
            raise _modified(self._tensor.shape)
        return self._tensor


class _OffloadedStorage:
    """A storage that is on the host, or on its way there or back."""

    def __init__(self, tensor: torch.Tensor, previous: "_OffloadedStorage | None") -> None:
        self.version, self.shape = tensor._version, tensor.shape
        self._root, self._region = weakref.ref(_root(tensor)), _region(tensor)
        self.modified = False
        """Whether it was written to while it was copied."""
        self.previous = weakref.ref(previous) if previous else None
        """The storage offloaded before this one, which backward needs after it."""
        self.source: torch.Tensor | None = tensor.detach()
        """The tensor, while it is still on the device."""
        self.on_host: torch.Tensor | None = None
        """The storage's bytes on the host."""
        self.fetched: torch.Tensor | None = None
        """The storage's bytes, back on the device."""
        self.leaving: Any = None
        """The copy to the host, until it is complete."""
        self.users = 0
        """Tensors saved on it that backward has not used yet."""

    def covers(self, tensor: torch.Tensor) -> bool:
        """Return whether the bytes on the host are those of a tensor on the same storage, as it is now.

        Versions answer that for tensors that share a count: views of one tensor, or the same tensor again
        (results are saved as another object). Parts that were split off without being views, as recurrent
        layers do (``unsafe_chunk``), have counts of their own.
        """
        same_region = self._region == _region(tensor)
        if tensor._version != self.version or not (same_region or self._root() is _root(tensor)):
            return False
        self._root = weakref.ref(_root(tensor))
        return True

    def on_device(self) -> torch.Tensor | None:
        """Return the bytes on the device, if they are there."""
        return _bytes_of(self.source) if self.source is not None else self.fetched

    def check(self) -> None:
        """Check that the storage was not written to while it was copied: the copy may hold parts of either.

        Raises:
            RuntimeError: it was; plain autograd refuses that too.
        """
        if self.modified or (self.source is not None and self.source._version != self.version):
            raise _modified(self.shape)


class _DeviceLane:
    """The storages that move between one device and the host.

    Args:
        copies: makes the copies.
        prefetch: storages that may be on their way at once, in either direction, beside the computation.
    """

    def __init__(self, copies: HostCopier, prefetch: int) -> None:
        self._copies, self._prefetch = copies, prefetch
        self._leaving: deque[weakref.ref[_OffloadedStorage]] = deque()
        self._arriving: dict[_OffloadedStorage, Any] = {}
        self._last: weakref.ref[_OffloadedStorage] | None = None

    def offload(self, tensor: torch.Tensor) -> _OffloadedStorage:
        """Begin to move a tensor's storage to the host."""
        storage = _OffloadedStorage(tensor, self._last() if self._last else None)
        self._last = weakref.ref(storage)
        storage.on_host, storage.leaving = self._copies.to_host(_bytes_of(tensor))
        self._leaving.append(weakref.ref(storage))
        while len(self._leaving) > self._prefetch:
            self._release_source(self._leaving.popleft()())
        return storage

    def fetch(self, storage: _OffloadedStorage) -> torch.Tensor:
        """Return a storage's bytes on the device, and begin to fetch those that backward needs next.

        Raises:
            RuntimeError: it was changed in place while it was copied.
        """
        storage.check()
        found = storage.on_device()
        if found is None:
            found = self._begin_fetch(storage)
        if storage in self._arriving:
            self._copies.wait(self._arriving.pop(storage))
        storage.users -= 1
        if storage.users <= 0:
            # The caller holds the bytes from now on; a second backward fetches them again.
            storage.fetched = None
        following: _OffloadedStorage | None = storage
        for _ in range(self._prefetch):
            following = following.previous() if following and following.previous else None
            if following is not None and following.on_device() is None:
                self._begin_fetch(following)
        return found

    def finish_fetches(self) -> None:
        """Wait for everything that was prefetched and not used: its memory is not freed before."""
        for copy in self._arriving.values():
            self._copies.wait(copy)
        self._arriving.clear()

    def _begin_fetch(self, storage: _OffloadedStorage) -> torch.Tensor:
        if storage.on_host is None:
            raise AssertionError("this storage was fetched before it was offloaded")
        # The dictionary holds the storage too: if the graph is dropped, its memory must not be reused while
        # the copy writes to it.
        storage.fetched, self._arriving[storage] = self._copies.to_device(storage.on_host)
        return storage.fetched

    def _release_source(self, storage: _OffloadedStorage | None) -> None:
        # None if the graph was dropped: its memory may be overwritten while the copy reads it, but nothing
        # will read the copy.
        if storage is not None:
            self._copies.wait(storage.leaving)
            storage.modified = storage.source is not None and storage.source._version != storage.version
            storage.source = storage.leaving = None


class SavedTensorOffloader:
    """Saved-tensor hooks that move tensors to the host.

    Args:
        copies: makes the copies of a device; None for a device whose tensors stay.
        min_bytes: smaller storages stay.
        prefetch: as for ``_DeviceLane``.
    """

    def __init__(
        self, copies: Callable[[torch.device], HostCopier | None], min_bytes: int, prefetch: int
    ) -> None:
        self._copies, self._min_bytes, self._prefetch = copies, min_bytes, prefetch
        self._lanes: dict[torch.device, _DeviceLane | None] = {}
        self._offloaded: weakref.WeakValueDictionary[StorageWeakRef, _OffloadedStorage] = (
            weakref.WeakValueDictionary()
        )
        self._owned: set[int] = set()
        self.count = 0
        """Storages offloaded so far."""

    @property
    def saw_movable_device(self) -> bool | None:
        """Whether tensors were saved on a device that can offload; None before anything was saved."""
        return any(self._lanes.values()) if self._lanes else None

    @_disable_dynamo
    def begin_forward(self, model: nn.Module) -> None:
        """Note where the model's parameters and buffers are: they stay on the device."""
        owned = (*model.parameters(), *model.buffers())
        self._owned = {storage_of(tensor).data_ptr() for tensor in owned if _readable(tensor)}
        for lane in self._lanes.values():
            if lane is not None:
                lane.finish_fetches()

    def hooks(self) -> AbstractContextManager[Any]:
        """Return the context in which saved tensors are offloaded."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack_hook, self._unpack_hook)

    def _pack_hook(self, tensor: torch.Tensor) -> Any:
        with without_dispatch_modes():
            return self._pack(tensor)

    def _unpack_hook(self, packed: Any) -> torch.Tensor:
        with without_dispatch_modes():
            return self._unpack(packed)

    def _pack(self, tensor: torch.Tensor) -> Any:
        lane = self._lane(tensor.device)
        if lane is None or not _readable(tensor) or tensor.is_inference():
            return _KeptTensor(tensor)
        storage = storage_of(tensor)
        if storage.nbytes() < self._min_bytes or storage.data_ptr() in self._owned:
            return _KeptTensor(tensor)
        # The reference, while it is held, keeps another storage from getting the same address.
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        offloaded = self._offloaded.get(reference)
        if offloaded is None or not offloaded.covers(tensor):
            self._offloaded[reference] = offloaded = lane.offload(tensor)
            self.count += 1
        offloaded.users += 1
        return offloaded, lane, PlaceInStorage.of(tensor)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, _KeptTensor):
            return packed.unpack()
        offloaded, lane, place = packed
        tensor: torch.Tensor = place.tensor(lane.fetch(offloaded).untyped_storage())
        return tensor

    def _lane(self, device: torch.device) -> _DeviceLane | None:
        if device not in self._lanes:
            copies = self._copies(device)
            self._lanes[device] = _DeviceLane(copies, self._prefetch) if copies is not None else None
        return self._lanes[device]


def _modified(shape: torch.Size) -> RuntimeError:
    return RuntimeError(
        f"one of the variables needed for gradient computation, of shape {list(shape)}, has "
        "been modified by an inplace operation after it was saved (memfit's offload found "
        "this; without offload, autograd raises the same error)"
    )


def _root(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


def _region(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tensor.shape, tensor.stride()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor's storage as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _readable(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in {torch.Tensor, nn.Parameter} and tensor.layout is torch.strided
    return plain and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_meta)
