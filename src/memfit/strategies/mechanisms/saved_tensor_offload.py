"""Saved tensors on the host between a forward and its backward.

    forward    a saved, on its way ──> b saved, a's memory free ──> c saved, b's memory free
    backward   c still here ──> b fetched while c is used ──> a fetched while b is used       prefetch=1

What is moved is memory (a storage), not tensors: it is free when no tensor is left on it, and tensors that
share it are moved once. A storage that was written to in between is another one.
"""

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from memfit.strategies.mechanisms.forward_state import unseen, version
from memfit.strategies.mechanisms.host_copies import Copies


class Kept:
    """A saved tensor that stays where it is.

    With hooks, autograd leaves it to them to see whether it was written to before it is used.
    """

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self._version = version(tensor)

    def unpack(self) -> torch.Tensor:
        """Return it.

        Raises:
            RuntimeError: it was changed in place, as autograd says it without hooks.
        """
        if version(self._tensor) != self._version:
            raise _modified(self._tensor.shape)
        return self._tensor


class Moved:
    """A storage that is on the host, or on its way there or back."""

    __slots__ = (
        "__weakref__",
        "_region",
        "_root",
        "before",
        "here",
        "leaving",
        "shape",
        "source",
        "spoiled",
        "there",
        "users",
        "version",
    )

    def __init__(self, tensor: torch.Tensor, before: "Moved | None") -> None:
        self.version, self.shape = tensor._version, tensor.shape
        self._root, self._region = weakref.ref(_root(tensor)), _region(tensor)
        self.spoiled = False
        self.before = weakref.ref(before) if before else None
        """What was moved before it, which backward needs after it."""
        self.source: torch.Tensor | None = tensor.detach()
        """It, while it still is on the device."""
        self.here: torch.Tensor | None = None
        """Its bytes on the host."""
        self.there: torch.Tensor | None = None
        """Its bytes, back on the device."""
        self.leaving: Any = None
        self.users = 0
        """Tensors saved on it that were not asked for yet."""

    def covers(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor on the same storage is in what was moved, as it is now.

        Versions say so of tensors that share a count: views of one tensor, or the same again (results are
        saved as another object). Parts that were split off without being views, as recurrent layers do
        (``unsafe_chunk``), count for themselves.
        """
        again = self._region == _region(tensor)
        if tensor._version != self.version or not (again or self._root() is _root(tensor)):
            return False
        self._root = weakref.ref(_root(tensor))
        return True

    def on_device(self) -> torch.Tensor | None:
        """Return its bytes on the device, if they are there."""
        return _bytes_of(self.source) if self.source is not None else self.there

    def check(self) -> None:
        """See whether it was written to while it was copied, which may have got some of either.

        Raises:
            RuntimeError: it was; plain autograd refuses that, too.
        """
        if self.spoiled or (self.source is not None and self.source._version != self.version):
            raise _modified(self.shape)


class Lane:
    """What moves between one device and the host.

    Args:
        copies: how.
        prefetch: storages that may be on their way at once, in either direction, beside what is computed.
    """

    def __init__(self, copies: Copies, prefetch: int) -> None:
        self._copies, self._prefetch = copies, prefetch
        self._leaving: deque[weakref.ref[Moved]] = deque()
        self._arriving: dict[Moved, Any] = {}
        self._last: weakref.ref[Moved] | None = None

    def send(self, tensor: torch.Tensor) -> Moved:
        """Begin to move a tensor's storage to the host."""
        moved = Moved(tensor, self._last() if self._last else None)
        self._last = weakref.ref(moved)
        moved.here, moved.leaving = self._copies.out(_bytes_of(tensor))
        self._leaving.append(weakref.ref(moved))
        while len(self._leaving) > self._prefetch:
            self._gone(self._leaving.popleft()())
        return moved

    def fetch(self, moved: Moved) -> torch.Tensor:
        """Return a storage's bytes on the device, and begin to fetch those that will be asked for next.

        Raises:
            RuntimeError: it was changed in place while it was copied.
        """
        moved.check()
        found = moved.on_device()
        if found is None:
            found = self._begin(moved)
        if moved in self._arriving:
            self._copies.wait(self._arriving.pop(moved))
        moved.users -= 1
        if moved.users <= 0:
            # Who asked holds it from now on; a second backward fetches it again.
            moved.there = None
        following: Moved | None = moved
        for _ in range(self._prefetch):
            following = following.before() if following and following.before else None
            if following is not None and following.on_device() is None:
                self._begin(following)
        return found

    def settle(self) -> None:
        """Wait for all that was fetched ahead and not asked for: its memory is not given back before."""
        for copy in self._arriving.values():
            self._copies.wait(copy)
        self._arriving.clear()

    def _begin(self, moved: Moved) -> torch.Tensor:
        if moved.here is None:
            raise AssertionError("what is fetched was sent")
        # Held here, too: if the graph is dropped, the memory must not be given to others while it is written.
        moved.there, self._arriving[moved] = self._copies.back(moved.here)
        return moved.there

    def _gone(self, moved: Moved | None) -> None:
        # If the graph was dropped, its memory may be written while the copy reads it: nobody will ask for
        # that.
        if moved is not None:
            self._copies.wait(moved.leaving)
            moved.spoiled = moved.source is not None and moved.source._version != moved.version
            moved.source = moved.leaving = None


class Mover:
    """Hooks for saved tensors that move them.

    Args:
        copies: makes the copies of a device; None for a device whose tensors stay.
        min_bytes: smaller storages stay.
        prefetch: as of ``Lane``.
    """

    def __init__(
        self, copies: Callable[[torch.device], Copies | None], min_bytes: int, prefetch: int
    ) -> None:
        self._copies, self._min_bytes, self._prefetch = copies, min_bytes, prefetch
        self._lanes: dict[torch.device, Lane | None] = {}
        self._moved: weakref.WeakValueDictionary[StorageWeakRef, Moved] = weakref.WeakValueDictionary()
        self._owned: set[int] = set()
        self.count = 0
        """Storages moved so far."""

    @property
    def reachable(self) -> bool | None:
        """Whether something was saved on a device whose tensors can move; None before anything was saved."""
        return any(self._lanes.values()) if self._lanes else None

    def begin(self, model: nn.Module) -> None:
        """Begin a forward: the model's parameters and buffers are where they are now, and stay there."""
        owned = (*model.parameters(), *model.buffers())
        self._owned = {tensor.untyped_storage().data_ptr() for tensor in owned if _readable(tensor)}
        for lane in self._lanes.values():
            if lane is not None:
                lane.settle()

    def hooks(self) -> AbstractContextManager[Any]:
        """Return the context in which saved tensors are moved."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack_unseen, self._unpack_unseen)

    def _pack_unseen(self, tensor: torch.Tensor) -> Any:
        with unseen():
            return self._pack(tensor)

    def _unpack_unseen(self, packed: Any) -> torch.Tensor:
        with unseen():
            return self._unpack(packed)

    def _pack(self, tensor: torch.Tensor) -> Any:
        lane = self._lane(tensor.device)
        if lane is None or not _readable(tensor) or tensor.is_inference():
            return Kept(tensor)
        storage = tensor.untyped_storage()
        if storage.nbytes() < self._min_bytes or storage.data_ptr() in self._owned:
            return Kept(tensor)
        # The reference, while it is held, keeps another storage from getting the same address.
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        moved = self._moved.get(reference)
        if moved is None or not moved.covers(tensor):
            self._moved[reference] = moved = lane.send(tensor)
            self.count += 1
        moved.users += 1
        return moved, lane, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, Kept):
            return packed.unpack()
        moved, lane, dtype, offset, shape, stride = packed
        storage = lane.fetch(moved).untyped_storage()
        whole = torch.empty(0, dtype=dtype, device=storage.device)
        return whole.set_(storage, offset, shape, stride)

    def _lane(self, device: torch.device) -> Lane | None:
        if device not in self._lanes:
            copies = self._copies(device)
            self._lanes[device] = Lane(copies, self._prefetch) if copies is not None else None
        return self._lanes[device]


def _modified(shape: torch.Size) -> RuntimeError:
    return RuntimeError(
        f"one of the variables needed for gradient computation, of shape {list(shape)}, has been modified by "
        "an inplace operation after it was saved (seen by memfit's offload, as by autograd without it)"
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
