"""Names of tensors, alone or with others in the same memory.

    one tensor, one name              weight
    one tensor, several names (tied)  weight = head.weight
    several tensors, same memory      weight = b.weight          .data of one set to the other's
    several pieces of the memory      weight_ih_l0 and 3 more    flat weights of an RNN, buckets, shards

For a tensor that is sharded over ranks, the memory is that of this rank's piece.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch

from memfit.recording.module_names import path_without_wrappers
from memfit.records import TensorInfo

_ROWS = ("crow_indices", "col_indices", "values")
_COLUMNS = ("ccol_indices", "row_indices", "values")
_SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _ROWS,
    torch.sparse_bsr: _ROWS,
    torch.sparse_csc: _COLUMNS,
    torch.sparse_bsc: _COLUMNS,
}
"""Methods that return the parts of a sparse tensor."""
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


@dataclass(frozen=True, slots=True)
class TensorName:
    """The name of a tensor."""

    own: str = ""
    """Its name in its module: ``weight``."""
    module: str = ""
    paths: tuple[str, ...] = ()
    """All of its paths from the outermost module; the first is the one in ``module``."""


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor with the name of the parameter or buffer that it belongs to, as its gradient or state does."""

    tensor: torch.Tensor
    name: TensorName
    suffix: str = ""
    """``.grad``, ``.exp_avg``; empty for the parameter or buffer itself."""


class TensorNames:
    """The names of parameters and buffers. Nothing is kept alive."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[weakref.ref[torch.Tensor], TensorName]] = {}

    def learn(self, root: str, named: Iterable[tuple[str, torch.Tensor]]) -> list[torch.Tensor]:
        """Learn the names of the tensors of an outermost module; return the tensors, each once."""
        found: dict[int, tuple[torch.Tensor, list[str]]] = {}
        for path, tensor in named:
            found.setdefault(id(tensor), (tensor, []))[1].append(path_without_wrappers(path))
        for tensor, paths in found.values():
            module, _, own = f"{root}.{paths[0]}".rpartition(".")
            self._names[id(tensor)] = weakref.ref(tensor), TensorName(own, module, tuple(paths))
        return [tensor for tensor, _ in found.values()]

    def of(self, tensor: torch.Tensor) -> TensorName:
        """Return a tensor's name, empty if it is not known."""
        reference, name = self._names.get(id(tensor), (None, TensorName()))
        return name if reference is not None and reference() is tensor else TensorName()


def local_piece_of_dtensor(tensor: Any) -> Any:
    """Return this rank's piece of a DTensor, and any other object unchanged."""
    # Most tensors are plain, and the failed lookup of an attribute would dominate the time.
    return tensor if type(tensor) in _PLAIN else getattr(tensor, "_local_tensor", tensor)


def tensor_parts_by_role(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that hold a tensor's data, each with its role: a plain tensor yields only itself.

    A wrapper of tensors, as a quantised tensor may be, yields what it wraps (``__tensor_flatten__``).
    bitsandbytes keeps the scales of a quantised parameter in its attributes: they follow the parameter.

    >>> [name for name, _ in tensor_parts_by_role(torch.eye(2).to_sparse())]
    ['indices', 'values']
    """
    here = local_piece_of_dtensor(tensor)
    if here.layout is torch.strided:
        yield "", here
    for method in _SPARSE.get(here.layout, ()):
        yield method.lstrip("_"), getattr(torch.Tensor, method)(here)
    if type(here) not in _PLAIN:
        yield from _wrapped(here)
        yield from _quantisation_state(here)


def _wrapped(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in a wrapper, however nested, by the names of its attributes."""
    names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
    for name in names:
        for inner, part in tensor_parts_by_role(getattr(tensor, name)):
            yield f"{name}.{inner}".rstrip("."), part


def _quantisation_state(holder: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of bitsandbytes' quantisation beside the weight: scales, offset, code.

    Source: ``Params4bit`` and ``Int8Params`` in bitsandbytes/nn/modules.py, ``QuantState`` in
    bitsandbytes/functional.py, 0.50.
    """
    for name in ("absmax", "code", "offset", "SCB", "CB"):
        value = getattr(holder, name, None)
        if isinstance(value, torch.Tensor):
            yield name, value
    for name in ("quant_state", "state2"):
        if (state := getattr(holder, name, None)) is not None:
            for inner, part in _quantisation_state(state):
                yield f"{name}.{inner}", part


def tensor_info_of_allocation(found: Sequence[NamedTensor]) -> TensorInfo:
    """Describe the tensors in one allocation.

    Args:
        found: at least one tensor, all in the same storage.
    """
    first = found[0]
    here = local_piece_of_dtensor(first.tensor)
    dtype, module = str(here.dtype).removeprefix("torch."), first.name.module
    if len(found) == 1:
        return TensorInfo(module, _names(found), dtype, tuple(here.shape))
    begins = [local_piece_of_dtensor(named.tensor).storage_offset() for named in found]
    text = _names([named for named, begin in zip(found, begins, strict=True) if begin == begins[0]])
    others = len(set(begins)) - 1
    if not others:
        return TensorInfo(module, text, dtype, tuple(here.shape))
    levels = zip(*(named.name.module.split(".") for named in found), strict=False)
    common = ".".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))
    text = f"{module}.{text}".removeprefix(f"{common}.") + f" and {others} more"
    return TensorInfo(common, text, dtype, (max(map(_end, found)) - min(begins),))


def _names(found: Sequence[NamedTensor]) -> str:
    """Return all names of tensors with the same offset in their storage."""
    first = found[0]
    others = [path for named in found for path in named.name.paths][1:]
    text = " = ".join((name + first.suffix).lstrip(".") for name in dict.fromkeys([first.name.own, *others]))
    return text if first.tensor is local_piece_of_dtensor(first.tensor) else f"{text} (this rank's)"


def _end(named: NamedTensor) -> int:
    """Return the end of a tensor in its storage, in elements."""
    tensor = local_piece_of_dtensor(named.tensor)
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last: int = tensor.storage_offset() + sum((size - 1) * step for size, step in steps)
    return last + 1
