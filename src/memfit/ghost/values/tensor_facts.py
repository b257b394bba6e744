"""What can be known of a tensor, and which tensor it is known of.

KnownValue       one value that all elements have, or all but some
KnownElements    a small tensor's elements, one by one
AwaitedElements  the same, once another rank has sent them
KnownIndices     indices of elements that hold one value
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch.utils.weak import TensorWeakRef

from memfit.ghost.values.dtype_rounding import Number

_data_ptr = (
    torch.Tensor.data_ptr
)  # the original: ``value_tracking_patches.py`` wraps the method that scripts call


_MOST_ALIASES = 8
"""The most aliases of a tensor, before the last, that are held."""


class KnownValueBasis(IntEnum):
    """The basis of a known value, most certain first; a result has the least certain basis of its inputs."""

    FILLED = 0  # the script set the value, or it follows from values that the script set
    FINITE = 1  # assumed: no value overflows or is NaN
    CHECKED = 2  # assumed: checks on values pass, and searches find nothing


class TensorAliases:
    """Tensors that share a storage and a version counter, held weakly: a tensor, and what ``detach`` made."""

    __slots__ = ("_references",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._references = [TensorWeakRef(tensor)]

    def __call__(self) -> torch.Tensor | None:
        """Return one that still exists; None if none does."""
        return next((found for each in self._references if (found := each()) is not None), None)

    def add(self, alias: torch.Tensor) -> None:
        """Add an alias: what is known of the tensor outlives it with this one."""
        living = [each for each in self._references if each() is not None]
        self._references = [*living[-_MOST_ALIASES:], TensorWeakRef(alias)]


class TensorState(NamedTuple):
    """A tensor as it was at one moment."""

    tensor: TensorAliases
    storage: int
    address: int  # of the storage's memory; it changes if the storage is resized
    part: tuple[object, ...]  # see ``_part``
    versions: tuple[
        int, ...
    ]  # its own; then of tensors that share its storage but no version counter with it
    dtype: torch.dtype

    def is_alive(self) -> bool:
        """Return whether the tensor still exists, in the same storage."""
        noted = self.tensor()
        return noted is not None and tensor_storage_id(noted) == self.storage

    def is_unchanged(self, storage: int, tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
        """Return whether a tensor has this storage, and nothing has been written to it since."""
        noted = self.tensor()
        return (
            self.storage == storage
            and noted is not None
            and tensor_storage_id(noted) == storage
            and self.versions == versions_of(noted, others)
            and tensor._version in self.versions
            and self.dtype == tensor.dtype
            and self.address == tensor_storage_address(tensor)
            and not tensor.is_neg()
        )


def versions_of(tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return the versions of a tensor and of others."""
    return (tensor._version, *(other._version for other in others))


class KnownIndices(NamedTuple):
    """Indices into a vector: all but ``others`` of them are those of elements that hold one value.

    Rules: ``propagation_rules.py``.
    """

    source: TensorState
    value: Number
    others: int = 0


class KnownValue(NamedTuple):
    """The value of every element of a tensor, a number of exceptions aside."""

    value: Number
    basis: KnownValueBasis = KnownValueBasis.FILLED
    exceptions: int = 0
    """The largest number of elements that may differ: those written by index since."""
    selection: KnownIndices | None = None
    """The indices of the exceptions, if something is known of them; of a vector only."""


class TokenCountBasis(IntEnum):
    """What counts of tokens by expert are based on, most certain first."""

    NONE = 0  # they are no such counts
    SENT = 1  # assumed: this rank's tokens are spread evenly
    RECEIVED = 2  # assumed, or chosen by the user: what the other ranks send


class KnownElements(NamedTuple):
    """The elements of a small tensor, one by one (``computed_on_cpu.py``)."""

    values: torch.Tensor
    """On the CPU, in the tensor's shape and dtype."""
    routing: TokenCountBasis = TokenCountBasis.NONE
    basis: KnownValueBasis = KnownValueBasis.FILLED


class AwaitedElements:
    """Elements that another rank sends, or that follow from these: ``have`` returns them, once read."""

    def __init__(self, have: Callable[[], KnownElements | None], depth: int = 0) -> None:
        self.depth = depth  # how many ops lie between them and what another rank sends
        self._have: Callable[[], KnownElements | None] | None = have
        self._had: KnownElements | None = None

    def have(self) -> KnownElements | None:
        """Return them, which may take as long as another rank runs."""
        if self._have is not None:
            self._had, self._have = self._have(), None
        return self._had


def known_value_of_number(number: object) -> KnownValue | None:
    """Return a plain number as a known value; None for anything else, including complex numbers."""
    return KnownValue(number) if isinstance(number, bool | int | float) else None


def is_plain_tensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is an ordinary dense one: strided, not nested, and of no subclass."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_nested
    )


def tensor_storage_id(tensor: torch.Tensor) -> int:
    """Return an ID of the storage of an ordinary tensor with a version counter; 0 for any other tensor."""
    if not is_plain_tensor(tensor) or tensor.is_inference():
        return 0
    try:
        return int(torch._C._storage_address(tensor))  # type: ignore[attr-defined]
    except (RuntimeError, NotImplementedError):  # the wrappers of torch.func have none
        return 0


def tensor_storage_address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage.

    Does not call ``untyped_storage()``: once a gradient's storage has been a Python object, autograd no
    longer counts the gradient as the buffer's only owner, and accumulates out of place, in new memory. Only
    of a tensor without elements, whose ``data_ptr()`` is 0: FSDP's padding for a rank that has no rows.
    """
    if not tensor.numel():
        return int(tensor.untyped_storage().data_ptr())
    return _data_ptr(tensor) - int(tensor.storage_offset()) * tensor.element_size()
