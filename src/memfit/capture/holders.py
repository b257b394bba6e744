"""Which live objects hold an allocation: parameters, buffers, gradients, optimizer state, autograd's graph.

Objects are asked at the moments when they are all there (what the graph saved just before a backward,
gradients just before an optimizer steps, its state just after), and only the addresses of their storages
are kept. Which allocation an address meant at that moment is settled from the history afterwards.
"""

import weakref
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from memfit.capture.graph import saved_for_backward
from memfit.capture.modules import tensors_in
from memfit.ghost.known import storage_start
from memfit.records import Category, Tensor


@dataclass(frozen=True, slots=True)
class Held:
    """What held allocations at one moment."""

    serial: int
    category: Category
    found: "array[int]"
    """Four numbers each: the storage's address, the index of its tensor, that of the op that made it, and how
    many backwards were before what holds it was made, where a graph does: what was there before that is no
    activation of it, but given to it."""


@dataclass(slots=True)
class Holdings:
    """Everything that was found to hold an allocation in one run."""

    tensors: dict[Tensor, int] = field(default_factory=dict)
    """What holds; values are places."""
    ops: dict[str, int] = field(default_factory=lambda: {"": 0})
    """Ops that made what a graph saved; values are places, the first is that of none."""
    held: list[Held] = field(default_factory=list)
    _backwards: list[int] = field(default_factory=list)  # autograd's sequence number at each
    _names: dict[int, tuple["weakref.ref[torch.Tensor]", str, str]] = field(default_factory=dict)

    def modules(self, serial: int, roots: Mapping[torch.nn.Module, str]) -> None:
        """Note the buffers, gradients and parameters of some modules.

        Args:
            serial: of this moment.
            roots: modules that no other holds, and what each is called.
        """
        parameters: list[torch.Tensor] = []
        buffers: list[torch.Tensor] = []
        for root, name in roots.items():
            parameters += self._learn(name, root.named_parameters(remove_duplicate=False))
            buffers += self._learn(name, root.named_buffers(remove_duplicate=False))
        self._note(serial, Category.BUFFER, ((one, *self._name(one, "")) for one in buffers))
        self.gradients(serial, parameters)
        self.parameters(serial, parameters)

    def parameters(self, serial: int, parameters: Iterable[torch.Tensor]) -> None:
        """Note parameters."""
        self._note(serial, Category.PARAMETER, ((one, *self._name(one, "")) for one in parameters))

    def gradients(self, serial: int, parameters: Iterable[torch.Tensor]) -> None:
        """Note the gradients that parameters have."""
        found = ((one.grad, *self._name(one, ".grad")) for one in parameters if one.is_leaf)
        self._note(serial, Category.GRADIENT, found)

    def optimizer_state(self, serial: int, optimizer: Optimizer) -> None:
        """Note the tensors of an optimizer's state, however nested."""
        self._note(
            serial,
            Category.OPTIMIZER_STATE,
            (
                (tensor, *self._name(parameter, f".{key}"))
                for parameter, state in optimizer.state.items()
                for key, value in (state.items() if isinstance(state, Mapping) else (("state", state),))
                for tensor in tensors_in(value)
            ),
        )

    def scaler(self, serial: int, scaler: torch.amp.GradScaler) -> None:
        """Note what a gradient scaler keeps."""
        kept = (("loss scale", scaler._scale), ("loss scale's growth", scaler._growth_tracker))
        self._note(serial, Category.BUFFER, ((tensor, "", name) for name, tensor in kept))

    def graph(self, serial: int, roots: Iterable[object]) -> None:
        """Note what autograd keeps for the backward of some tensors."""
        self._note(
            serial,
            Category.ACTIVATION,
            (
                (
                    saved.tensor,
                    *self._name_of_saved(saved.cast_of, saved.what),
                    saved.op,
                    bisect_right(self._backwards, saved.sequence),
                )
                for saved in saved_for_backward(roots)
            ),
        )
        self._backwards.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]

    def workspaces(self, serial: int, sizes: Mapping[int, int]) -> None:
        """Note what cuBLAS works in: addresses and bytes."""
        found = array("q")
        for address, size in sizes.items():
            record = Tensor("", "cuBLAS workspace", "uint8", (size,))
            found.extend((address, self.tensors.setdefault(record, len(self.tensors)), 0, 0))
        self.held.append(Held(serial, Category.WORKSPACE, found))

    def _learn(self, root: str, named: Iterable[tuple[str, torch.Tensor]]) -> list[torch.Tensor]:
        """Remember what tensors are called: by all of their names, where modules share them."""
        names: dict[int, tuple[torch.Tensor, list[str]]] = {}
        for name, tensor in named:
            names.setdefault(id(tensor), (tensor, []))[1].append(name)
        for tensor, all_names in names.values():
            module, _, own = f"{root}.{all_names[0]}".rpartition(".")
            self._names[id(tensor)] = (
                weakref.ref(tensor),
                module,
                " = ".join([own, *all_names[1:]]),
            )
        return [tensor for tensor, _ in names.values()]

    def _name(self, tensor: torch.Tensor, suffix: str) -> tuple[str, str]:
        """Return the module that a tensor belongs to, and what it is called there."""
        entry = self._names.get(id(tensor))
        known = entry is not None and entry[0]() is tensor
        _, module, name = entry if entry is not None and known else (None, "", "")
        return module, name + suffix

    def _name_of_saved(self, cast_of: torch.Tensor | None, what: str) -> tuple[str, str]:
        """Name what was saved; copies of parameters in another dtype, which autocast keeps, after them."""
        module, name = self._name(cast_of, "") if cast_of is not None else ("", "")
        return (module, f"copy of {name}") if name else ("", what)

    def _note(self, serial: int, category: Category, found: Iterable[tuple[Any, ...]]) -> None:
        """Keep the addresses of (tensor, module, name), and of a graph's an op and a number of backwards."""
        kept = array("q")
        if torch._C._get_tracing_state() is not None:  # of torch.jit
            return  # shapes are tensors, then, and to ask for them is part of the trace
        for tensor, module, name, *graphs in found:
            op, backwards = graphs or ("", 0)
            address = _address(_local(tensor))
            if address:
                record = Tensor(module, name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
                tensor_index = self.tensors.setdefault(record, len(self.tensors))
                op_index = self.ops.setdefault(op, len(self.ops))
                kept.extend((address, tensor_index, op_index, backwards))
        if kept:
            self.held.append(Held(serial, category, kept))


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters that an optimizer updates."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _address(tensor: object) -> int:
    """Return where a tensor's memory begins; 0 if it is on the CPU, sparse, or a stand-in for others."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_cuda or tensor.layout is not torch.strided:
        return 0
    try:
        return storage_start(tensor)
    except RuntimeError:  # under torch.func parameters are wrappers; NotImplementedError is one
        return 0


def _local(tensor: Any) -> Any:
    """Return this rank's piece of a DTensor, and anything else as it is."""
    return getattr(tensor, "_local_tensor", tensor)
