"""A tree of cuDNN backend descriptors, and the convolution in it.

The tree holds the attributes that PyTorch set, recorded by the runtime's cudnn_graph.c. It is passed to cuDNN
unchanged; this module interprets only the attributes of convolutions.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

# Source: cudnn_graph.h 9.24, cudnnBackendDescriptorType_t and cudnnBackendAttributeName_t.
ENGINEHEUR_MODE = 200
HEUR_MODE_FALLBACK = 2
"""``cudnnBackendHeurMode_t``: the list that PyTorch tries last."""
_OPERATIONGRAPH_OPS = 801
_CONVOLUTIONS = {  # type of the operation: its name, and the attributes of its parts
    10: ("forward", {"convolution": 702, "w": 703, "x": 704, "y": 705}),
    11: ("weight gradient", {"convolution": 714, "w": 715, "x": 716, "y": 717}),
    12: ("data gradient", {"convolution": 708, "w": 709, "x": 710, "y": 711}),
}
_COMPUTE_TYPE, _DILATION, _STRIDE, _PADDING = 100, 102, 103, 105
_DATA_TYPE, _SIZES, _STRIDES = 901, 902, 903
_DESCRIPTOR = 15  # cudnnBackendAttributeType_t


class CudnnDescriptor(msgspec.Struct, frozen=True):
    """One of cuDNN's backend descriptors."""

    type: int
    attributes: tuple[tuple[int, int, tuple[Any, ...]], ...]
    """Name, type and values of each, in the order they were set. Descriptors among the values are not
    decoded yet: ``values`` decodes them."""

    def values(self, name: int) -> tuple[Any, ...]:
        """Return the values an attribute was last set to; an empty tuple if it was not set."""
        found: tuple[Any, ...] = ()
        for attribute, kind, values in self.attributes:
            if attribute == name:
                found = values
                if kind == _DESCRIPTOR:
                    found = tuple(msgspec.convert(value, CudnnDescriptor) for value in values)
        return found

    def operations(self) -> Iterator["CudnnDescriptor"]:
        """Yield the operations of the graph that this descriptor is or contains."""
        yield from self.values(_OPERATIONGRAPH_OPS)
        for name, kind, _ in self.attributes:
            if kind == _DESCRIPTOR and name != _OPERATIONGRAPH_OPS:
                for part in self.values(name):
                    yield from part.operations()


class CudnnTensorShape(msgspec.Struct, frozen=True):
    """Shape and layout; sizes and strides in elements."""

    data_type: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class CudnnConvolution(msgspec.Struct, frozen=True, tag_field="kind", tag="convolution"):
    """One convolution. In the backward, ``x``, ``w`` and ``y`` stand for the gradients of their shapes."""

    operation: str
    """``forward``, ``data gradient`` or ``weight gradient``."""
    compute_type: int
    x: CudnnTensorShape
    w: CudnnTensorShape
    y: CudnnTensorShape
    padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    fused: int
    """Number of operations that follow in the same graph: bias, activation."""


class CudnnOperationGraph(msgspec.Struct, frozen=True, tag_field="kind", tag="graph"):
    """A graph of operations without a convolution: attention."""

    operations: int


def cudnn_operation_of_graph(descriptor: CudnnDescriptor) -> CudnnConvolution | CudnnOperationGraph:
    """Return a graph's convolution with the operations fused to it; a ``CudnnOperationGraph`` without one."""
    operations = list(descriptor.operations())
    for operation in operations:
        if operation.type not in _CONVOLUTIONS:
            continue
        name, attributes = _CONVOLUTIONS[operation.type]
        parts = {part: operation.values(attribute) for part, attribute in attributes.items()}
        if not all(parts.values()):
            continue
        (convolution,) = parts.pop("convolution")
        return CudnnConvolution(
            operation=name,
            compute_type=(convolution.values(_COMPUTE_TYPE) or (0,))[0],
            **{part: _tensor(*tensors) for part, tensors in parts.items()},
            padding=convolution.values(_PADDING),
            stride=convolution.values(_STRIDE),
            dilation=convolution.values(_DILATION),
            fused=len(operations) - 1,
        )
    return CudnnOperationGraph(len(operations))


def _tensor(descriptor: CudnnDescriptor) -> CudnnTensorShape:
    return CudnnTensorShape(
        (descriptor.values(_DATA_TYPE) or (0,))[0], descriptor.values(_SIZES), descriptor.values(_STRIDES)
    )
