"""The objects that own memory: parameters, buffers, gradients, optimizer state, autograd's graph.

Objects are inspected when they all exist (the tensors saved by the graph just before a backward, gradients
just before an optimizer steps, its state just after), and only the addresses of their storages are kept. The
allocation that each address referred to at that moment is looked up in the history after the run.
"""

import gc
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from memfit.ghost.values.tensor_facts import tensor_storage_address
from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch
from memfit.recording.host_tensors import HostTensors
from memfit.recording.label_running_modules import ACCUMULATE, tensors_in_containers
from memfit.recording.optimizer_accessors import local_optimizer
from memfit.recording.saved_tensors import (
    NonReentrantCheckpoints,
    SavedTensorInfo,
    autograd_nodes_of_tensors,
    tensors_saved_by_node,
)
from memfit.recording.tensor_names import (
    NamedTensor,
    TensorName,
    TensorNames,
    local_piece_of_dtensor,
    tensor_info_of_allocation,
    tensor_parts_by_role,
)
from memfit.records import Category, TensorInfo

_FSDP = Patch(
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam",
    "init_unsharded_param",
    why="tell gathered parameters from shares",
)
_OF_SCALER = {
    "_scale": "loss scale",
    "_growth_tracker": "loss scale growth tracker",
    "_per_optimizer_states": "found_inf flag",
}
"""Attributes of a gradient scaler, unless it is disabled, and what they hold."""
_PASSED_ON = {"grad_scale": "loss scale", "found_inf": "found_inf flag"}
"""The same of an optimizer that unscales by itself."""
NO_TENSOR = -1
"""The index of a tensor that is not described."""


@dataclass(frozen=True, slots=True)
class OwnerSnapshot:
    """The owners of one category at one moment."""

    serial: int
    """Serial of the moment, as in ``event_labels.py``."""
    category: Category
    rows: "array[int]"
    """Four numbers for each owner: the address of its storage, the indices of its tensor (or ``NO_TENSOR``)
    and of the op that computed it, and the number of backwards before the node that saved it was created (0
    outside graphs). An allocation older than the last of those backwards is no activation of the graph, but
    an input to it."""


