"""GPU tensors whose elements are all known: to hold one value, or of a small tensor one by one.

The ghost (the CUDA runtime that memfit substitutes for a GPU's) computes nothing, but a script that fills a
flag with ``True`` and later reads it must get ``True``. This module stores such values;
``propagation_rules.py`` derives them.

    done = torch.full((8,), False, device="cuda")    version 0 of its storage: False
    both = done | flags                              known if both operands are
    done.add_(1)                                     no rule, but the version is now 1: forgotten

A value is recorded for a tensor's storage. It is valid while that tensor, or what ``detach`` made of it,
lives (a reused address belongs to another tensor) and while the version is the same, which autograd
increments with every in-place write through any view. Two measures cover writes that do not increment it: a
value is recorded only when no kernel can still be writing to the tensor (``propagation_rules.py``), and a
storage that is exposed without the counter, by ``Tensor.data``, ``data_ptr`` or DLPack, is never known again
(``KnownValues.expose``).

Nothing here may change allocations. So no device memory is kept alive, and no storage is accessed as a Python
object: its use count would increase, and autograd would accumulate gradients into new memory instead of in
place. Source: ``can_accumulate_inplace``, torch/csrc/autograd/input_buffer.cpp.
"""

import math
from typing import Any, NamedTuple, cast

import torch

from memfit.ghost.values.dtype_rounding import round_to_dtype
from memfit.ghost.values.tensor_facts import (
    AwaitedElements,
    KnownElements,
    KnownIndices,
    KnownValue,
    TensorAliases,
    TensorState,
    TokenCountBasis,
    tensor_storage_address,
    tensor_storage_id,
    versions_of,
)

_set_data: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]  # the original
_OF_TWO = 2
"""How often a storage is in use that a tensor and one alias have."""
_MOST_ALIASES = 8
"""The most aliases of one tensor whose writes are followed at once."""


class _Entry(NamedTuple):
    state: TensorState
    fact: KnownValue | KnownIndices | KnownElements | AwaitedElements
    """Of a tensor's elements: their value, as indices, or one by one."""


