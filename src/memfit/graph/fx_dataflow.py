"""Dataflow of a ``torch.fx`` graph: the values it makes and uses, found by running it on fake tensors.

Values that share a storage are identified from the storages of PyTorch's fake tensors, which behave like the
operators themselves, views included. Operator schemas would not do: they declare nothing for ``_unsafe_view``
and for the elements of a list, and only a possible alias for ``reshape`` and ``contiguous``. Nor would the
fake tensors that tracing leaves in the graph (``meta["val"]``): after ``make_fx(tracing_mode="real")`` each
has a storage of its own.

Source: ``FakeTensorMode`` in torch/_subclasses/fake_tensor.py; ``extract_val`` in torch/fx/experimental/
proxy_tensor.py, which documents that it does not track storages (PyTorch 2.14.1).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from memfit.errors import MemfitError, TargetError, UsageError
from memfit.records import Dataflow, GraphValue


def dataflow_of_fx_graph(module: object) -> Dataflow:
    """Return the values of a graph, with bytes and lifetimes. The graph is neither computed nor changed.

    Args:
        module: a ``torch.fx.GraphModule`` with known input sizes: from ``torch.export``, from ``make_fx``, or
            as AOTAutograd passes it to a compiler.

    Raises:
        UsageError: it is not such a graph.
        TargetError: an operation cannot be followed; the message names it.

    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> graph = make_fx(lambda x: torch.split(x + 1, 2)[0].add_(1))(torch.zeros(4, 2))
    >>> [(value.name, value.begin, value.end, value.size) for value in dataflow_of_fx_graph(graph).values[:3]]
    [('x_1', 0, 2, 32), ('add', 1, 3, 32), ('split[0]', 2, 5, 32)]
    """
    if not isinstance(module, fx.GraphModule):
        raise UsageError(
            f"Cannot pack a value of type {type(module).__name__}: memfit.pack takes a trace, its path "
            "or a torch.fx.GraphModule. Pass the .graph_module of an exported program, or "
            "make_fx(function)(*inputs) for a function."
        )
    mode = FakeTensorMode(allow_fallback_kernels=False)
    mode.cache_enabled = False  # the cache makes results from metadata, without running the operator
    with mode, _KernelAliasing(), torch.no_grad():  # type: ignore[no-untyped-call]
        interpreter = _StorageInterpreter(module)
        inputs = (node.meta.get("val", _UNKNOWN) for node in module.graph.nodes if node.op == "placeholder")
        interpreter.run(*inputs, enable_io_processing=False)
    return interpreter.dataflow()


_UNKNOWN = object()

_aten = torch.ops.aten
_REDUCED_IN_PLACE = {
    _aten.binary_cross_entropy.default,
    _aten.mse_loss.default,
    _aten.smooth_l1_loss.default,
    _aten.soft_margin_loss.default,
}
_COPIES_THE_STORAGE = {
    _aten.diagonal_scatter.default,
    _aten.select_scatter.default,
    _aten.slice_scatter.default,
}


class _KernelAliasing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Corrects fake operators whose storages differ from those of the kernels.

    Source: Loss.cpp, Dropout.cpp and TensorShape.cpp (``clone_preserve_strides``) in aten/src/ATen/native
    (PyTorch 2.14.1); observed on the CPU, and with the CUDA build on the ghost. ``benchmarks/aliases.py
    --operators`` finds the differences among all operators of PyTorch's own database (OpInfo).
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        arguments = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | (
            kwargs or {}
        )
        if func in _REDUCED_IN_PLACE and arguments.get("reduction", 1):
            # The mean is written into the storage of the losses of all elements, and keeps it.
            return func(**arguments | {"reduction": 0}).resize_(())
        if func in _COPIES_THE_STORAGE:  # gaps included; so does as_strided_scatter, its fake too
            whole = arguments["self"]
            return _aten.as_strided_scatter(whole, whole, whole.shape, whole.stride(), whole.storage_offset())
        if func is _aten.native_dropout.default and not (arguments["train"] and arguments["p"]):
            return arguments["input"].clone(), torch.ones_like(arguments["input"], dtype=torch.bool)
        return func(*args, **(kwargs or {}))


class _NodeOutput(NamedTuple):
    """A tensor that a node returned."""

    name: str
    node: fx.Node
    storage: StorageWeakRef
    device: str


class _StorageInterpreter(fx.Interpreter):
    """Runs a graph, and records the storage of each tensor that a node returns."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False  # raise errors unchanged
        self._node: fx.Node = next(iter(module.graph.nodes))
        self._stand_ins: dict[StorageWeakRef, torch.Tensor] = {}
        self._input_storages: set[StorageWeakRef] = set()
        self._sizes: dict[StorageWeakRef, int] = {}
        self._outputs: list[_NodeOutput] = []
        self._latest_in_storage: dict[StorageWeakRef, int] = {}
        self._shared: list[tuple[int, int]] = []

    def dataflow(self) -> Dataflow:
        """Return the recorded dataflow."""
        position = {node: number for number, node in enumerate(self.graph.nodes)}
        values = []
        for name, node, storage, device in self._outputs:
            end = max((position[user] for user in node.users), default=position[node]) + 1
            size = self._sizes[storage]
            values.append(
                GraphValue(name, position[node], end, size, device, storage in self._input_storages)
            )
        return Dataflow(tuple(values), tuple(self._shared))

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, record its results, and check that its inputs kept their storages."""
        self._node = n
        if n.op == "call_module" or isinstance(n.target, HigherOrderOperator):
            raise self._refused(
                "is a subgraph, whose memory memfit cannot follow. Inline the subgraph: "
                "make_fx(graph_module)(*inputs), or exported.run_decompositions({}).graph_module."
            )
        before = [
            (used, _storage(tensor), tensor)
            for used in n.all_input_nodes
            for tensor in _tensors(self.env[used])
        ]
        try:
            result = super().run_node(n)
        except MemfitError:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise self._refused(
                f"cannot be run on fake tensors ({why}). Remove it from the graph. If it is a custom "
                "operator, register a fake kernel with torch.library.register_fake."
            ) from error
        for used, storage, tensor in before:
            if _storage(tensor) != storage:
                raise self._refused(
                    f"moves {used.name} to another storage. Replace it with an operation that "
                    "returns a new tensor."
                )
        if n.op != "output":
            self._record(n, result)
        return result

    def placeholder(self, target: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return a stand-in for an input."""
        value = super().placeholder(target, args, dict(kwargs))
        if value is _UNKNOWN:
            raise self._refused(
                "has no size (no meta['val']). Trace with torch.export or make_fx, or set the sizes with "
                "torch.fx.passes.fake_tensor_prop.FakeTensorProp(graph_module).propagate(*inputs)."
            )
        return tree_map(self._stand_in, value)

    def get_attr(self, target: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return a stand-in for a parameter or a constant."""
        return tree_map(self._stand_in, super().get_attr(target, args, dict(kwargs)))

    def _stand_in(self, value: Any) -> Any:
        """Return a tensor without values at the same place in a stand-in storage, one for each storage."""
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise self._refused(
                f"is the symbolic number {value}, but sizes must be plain numbers. Trace without dynamic "
                "shapes."
            )
        if not isinstance(value, torch.Tensor):
            return value
        self._check_layout(value)
        shape, strides, offset = value.shape, value.stride(), value.storage_offset()
        if any(isinstance(number, torch.SymInt) for number in (*shape, *strides, offset)):
            raise self._refused(
                f"has the shape {tuple(shape)}, but sizes must be plain numbers. Trace without dynamic "
                "shapes."
            )
        storage, size = _storage(value), value.untyped_storage().nbytes()
        if storage not in self._stand_ins:
            self._stand_ins[storage] = torch.empty(size, dtype=torch.uint8, device=value.device)
        whole = self._stand_ins[storage]
        self._input_storages.add(_storage(whole))
        found = torch.empty(0, dtype=value.dtype, device=value.device)
        found.set_(whole.untyped_storage(), offset, shape, strides)
        found = found.conj() if value.is_conj() else found
        return torch._neg_view(found) if value.is_neg() else found

    def _check_layout(self, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
            kind = tensor.layout if tensor.layout is not torch.strided else type(tensor).__name__
            raise self._refused(
                f"is a {kind} tensor, which is not backed by a single storage. Use strided tensors."
            )

    def _record(self, node: fx.Node, result: Any) -> None:
        for tensor in _tensors(result):
            self._check_layout(tensor)
        used = [self.env[argument] for argument in node.all_input_nodes]  # they may have been resized
        for tensor in _tensors((result, used)):
            size = 0 if tensor._is_zerotensor() else tensor.untyped_storage().nbytes()
            self._sizes[_storage(tensor)] = max(self._sizes.get(_storage(tensor), 0), size)
        for index, tensor in enumerate(_tensors(result)):
            name = node.name if tensor is result else f"{node.name}[{index}]"
            storage = _storage(tensor)
            if storage in self._latest_in_storage:
                self._shared.append((self._latest_in_storage[storage], len(self._outputs)))
            self._latest_in_storage[storage] = len(self._outputs)
            self._outputs.append(_NodeOutput(name, node, storage, str(tensor.device)))

    def _refused(self, why: str) -> TargetError:
        what = getattr(self._node.target, "__name__", self._node.target)
        called = self._node.name if self._node.op == "placeholder" else f"{self._node.name} ({what})"
        return TargetError(f"Cannot pack the graph: {called}{_line(self._node)} {why}")


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    """Return the identity of a storage; its address is not reused while the result is held."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _line(node: fx.Node) -> str:
    """Return the user's line behind a node; empty if the trace has none."""
    files = [
        line.strip() for line in (node.stack_trace or "").splitlines() if line.strip().startswith("File ")
    ]
    return f", {files[-1].removeprefix('File ')}," if files else ""