@dataclass(slots=True)
class MemoryOwners:
    """Every owner of memory that was found in one run."""

    tensors: dict[TensorInfo, int] = field(default_factory=dict)
    """Descriptions of the tensors that own memory, with their indices."""
    ops: dict[str, int] = field(default_factory=lambda: {"": 0})
    """Ops that computed saved tensors, with their indices; index 0 stands for no op."""
    snapshots: list[OwnerSnapshot] = field(default_factory=list)
    checkpoints: NonReentrantCheckpoints = field(default_factory=NonReentrantCheckpoints)
    host: HostTensors = field(default_factory=HostTensors)
    incomplete: bool = False
    """Whether an object could not be inspected."""
    _backwards: list[int] = field(default_factory=list)  # autograd's sequence number at each backward
    _leaves: list[weakref.ref[torch.Tensor]] = field(default_factory=list)  # of the last graph
    _seen_leaves: "weakref.WeakValueDictionary[int, torch.Tensor]" = field(
        default_factory=weakref.WeakValueDictionary
    )
    _names: TensorNames = field(default_factory=TensorNames)
    _gathered: "weakref.WeakValueDictionary[int, torch.Tensor]" = field(
        default_factory=weakref.WeakValueDictionary
    )
    """Parameters as FSDP2 gathers them from all ranks for a module's computation: they are no rank's share.
    Modules hold them in the place of their shares meanwhile; they do not name what FSDP1 gathers.

    Source: ``FSDPParam.init_unsharded_param``, torch/distributed/fsdp/_fully_shard/_fsdp_param.py, PyTorch
    2.14.
    """

    def watch(self, hooks: InstalledHooks) -> None:
        """From now on, track checkpoints until their backward, and note what FSDP2 gathers."""
        self.checkpoints.watch(hooks)
        hooks.wrap_when_imported(_FSDP, init_unsharded_param=self._note_gathered)

    def _note_gathered(self, original: Callable[..., None], holder: Any, *args: Any) -> None:
        original(holder, *args)
        gathered = holder._unsharded_param
        self._gathered[id(gathered)] = gathered

    def forget(self) -> None:
        """Forget all snapshots so far; the names of tensors stay known."""
        for past in (self.tensors, self.snapshots, self._backwards):
            past.clear()
        self.ops = {"": 0}

    @contextmanager
    def skipping_failures(self) -> Iterator[None]:
        """Skip an object that cannot be inspected: one under construction, or one whose own code raises."""
        try:
            yield
        except Exception:  # noqa: BLE001 - the classes of a script may do anything
            self.incomplete = True

    def record_modules(self, serial: int, roots: Mapping[torch.nn.Module, str]) -> None:
        """Record the buffers, gradients and parameters of some modules."""
        parameters: list[torch.Tensor] = []
        buffers: list[torch.Tensor] = []
        for root, name in roots.items():
            with self.skipping_failures():
                parameters += self._names.learn(name, root.named_parameters(remove_duplicate=False))
                buffers += self._names.learn(name, root.named_buffers(remove_duplicate=False))
        self._record(serial, Category.BUFFER, map(self._named, buffers))
        self.record_gradients(serial, parameters)
        self.record_parameters(serial, parameters)

    def record_parameters(self, serial: int, parameters: Iterable[torch.Tensor]) -> None:
        """Record parameters: this rank's share, or what FSDP or ZeRO-3 has gathered of the others' shares."""
        rows: dict[Category, list[NamedTensor]] = {Category.PARAMETER: [], Category.COMMUNICATION: []}
        for parameter in parameters:
            gathered = self._gathered.get(id(parameter)) is parameter or _partitioned_by_deepspeed(parameter)
            rows[Category.COMMUNICATION if gathered else Category.PARAMETER].append(self._named(parameter))
        for category, named in rows.items():
            self._record(serial, category, named)

    def record_gradients(self, serial: int, parameters: Iterable[torch.Tensor]) -> None:
        """Record the gradients of some parameters, and those that Megatron accumulates (``main_grad``)."""
        self._record(
            serial,
            Category.GRADIENT,
            (
                NamedTensor(gradient, self._names.of(parameter), f".{attribute}")
                for parameter in parameters
                if parameter.is_leaf
                for attribute in ("grad", "main_grad")
                if isinstance(gradient := getattr(parameter, attribute, None), torch.Tensor)
            ),
        )

    def record_flat(self, serial: int, category: Category, tensors: Iterable[torch.Tensor]) -> None:
        """Record buffers that hold parameters or gradients one after the other."""
        name = TensorName("flat parameters" if category is Category.PARAMETER else "flat gradients")
        listed = list(tensors)
        self._record(serial, category, (NamedTensor(tensor, name) for tensor in listed))
        self.host.hold(category, listed)

    def record_optimizer_state(self, serial: int, optimizer: Optimizer) -> None:
        """Record the tensors of an optimizer's state, however nested."""
        self._record(
            serial,
            Category.OPTIMIZER_STATE,
            (
                NamedTensor(tensor, self._names.of(parameter), f".{key}")
                for parameter, state in local_optimizer(optimizer).state.items()
                for key, value in (state.items() if isinstance(state, Mapping) else (("state", state),))
                for tensor in tensors_in_containers(value)
            ),
        )

    def record_loss_scale(self, serial: int, holder: torch.amp.GradScaler | Optimizer) -> None:
        """Record the tensors of a gradient scaler, or those that an optimizer that unscales by itself got."""
        named = (
            NamedTensor(tensor, TensorName(name))
            for attribute, name in (_PASSED_ON if isinstance(holder, Optimizer) else _OF_SCALER).items()
            for tensor in tensors_in_containers(getattr(holder, attribute, None))
        )
        self._record(serial, Category.BUFFER, named)

    def record_arguments(self, serial: int, arguments: Iterable[object]) -> None:
        """Record the tensors that an outermost module is called with, unless a graph computed them.

        Their names are known if a graph saves them.
        """
        rows = array("q")
        for tensor in tensors_in_containers(arguments):
            if tensor.grad_fn is None:
                for address in gpu_addresses_of_tensors([tensor]):
                    rows.extend((address, NO_TENSOR, 0, 0))
        self.snapshots.append(OwnerSnapshot(serial, Category.INPUT, rows))

    def record_copies(self, serial: int, tensors: Iterable[torch.Tensor]) -> None:
        """Record copies of the parameters that the script trains."""
        self._record(serial, Category.COPY, map(self._named, tensors))

    def record_graph(self, serial: int, roots: Iterable[object], *, by_hand: bool = False) -> None:
        """Record what autograd keeps for the backward of some tensors, and the leaves of that backward.

        Args:
            serial: of this moment.
            roots: tensors, however nested: the roots of a backward pass.
            by_hand: the script has no optimizer. Leaves of more than one graph then count as parameters,
                whatever their type.
        """
        root_tensors = list(tensors_in_containers(roots))
        nodes = [] if _is_traced() else list(autograd_nodes_of_tensors(root_tensors))
        leaves: list[torch.Tensor] = [each.variable for each in nodes if each.name().endswith(ACCUMULATE)]
        self._leaves = [weakref.ref(leaf) for leaf in leaves]
        recurring = [leaf for leaf in leaves if by_hand and self._seen_leaves.get(id(leaf)) is leaf]
        self._seen_leaves.update((id(leaf), leaf) for leaf in leaves)
        parameters = (leaf for leaf in leaves if isinstance(leaf, torch.nn.Parameter))
        self.record_parameters(serial, [*recurring, *parameters])
        rows_of = {Category.ACTIVATION: array("q"), Category.INPUT: array("q")}
        for saved in chain(self.checkpoints.inputs(), *map(tensors_saved_by_node, nodes)):
            with self.skipping_failures():
                earlier = bisect_right(self._backwards, saved.sequence)
                op = self.ops.setdefault(saved.op, len(self.ops))
                rows = rows_of[Category.INPUT if saved.given else Category.ACTIVATION]
                for _, address, part in _memory(saved.tensor):
                    rows.extend((address, self._index_of(self._describe_saved(saved, part)), op, earlier))
        for category, rows in rows_of.items():
            self.snapshots.append(OwnerSnapshot(serial, category, rows))
        self._record_results(serial, root_tensors)

    @property
    def awaits_backward(self) -> bool:
        """Whether a graph was found that keeps tensors for a backward."""
        return any(snapshot.category is Category.ACTIVATION and snapshot.rows for snapshot in self.snapshots)

    def record_other_tensors(
        self, serial: int, computed: Iterable[torch.Tensor], others: Iterable[torch.Tensor]
    ) -> None:
        """Record tensors that count as owners only of memory without another owner."""
        self._record_results(serial, computed)
        self._record(serial, Category.UNKNOWN, (NamedTensor(tensor, TensorName()) for tensor in others))

    def record_backward(self) -> None:
        """Record that a backward pass begins: nodes created from now on are not part of its graph."""
        self._backwards.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]

    def record_gradients_of_graph(self, serial: int) -> None:
        """Record the gradients of the leaves of the last recorded graph, inputs included."""
        self.record_gradients(serial, [leaf for ref in self._leaves if (leaf := ref()) is not None])

    def record_cublas_workspaces(self, serial: int, sizes: Mapping[int, int]) -> None:
        """Record cuBLAS workspaces: bytes by address."""
        rows = array("q")
        for address, size in sizes.items():
            rows.extend((address, self._index_of(TensorInfo("", "cuBLAS workspace", "uint8", (size,))), 0, 0))
        self.snapshots.append(OwnerSnapshot(serial, Category.WORKSPACE, rows))

    def _record_results(self, serial: int, computed: Iterable[torch.Tensor]) -> None:
        """Record tensors that a graph computed."""
        results = (
            NamedTensor(tensor, TensorName(f"result of {tensor.grad_fn.name()}"))
            for tensor in computed
            if tensor.grad_fn is not None
        )
        self._record(serial, Category.OUTPUT, results)

    def _describe_saved(self, saved: SavedTensorInfo, part: torch.Tensor) -> TensorInfo:
        """Describe a part of a saved tensor; a copy of a parameter in another dtype is named after it."""
        original = self._names.of(saved.cast_of) if saved.cast_of is not None else TensorName()
        whose = "autocast's copy of" if saved.by_autocast else "copy of"
        name = (
            TensorName(f"{whose} {original.own}", original.module) if original.own else TensorName(saved.what)
        )
        return tensor_info_of_allocation([NamedTensor(part, name)])

    def _record(self, serial: int, category: Category, owners: Iterable[NamedTensor]) -> None:
        """Record the addresses of some tensors."""
        if _is_traced():
            return
        by_address: dict[int, list[NamedTensor]] = {}
        for owner in owners:
            with self.skipping_failures():
                for part_name, address, part in _memory(owner.tensor):
                    suffix = f"{owner.suffix}.{part_name}"
                    named = replace(owner, tensor=part, suffix=suffix) if part_name else owner
                    by_address.setdefault(address, []).append(named)
        rows = array("q")
        for address, tensors in by_address.items():
            with self.skipping_failures():
                rows.extend((address, self._index_of(tensor_info_of_allocation(tensors)), 0, 0))
        self.snapshots.append(OwnerSnapshot(serial, category, rows))

    def _named(self, tensor: torch.Tensor) -> NamedTensor:
        return NamedTensor(tensor, self._names.of(tensor))

    def _index_of(self, tensor: TensorInfo) -> int:
        return self.tensors.setdefault(tensor, len(self.tensors))


