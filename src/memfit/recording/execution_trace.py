"""Read what PyTorch's ExecutionTraceObserver wrote: the operations that ran on the GPU, in order.

    aten::linear                                composite: its parts count
      aten::addmm                               runs on the GPU: this counts, and nothing inside of it
        aten::as_strided ...
    autograd::engine::evaluate_function: ...    its parts count
    aten::mm
      PythonDispatchMode                        what the mode runs counts, if it runs anything
        aten::mm
    c10d::allreduce_                            what the ghost marks in it counts: calls of NCCL

The observer is C++, and holds no tensor: unlike a dispatch mode in Python, it changes neither when memory is
freed nor which tensors Python sees.

Source: torch/csrc/profiler/standalone/execution_trace_observer.cpp, PyTorch 2.14.1.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import torch

from memfit.recording.operation_of_call import layout_of_strides, leaves_gpu_alone
from memfit.records import Operand, Operation
from memfit.timing.kernel_work import work_of

_PYTHON = "Python"
"""What the names of modes and of tensor subclasses that dispatch in Python begin with."""
_CUDA = "cuda"
_OF_PARTS = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "fsdp::")
"""Operations of several ranks: composite, though a kernel of their own implements them."""
_DTYPES = {
    "float": "float32", "double": "float64", "long int": "int64", "long": "int64", "int": "int32",
    "short int": "int16", "short": "int16", "unsigned char": "uint8", "signed char": "int8",
    "bool": "bool", "c10::BFloat16": "bfloat16", "c10::Half": "float16", "c10::complex<float>": "complex64",
}  # fmt: skip
_MUCH = 1 << 20
"""Bytes below which an operation on the host takes no longer than its call."""
_UNDEFINED = "nullptr"
"""The dtype of a tensor that does not exist: the gradient of an input that needs none."""
_TENSOR = 6
"""Numbers that describe a tensor: itself, its storage, offset, elements, bytes of one, device."""


class _Values(msgspec.Struct):
    values: list[Any]
    shapes: list[Any]
    types: list[str]
    strides: list[Any] = []


class _Attribute(msgspec.Struct):
    name: str
    value: Any


class TraceNode(msgspec.Struct):
    """One node: an operation, a node of autograd, a mark."""

    id: int
    """In the order in which nodes began."""
    name: str
    ctrl_deps: int
    """The node inside of which it ran."""
    inputs: _Values
    outputs: _Values
    attrs: list[_Attribute]
    waits: bool = False
    """Whether the host waited in it, as a mark inside of it says."""
    moved_on_cpu: int = 0
    """Bytes that it read and wrote, where it computed on the host alone."""

    def attribute(self, name: str) -> Any:
        """Return an attribute; None if there is none of this name."""
        return next((each.value for each in self.attrs if each.name == name), None)


class _ExecutionTrace(msgspec.Struct):
    nodes: list[TraceNode]


def read_execution_trace(written: bytes, marks: str, inner: str) -> tuple[list[TraceNode], Counter[str]]:
    """Read what ran on the GPU.

    Args:
        written: by the observer.
        marks: what the names of marks begin with; what ran inside of one is left out.
        inner: what the names of those begin with that count wherever they are.

    Returns:
        The operations and the marks, in order, an operation after the marks inside of it; and how many nodes
        of each name there are in all.
    """
    nodes = msgspec.json.decode(written, type=_ExecutionTrace).nodes
    inside: defaultdict[int, list[TraceNode]] = defaultdict(list)
    known = {node.id for node in nodes}
    for node in sorted(nodes, key=lambda node: node.id):
        inside[node.ctrl_deps if node.ctrl_deps in known and node.ctrl_deps != node.id else -1].append(node)
    left = list(inside[-1])
    found: list[tuple[int, TraceNode]] = []

    def take_marks(node: TraceNode) -> list[TraceNode]:
        marks = [each for each in _all_inside(node, inside) if each.name.startswith(inner)]
        node.waits = any(each.name.startswith(f"{inner}synchronize") for each in marks)
        marks = [each for each in marks if not each.name.startswith(f"{inner}synchronize")]
        found.extend((mark.id, mark) for mark in marks)
        return marks

    def take(node: TraceNode, *, after_inner: bool) -> None:
        inner_marks = take_marks(node)
        found.append((max(each.id for each in (node, *(inner_marks if after_inner else ()))), node))

    while left:
        node = left.pop()
        parts = inside[node.id]
        if node.name.startswith(marks):
            take(node, after_inner=False)
        elif any(part.name.startswith(_PYTHON) for part in parts) or not _is_whole(node):
            left += parts
        elif _runs_on_gpu(node):
            take(node, after_inner=True)
        elif (moved := _moved_on_cpu(node)) >= _MUCH:
            node.moved_on_cpu = moved
            take(node, after_inner=True)
        else:  # it may allocate
            take_marks(node)
    # Threads run beside each other: autograd's runs while the one that called it waits.
    return [node for _, node in sorted(found, key=lambda each: each[0])], Counter(node.name for node in nodes)


def _all_inside(node: TraceNode, inside: Mapping[int, list[TraceNode]]) -> Iterator[TraceNode]:
    for part in inside.get(node.id, ()):
        yield part
        yield from _all_inside(part, inside)


def operation_of_node(node: TraceNode) -> Operation:
    """Return the record of an operation."""
    schema = str(node.attribute("op_schema") or node.name)
    name = schema.partition("(")[0].replace("::", ".")
    operands, results = tuple(_operands(node.inputs)), tuple(_operands(node.outputs))
    operation = Operation(
        name=name if name.count(".") > 1 else f"{name}.default",
        call=-1,
        source=-1,
        reads=(),
        creates=(),
        writes=(),
        flops=0,
        moved=0,
        dtype=(results or operands)[0].dtype,
        random=False,
        seconds=0.0,
        allocated=0,
        operands=operands,
        results=results,
        is_causal=_is_causal(schema, node),
        launches=1,
        waits=node.waits,
    )
    return replace(operation, flops=int(work_of(operation).flops))


@functools.cache
def _is_composite(schema: str) -> bool:
    name = schema.partition("(")[0]
    if name.startswith(_OF_PARTS):
        return True
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    # A few, such as _fused_rms_norm and silu_backward, consist of others on all devices but a GPU.
    return bool(has_kernel(name, "CompositeImplicitAutograd")) and not has_kernel(name, "CUDA")


def _is_whole(node: TraceNode) -> bool:
    """Return whether a node is an operation that a kernel implements: not one that consists of others."""
    schema = node.attribute("op_schema")
    return bool(schema) and "::" in node.name and not _is_composite(schema)


def _is_tensor(value: list[Any]) -> bool:
    return len(value) == _TENSOR and isinstance(value[0], int) and isinstance(value[-1], str)


def _tensors(values: Any) -> Iterator[list[Any]]:
    if isinstance(values, list):
        if _is_tensor(values):
            yield values
        else:
            for each in values:
                yield from _tensors(each)


def _runs_on_gpu(node: TraceNode) -> bool:
    """Return whether a kernel runs, or a copy; not a view, nor an allocation alone."""
    if leaves_gpu_alone(node.name.partition("::")[2]):
        return False
    inputs, outputs = list(_tensors(node.inputs.values)), list(_tensors(node.outputs.values))
    if not any(each[-1].startswith(_CUDA) for each in (*inputs, *outputs)):
        return False
    schema = str(node.attribute("op_schema"))
    is_view = "(a)" in schema and "!" not in schema
    storages = {each[1] for each in inputs}
    return not (is_view and outputs and all(each[1] in storages for each in outputs))


def _moved_on_cpu(node: TraceNode) -> int:
    """Return the bytes that an operation without a kernel on the GPU reads and writes; 0 of a view."""
    inputs, outputs = list(_tensors(node.inputs.values)), list(_tensors(node.outputs.values))
    storages = {each[1] for each in inputs}
    is_view = "!" not in str(node.attribute("op_schema")) and all(each[1] in storages for each in outputs)
    if is_view or leaves_gpu_alone(node.name.partition("::")[2]):
        return 0
    if not outputs:  # it changes lists of tensors in place
        changed = zip(_arguments(str(node.attribute("op_schema"))), node.inputs.values, strict=False)
        outputs = list(_tensors([values for argument, values in changed if "!" in argument]))
    return sum(each[3] * each[4] for each in (*inputs, *outputs) if not each[-1].startswith(_CUDA))


def _operands(values: _Values) -> Iterator[Operand]:
    for value, shape, kind, strides in zip(
        values.values, values.shapes, values.types, values.strides, strict=True
    ):
        yield from _operands_of(value, shape, kind, strides)


def _operands_of(value: Any, shape: Any, kind: str, strides: Any) -> Iterator[Operand]:
    if not isinstance(value, list):
        return
    if _is_tensor(value):
        dtype = kind.removeprefix("Tensor(").removesuffix(")")
        if dtype.startswith(_UNDEFINED):
            return
        dtype = _DTYPES.get(dtype, dtype.removeprefix("c10::").lower())
        on_host = not value[-1].startswith(_CUDA) and bool(shape)
        yield Operand(tuple(shape), dtype, "host" if on_host else layout_of_strides(shape, strides))
        return
    kinds = kind[kind.find("[") + 1 : -1].split(",") if "[" in kind else []
    for each, its_shape, its_kind, its_strides in zip(value, shape, kinds, strides, strict=False):
        yield from _operands_of(each, its_shape, its_kind, its_strides)


def _arguments(schema: str) -> list[str]:
    """Return the arguments of an operation, each with its type.

    >>> _arguments("aten::_foreach_add_.List(Tensor(a!)[] self, Tensor[] other, *, Scalar alpha=1) -> ()")
    ['Tensor(a!)[] self', 'Tensor[] other', 'Scalar alpha=1']
    """
    return [each for each in schema.partition("(")[2].partition(") ->")[0].split(", ") if each != "*"]


def _is_causal(schema: str, node: TraceNode) -> bool:
    names = [each.split(" ")[-1].partition("=")[0] for each in _arguments(schema)]
    place = names.index("is_causal") if "is_causal" in names else -1
    return 0 <= place < len(node.inputs.values) and node.inputs.values[place] is True