class KnownValues:
    """A map from tensors to their known values; a missing tensor is unknown.

    >>> values = KnownValues()
    >>> flag = torch.zeros(3)
    >>> values.put(flag, KnownValue(0.0))
    >>> values.get(flag[1:])
    KnownValue(value=0.0, basis=<KnownValueBasis.FILLED: 0>, exceptions=0, selection=None)
    >>> _ = flag.add_(1)
    >>> values.get(flag) is None
    True
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._exposed: set[int] = set()
        self._counters: dict[int, list[torch.Tensor]] = {}
        self._sweep_at = 1024

    def get(self, tensor: torch.Tensor) -> KnownValue | None:
        """Return the value of every element of ``tensor``, or None if it is unknown.

        A view that reads the bytes as another dtype, negated or conjugated is unknown.
        """
        known = self.mostly(tensor)
        return None if known is None or known.exceptions else known

    def mostly(self, tensor: torch.Tensor) -> KnownValue | None:
        """Return the value of all elements of ``tensor`` except ``Known.exceptions`` of them, or None.

        >>> values, mask = KnownValues(), torch.zeros(8)
        >>> values.put(mask, KnownValue(0.0, exceptions=3))
        >>> values.mostly(mask[:4]).exceptions, values.get(mask) is None
        (3, True)
        """
        entry = self._entry(tensor)
        if entry is not None and isinstance(entry.fact, KnownElements):
            return _most_common(self.elements(tensor) or entry.fact)
        if entry is None or not isinstance(entry.fact, KnownValue):
            return None
        if entry.state.part == _part(tensor):
            return entry.fact
        exceptions = _seen_through(tensor, entry.fact.exceptions)
        return entry.fact._replace(exceptions=exceptions, selection=None)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        """Return whether anything is known of a tensor, or awaited."""
        return self._entry(tensor) is not None

    def is_whole(self, tensor: torch.Tensor) -> bool:
        """Return whether what is known is known of this tensor, and not of one that it is a part of."""
        entry = self._entry(tensor)
        return entry is not None and entry.state.part == _part(tensor)

    def selection(self, tensor: torch.Tensor) -> KnownIndices | None:
        """Return what is known of the elements of ``tensor`` as indices, or None."""
        entry = self._entry(tensor)
        if entry is None or not isinstance(entry.fact, KnownIndices):
            return None
        return entry.fact._replace(others=_seen_through(tensor, entry.fact.others))

    def elements(self, tensor: torch.Tensor) -> KnownElements | None:
        """Return the elements of ``tensor``, or None if they are not known one by one.

        >>> values, sizes = KnownValues(), torch.tensor([3, 4, 5, 6])
        >>> values.put(sizes, KnownElements(sizes.clone()))
        >>> values.elements(sizes[1::2]).values.tolist()
        [4, 6]
        """
        entry = self._entry(tensor)
        if entry is not None and isinstance(entry.fact, AwaitedElements):
            entry = self._had(entry, entry.fact)
        if entry is None or not isinstance(entry.fact, KnownElements):
            return None
        first: Any = entry.state.part[0]
        at = int(tensor.storage_offset()) - first
        return entry.fact._replace(values=entry.fact.values.as_strided(tensor.shape, tensor.stride(), at))

    def awaited(self, tensor: torch.Tensor) -> AwaitedElements | None:
        """Return the elements of ``tensor`` if another rank sends them, without awaiting them."""
        entry = self._entry(tensor)
        if entry is None or not isinstance(entry.fact, AwaitedElements):
            return None
        whole, first = entry.fact, cast("int", entry.state.part[0])
        shape, strides, at = tensor.shape, tensor.stride(), int(tensor.storage_offset()) - first

        def part() -> KnownElements | None:
            had = whole.have()
            return had and had._replace(values=had.values.as_strided(shape, strides, at))

        return AwaitedElements(part, whole.depth)

    def _had(self, entry: _Entry, awaited: AwaitedElements) -> _Entry | None:
        """Replace an entry by what is known once its elements are here."""
        self._entries.pop(entry.state.storage, None)
        had = awaited.have()
        if had is None:
            return None
        entry = entry._replace(fact=_one_value(had) or had)
        self._entries[entry.state.storage] = entry
        return entry

    def state(self, tensor: torch.Tensor) -> TensorState | None:
        """Return the state of ``tensor`` now; None if a later write to it might not be noticed."""
        storage = tensor_storage_id(tensor)
        if not storage or storage in self._exposed:
            return None
        return TensorState(
            TensorAliases(tensor),
            storage,
            tensor_storage_address(tensor),
            _part(tensor),
            versions_of(tensor, self._counters.get(storage, ())),
            tensor.dtype,
        )

    def is_in_state(self, tensor: torch.Tensor, state: TensorState) -> bool:
        """Return whether ``tensor`` still has the state that ``KnownValues.state`` returned for it."""
        storage = tensor_storage_id(tensor)
        return (
            storage not in self._exposed
            and state.is_unchanged(storage, tensor, self._counters.get(storage, ()))
            and state.part == _part(tensor)
        )

    def _entry(self, tensor: torch.Tensor) -> _Entry | None:
        storage = tensor_storage_id(tensor)
        entry = self._entries.get(storage)
        if entry is None or not _covers(entry.state.part, _part(tensor)):
            return None
        return entry if entry.state.is_unchanged(storage, tensor, self._counters.get(storage, ())) else None

    def put(
        self,
        tensor: torch.Tensor,
        fact: KnownValue | KnownIndices | KnownElements | AwaitedElements | None,
        *,
        fresh: bool = False,
    ) -> None:
        """Record what ``tensor`` now holds; with None, that it is unknown.

        Elements are those of a contiguous tensor. A value is rounded to the tensor's dtype; one out of its
        range is not recorded. Empty tensors, subclasses and fake tensors are skipped.

        Args:
            tensor: any tensor.
            fact: what is known of its elements.
            fresh: the tensor was just created, so nothing else can reference its storage.
        """
        storage = tensor_storage_id(tensor)
        before = self._entries.pop(storage, None)
        if fresh:
            self._exposed.discard(storage)
            self._counters.pop(storage, None)
        elif before is not None:
            tensor = self._noted_before(tensor, before.state)
        if fact is None or not tensor.numel():
            return
        if isinstance(fact, KnownValue):
            value = round_to_dtype(fact.value, tensor.dtype)
            if value is None or (fact.exceptions >= tensor.numel() and fact.selection is None):
                return
            fact = fact._replace(value=value)
        if isinstance(fact, KnownElements | AwaitedElements) and not tensor.is_contiguous():
            return
        if isinstance(fact, KnownElements):
            fact = _one_value(fact) or fact
        state = self.state(tensor)
        if state is not None:
            self._entries[storage] = _Entry(state, fact)
            self._sweep()

    def _noted_before(self, tensor: torch.Tensor, before: TensorState) -> torch.Tensor:
        """Return the tensor that the same elements were known of, if it lives: a written alias may not."""
        noted = before.tensor()
        if noted is None or tensor_storage_id(noted) != before.storage or before.dtype != tensor.dtype:
            return tensor
        is_same = before.part == _part(tensor) == _part(noted)
        versions = versions_of(noted, self._counters.get(before.storage, ()))
        return noted if is_same and tensor._version in versions else tensor

    def keep_with_alias(self, tensor: torch.Tensor, alias: torch.Tensor) -> None:
        """Keep what is known of a tensor while an alias lives that counts the same writes: ``detach``'s."""
        entry = self._entry(tensor)
        if entry is not None:
            entry.state.tensor.add(alias)

    def follow_alias(self, tensor: torch.Tensor, alias: torch.Tensor) -> None:
        """Follow the writes to a new alias that has a version counter of its own: ``Tensor.data``.

        If nothing is known of the tensor, it is exposed.
        """
        storage, entry = tensor_storage_id(tensor), self._entry(tensor)
        counters = self._counters.setdefault(storage, [])
        if torch._C._storage_Use_Count(storage) <= _OF_TWO:
            counters.clear()  # no other tensor has this storage
        noted = None if entry is None else entry.state.tensor()
        if entry is None or noted is None or len(counters) >= _MOST_ALIASES:
            self.expose(tensor)
            return
        counter = (
            alias.detach()
        )  # it has the same version counter, and outlives the alias, but not the storage
        _set_data(counter, torch.empty(0, dtype=alias.dtype, device="cpu"))
        counters.append(counter)
        state = entry.state._replace(versions=versions_of(noted, counters))
        self._entries[storage] = entry._replace(state=state)

    def expose(self, tensor: torch.Tensor) -> None:
        """Forget ``tensor``'s storage for good: it may be written without a new version from now on."""
        self.forget(tensor)
        self._counters.pop(tensor_storage_id(tensor), None)
        self._exposed.add(tensor_storage_id(tensor))

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()

    def forget(self, tensor: torch.Tensor) -> None:
        """Drop the value of ``tensor`` and the weak reference to it."""
        self._entries.pop(tensor_storage_id(tensor), None)

    def release(self, tensor: torch.Tensor) -> None:
        """Drop every weak reference to ``tensor``: also of what is known of indices into it."""
        storage = tensor_storage_id(tensor)
        self._entries = {
            key: entry for key, entry in self._entries.items() if storage not in _storages(entry)
        }

    def _sweep(self) -> None:
        """Drop the entries of dead tensors, once the number of entries has doubled."""
        if len(self._entries) >= self._sweep_at:
            self._entries = {
                key: entry for key, entry in self._entries.items() if entry.state.tensor() is not None
            }
            self._counters = {key: each for key, each in self._counters.items() if key in self._entries}
            self._sweep_at = 1024 + 2 * len(self._entries)