def _partitioned_by_deepspeed(parameter: torch.Tensor) -> bool:
    """Return whether ZeRO-3 holds a share of a parameter elsewhere, so that its own memory is gathered.

    Source: ``ds_persist``, ``deepspeed/runtime/zero/parameter_offload.py``, DeepSpeed 0.19.8: whether a
    parameter stays gathered.
    """
    return not getattr(parameter, "ds_persist", True)


def gpu_addresses_of_tensors(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return the addresses of the GPU memory that some tensors use."""
    return {address for tensor in tensors for _, address, _ in _memory(tensor)}


def _is_traced() -> bool:
    """Return whether torch.jit is tracing: shapes are then tensors, and reading them adds to the trace."""
    return torch._C._get_tracing_state() is not None


def _memory(tensor: torch.Tensor) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yield the parts of a tensor in GPU memory: several for a sparse tensor, none for a wrapper of tensors.

    Yields:
        The name of the part (``values``; empty for a strided tensor), its address, and the tensor at it.
    """
    if not local_piece_of_dtensor(tensor).is_cuda:
        return
    for name, part in tensor_parts_by_role(tensor):
        try:
            address = tensor_storage_address(local_piece_of_dtensor(part))
        except (RuntimeError, ValueError):  # wrappers of torch.func (NotImplementedError); lazy tensors
            continue
        if address:
            yield name, address, part if name else tensor


@dataclass(frozen=True, slots=True)
class _LiveObjects:
    """The objects that are alive."""

    roots: tuple[torch.nn.Module, ...]
    """Outermost modules."""
    optimizers: tuple[Optimizer, ...]
    differentiable: tuple[torch.Tensor, ...]
    """Tensors with a ``grad_fn``."""
    others: tuple[torch.Tensor, ...]
    """Tensors without one."""


def find_live_objects() -> _LiveObjects:
    """Return every live object, also those that were never met on the way, but for those in ``gc.freeze``.

    Examining all objects of the process takes tens of milliseconds, so it is done a few times in a run at
    most.
    """
    modules: list[torch.nn.Module] = []
    optimizers: list[Optimizer] = []
    tensors: list[torch.Tensor] = []
    for candidate in gc.get_objects():
        kind = type(candidate)  # isinstance would consult __class__, with which proxies impersonate others
        if issubclass(kind, torch.nn.Module):
            modules.append(candidate)
        elif issubclass(kind, Optimizer):
            optimizers.append(candidate)
        elif issubclass(kind, torch.Tensor) and not issubclass(kind, FakeTensor):  # fake: without memory
            tensors.append(candidate)
    # A module under construction, before super().__init__(), has no _modules.
    children = {id(child) for module in modules for child in vars(module).get("_modules", {}).values()}
    with torch._C.DisableTorchFunctionSubclass():  # run no code of tensor subclasses
        differentiable = tuple(tensor for tensor in tensors if tensor.grad_fn is not None)
        others = tuple(tensor for tensor in tensors if tensor.grad_fn is None)
    roots = tuple(module for module in modules if id(module) not in children)
    return _LiveObjects(roots, tuple(optimizers), differentiable, others)
