"""Which live objects hold an allocation: parameters, buffers, gradients, optimizer state, autograd's graph.

Objects are asked at the moments when they are all there (what the graph saved just before a backward,
gradients just before an optimizer steps, its state just after), and only the addresses of their storages
are kept. Which allocation an address meant at that moment is settled from the history afterwards.
"""

import weakref
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch.optim import Optimizer

from memfit.ghost.values.known_values import storage_start
from memfit.recording.module_hooks import tensors_in
from memfit.recording.saved_tensors import Checkpoints, Saved, leaves_of, nodes_of, saved_by
from memfit.recording.tensor_names import Name, Named, Names, describe, local, parts
from memfit.records import Category, TensorInfo


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

    tensors: dict[TensorInfo, int] = field(default_factory=dict)
    """What holds; values are places."""
    ops: dict[str, int] = field(default_factory=lambda: {"": 0})
    """Ops that made what a graph saved; values are places, the first is that of none."""
    held: list[Held] = field(default_factory=list)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    incomplete: bool = False
    """Whether there was an object that could not be asked."""
    _backwards: list[int] = field(default_factory=list)  # autograd's sequence number at each
    _leaves: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    _met: "weakref.WeakValueDictionary[int, torch.Tensor]" = field(
        default_factory=weakref.WeakValueDictionary
    )
    _names: Names = field(default_factory=Names)

    def forget(self) -> None:
        """Forget all moments so far; what tensors are called stays known."""
        for found in (self.tensors, self.held, self._backwards):
            found.clear()
        self.ops = {"": 0}

    @contextmanager
    def sparing(self) -> Iterator[None]:
        """Pass over an object that cannot be asked: one that is being built, or whose own code raises."""
        try:
            yield
        except Exception:  # noqa: BLE001 - the classes of a script may do anything
            self.incomplete = True

    def modules(self, serial: int, roots: Mapping[torch.nn.Module, str]) -> None:
        """Note the buffers, gradients and parameters of some modules.

        Args:
            serial: of this moment.
            roots: modules that no other holds, and what each is called.
        """
        parameters: list[torch.Tensor] = []
        buffers: list[torch.Tensor] = []
        for root, name in roots.items():
            with self.sparing():
                parameters += self._names.learn(name, root.named_parameters(remove_duplicate=False))
                buffers += self._names.learn(name, root.named_buffers(remove_duplicate=False))
        self._note(serial, Category.BUFFER, (Named(one, self._names.of(one)) for one in buffers))
        self.gradients(serial, parameters)
        self.parameters(serial, parameters)

    def parameters(self, serial: int, parameters: Iterable[torch.Tensor]) -> None:
        """Note parameters."""
        self._note(serial, Category.PARAMETER, (Named(one, self._names.of(one)) for one in parameters))

    def gradients(self, serial: int, parameters: Iterable[torch.Tensor]) -> None:
        """Note the gradients that parameters have."""
        self._note(
            serial,
            Category.GRADIENT,
            (
                Named(one.grad, self._names.of(one), ".grad")
                for one in parameters
                if one.is_leaf and one.grad is not None
            ),
        )

    def optimizer_state(self, serial: int, optimizer: Optimizer) -> None:
        """Note the tensors of an optimizer's state, however nested."""
        self._note(
            serial,
            Category.OPTIMIZER_STATE,
            (
                Named(tensor, self._names.of(parameter), f".{key}")
                for parameter, state in optimizer.state.items()
                for key, value in (state.items() if isinstance(state, Mapping) else (("state", state),))
                for tensor in tensors_in(value)
            ),
        )

    def scaler(self, serial: int, scaler: torch.amp.GradScaler) -> None:
        """Note what a gradient scaler keeps."""
        kept = (
            ("loss scale", getattr(scaler, "_scale", None)),  # one that is switched off has none
            ("loss scale's growth", getattr(scaler, "_growth_tracker", None)),
            ("whether a gradient is infinite", getattr(scaler, "_per_optimizer_states", None)),
        )
        self._note_all(serial, kept)

    def given(self, serial: int, optimizer: Optimizer) -> None:
        """Note what a gradient scaler gives to an optimizer that is about to step and scales by itself."""
        kept = (
            ("loss scale", getattr(optimizer, "grad_scale", None)),
            ("whether a gradient is infinite", getattr(optimizer, "found_inf", None)),
        )
        self._note_all(serial, kept)

    def graph(self, serial: int, roots: Iterable[object], *, by_hand: bool = False) -> None:
        """Note what autograd keeps for the backward of some tensors, and whose gradients that will make.

        Args:
            serial: of this moment.
            roots: tensors, however nested: what a backward pass starts from.
            by_hand: the script has no optimizer. Leaves that one graph after another leads to are parameters
                then, whatever they are.
        """
        ends = list(tensors_in(roots))
        nodes = [] if _is_traced() else list(nodes_of(ends))
        leaves = list(leaves_of(nodes))
        self._leaves = [weakref.ref(leaf) for leaf in leaves]
        again = [leaf for leaf in leaves if by_hand and self._met.get(id(leaf)) is leaf]
        self._met.update((id(leaf), leaf) for leaf in leaves)
        self.parameters(serial, [*again, *(leaf for leaf in leaves if isinstance(leaf, torch.nn.Parameter))])
        kept = {Category.ACTIVATION: array("q"), Category.INPUT: array("q")}
        for saved in chain(self.checkpoints.inputs(), *map(saved_by, nodes)):
            with self.sparing():
                earlier = bisect_right(self._backwards, saved.sequence)
                op = self.ops.setdefault(saved.op, len(self.ops))
                found = kept[Category.INPUT if saved.given else Category.ACTIVATION]
                for _, address, part in _memory(saved.tensor):
                    found.extend((address, self._place(self._of_saved(saved, part)), op, earlier))
        for category, found in kept.items():
            self.held.append(Held(serial, category, found))
        self._results(serial, ends)

    @property
    def graph_waits(self) -> bool:
        """Whether a graph was found that keeps something for a backward."""
        return any(held.category is Category.ACTIVATION and held.found for held in self.held)

    def rest(self, serial: int, computed: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> None:
        """Note tensors that somebody has: what nothing else is said to hold, they do.

        Args:
            serial: of this moment.
            computed: those that a graph leads back from.
            others: what is known of these is how they are made up.
        """
        self._results(serial, computed)
        self._note(serial, Category.UNKNOWN, (Named(one, Name()) for one in others))

    def went_backward(self) -> None:
        """Note that a backward pass begins: what is made from now on is none of its graph."""
        self._backwards.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]

    def gradients_of_graph(self, serial: int) -> None:
        """Note what the backward of the graph noted last has made: gradients, of inputs, too."""
        self.gradients(serial, [leaf for reference in self._leaves if (leaf := reference()) is not None])

    def workspaces(self, serial: int, sizes: Mapping[int, int]) -> None:
        """Note what cuBLAS works in: addresses and bytes."""
        found = array("q")
        for address, size in sizes.items():
            found.extend((address, self._place(TensorInfo("", "cuBLAS workspace", "uint8", (size,))), 0, 0))
        self.held.append(Held(serial, Category.WORKSPACE, found))

    def _results(self, serial: int, computed: Iterable[torch.Tensor]) -> None:
        """Note what a graph leads back from."""
        results = (
            Named(one, Name(f"result of {one.grad_fn.name()}")) for one in computed if one.grad_fn is not None
        )
        self._note(serial, Category.OUTPUT, results)

    def _of_saved(self, saved: Saved, part: torch.Tensor) -> TensorInfo:
        """Describe a part of what was saved; copies of parameters in another dtype after them."""
        original = self._names.of(saved.cast_of) if saved.cast_of is not None else Name()
        whose = "autocast's copy of" if saved.by_autocast else "copy of"
        name = Name(f"{whose} {original.own}", original.module) if original.own else Name(saved.what)
        return describe([Named(part, name)])

    def _note(self, serial: int, category: Category, found: Iterable[Named]) -> None:
        """Keep the addresses of some tensors."""
        if _is_traced():
            return
        together: dict[int, list[Named]] = {}
        for named in found:
            with self.sparing():
                for what, address, part in _memory(named.tensor):
                    one = replace(named, tensor=part, suffix=f"{named.suffix}.{what}") if what else named
                    together.setdefault(address, []).append(one)
        kept = array("q")
        for address, tensors in together.items():
            with self.sparing():
                kept.extend((address, self._place(describe(tensors)), 0, 0))
        self.held.append(Held(serial, category, kept))

    def _note_all(self, serial: int, kept: Iterable[tuple[str, object]]) -> None:
        """Note the tensors of a scaler, however nested, by what they are."""
        found = (Named(tensor, Name(name)) for name, value in kept for tensor in tensors_in(value))
        self._note(serial, Category.BUFFER, found)

    def _place(self, tensor: TensorInfo) -> int:
        return self.tensors.setdefault(tensor, len(self.tensors))


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters that an optimizer updates."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _is_traced() -> bool:
    """Say whether torch.jit traces: shapes are tensors, then, and to ask for them is part of the trace."""
    return torch._C._get_tracing_state() is not None


def _memory(tensor: torch.Tensor) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yield where a tensor's memory begins: nowhere if it is on the CPU, or a stand-in for others.

    Of a sparse one it is in several places.

    Yields:
        What of the tensor it is (``values``), its address, and the tensor that lies there.
    """
    if not local(tensor).is_cuda:
        return
    for name, part in parts(tensor):
        try:
            address = storage_start(local(part))
        except (RuntimeError, ValueError):  # wrappers of torch.func (NotImplementedError is one); lazy ones
            continue
        if address:
            yield name, address, part if name else tensor