def _one_value(elements: KnownElements) -> KnownValue | None:
    """Return the one value that all elements have, and that is no count of tokens; else None."""
    if elements.routing is not TokenCountBasis.NONE:
        return None
    first = elements.values.flatten()[0].item()
    if elements.values.numel() > 1 and bool((elements.values != first).any()):
        return None
    value = round_to_dtype(first, elements.values.dtype)
    return None if value is None else KnownValue(value, elements.basis)


def _most_common(elements: KnownElements) -> KnownValue | None:
    """Return the value of most elements, if they are integers or booleans and no counts of tokens."""
    values = elements.values
    if elements.routing is not TokenCountBasis.NONE or values.is_floating_point():
        return None
    found, counts = torch.unique(values, return_counts=True)
    most = int(counts.argmax())
    return KnownValue(found[most].item(), elements.basis, values.numel() - int(counts[most]))


def _storages(entry: _Entry) -> tuple[int, ...]:
    """Return the storages of the tensors that an entry refers to."""
    if isinstance(entry.fact, KnownElements | AwaitedElements):
        return (entry.state.storage,)
    selection = entry.fact if isinstance(entry.fact, KnownIndices) else entry.fact.selection
    return (entry.state.storage,) if selection is None else (entry.state.storage, selection.source.storage)


def _seen_through(view: torch.Tensor, elements: int) -> int:
    """Return how many elements of a view some elements of its storage can be: a view may repeat them.

    >>> [_seen_through(each, 2) for each in (torch.zeros(9)[1:], torch.zeros(9, 1).expand(9, 5))]
    [2, 10]
    """
    dims = [(step, size) for step, size in zip(view.stride(), view.shape, strict=True) if size > 1]
    repeats = math.prod(size for step, size in dims if not step)
    reach = 0
    for step, size in sorted(dims):
        if step and step <= reach:  # it overlaps itself, as unfold's results do
            return view.numel() if elements else 0
        reach += step * (size - 1)
    return min(elements * repeats, view.numel())


def _part(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a tensor's first and last element in its storage; its shape and strides too, if it skips any."""
    first = tensor.storage_offset()
    last = first + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (first, last) if tensor.is_contiguous() else (first, last, tensor.shape, tensor.stride())


def _covers(whole: tuple[Any, ...], part: tuple[Any, ...]) -> bool:
    """Return whether ``whole`` covers ``part``: they are equal, or ``whole`` has no gaps and contains it."""
    inside = bool(whole[0] <= part[0] and part[1] <= whole[1])
    return whole == part or (len(whole) == 2 and inside)  # noqa: PLR2004 - first and last
