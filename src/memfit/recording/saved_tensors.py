"""Tensors saved for the backward: every tensor that a node of the autograd graph keeps.

    loss <── node ──> saved: weight, input        read without unpacking: no saved-tensor hook runs, nothing
              │                                   is recomputed (checkpointing) or fetched (offload)
             node ──> saved: ...

Source: ``SavedTensor.data`` and the ``_raw_saved_*`` attributes of nodes (torch/csrc/autograd/init.cpp,
PyTorch 2.14.1); a ``torch.autograd.Function`` has ``_raw_saved_tensors``, and the attributes that its
``forward`` sets on ``ctx``.
"""

import functools
import re
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch
from memfit.recording.label_running_modules import ACCUMULATE, CLAIMED, tensors_in_containers

_CHECKPOINT = Patch("torch.utils.checkpoint:_CheckpointFrame", "__init__", why="find what checkpoints keep")

_RAW = "_raw_saved_"
_ALL = "_raw_saved_tensors"
_RESULT = "result"  # an output of the node's own op: ``result1 of NativeDropoutBackward0``
_CAST = "ToCopyBackward0"
_VIEWS = frozenset(
    f"{name}Backward{number}"
    for name in (
        *("View", "UnsafeView", "ReshapeAlias", "Alias", "AsStrided", "T", "Transpose", "Permute", "Expand"),
        *("Squeeze", "Unsqueeze", "Select", "Slice", "Narrow", "Split", "SplitWithSizes", "Chunk", "Unbind"),
        *("Diagonal", "Unfold", "ViewAsReal", "ViewAsComplex", "Swapaxes", "Movedim"),
    )
    for number in range(3)
)
"""Nodes whose result shares the memory of their first input."""


class SavedTensorInfo(NamedTuple):
    """A tensor that a node has saved."""

    tensor: torch.Tensor
    what: str
    """Its role for the node: ``mat1 of AddmmBackward0``."""
    op: str
    """The op that computed it: ``Addmm``. If no node has it as its result, like the mean that a normalization
    keeps, the op that saved it."""
    given: bool
    """Whether no node of a graph is known to have computed it: a leaf, or a tensor without gradients."""
    sequence: int
    """Autograd's sequence number of the node that saved it: nodes are numbered as they are created."""
    cast_of: torch.Tensor | None
    """The leaf of which it is a copy in another dtype, if any."""
    by_autocast: bool
    """Whether autocast was on when the module that made the copy returned."""


def autograd_nodes_of_tensors(roots: Iterable[object]) -> Iterator[Any]:
    """Yield the nodes of the graph of some tensors, however nested: the roots of a backward pass."""
    nodes: list[Any] = [
        tensor.grad_fn for tensor in tensors_in_containers(roots) if tensor.grad_fn is not None
    ]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)


class NonReentrantCheckpoints:
    """The non-reentrant checkpoints, whose inputs are not in any node of the graph.

    Source: ``_CheckpointFrame`` in torch/utils/checkpoint.py: ``saved_args`` in PyTorch 2.14.1, before that a
    separate node under ``input_saver``.
    """

    def __init__(self) -> None:
        self._frames: weakref.WeakSet[Any] = weakref.WeakSet()

    def watch(self, hooks: InstalledHooks) -> None:
        """From now on, track each checkpoint until its backward."""
        hooks.wrap_when_imported(_CHECKPOINT, __init__=self._build)

    def inputs(self) -> Iterator[SavedTensorInfo]:
        """Yield the inputs that checkpoints keep until their backward."""
        now = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        for frame in list(self._frames):
            saver = getattr(getattr(frame, "input_saver", None), "grad_fn", None)
            saved = saver._raw_saved_tensors if saver is not None else getattr(frame, "saved_args", ())
            for tensor in (tensor for raw in saved if hasattr(raw, "data") for tensor in _tensors_of(raw)):
                op = _op(node) if (node := _producer(tensor)) is not None else ""
                yield SavedTensorInfo(
                    tensor, "input of a checkpoint", op, not op, now, None, by_autocast=False
                )

    def _build(self, original: Callable[..., None], frame: Any, *args: Any, **options: Any) -> None:
        original(frame, *args, **options)
        self._frames.add(frame)


def tensors_saved_by_node(node: Any) -> Iterator[SavedTensorInfo]:
    """Yield the tensors that a node has saved."""
    name = node.name()
    for attribute in _raw_attributes(node.__class__):
        try:
            raw = getattr(node, attribute)
        except RuntimeError:  # freed already, by an earlier backward through the same graph
            continue
        for entry in raw if isinstance(raw, tuple | list) else (raw,):
            for tensor in _tensors_of(entry):
                what = "" if attribute == _ALL else f"{attribute.removeprefix(_RAW)} of "
                yield _saved(tensor, what + name, node)
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        for attribute, value in vars(node).items():
            for tensor in tensors_in_containers((value,)):
                yield _saved(tensor, f"{attribute} of {name}", node)


@functools.cache
def _raw_attributes(kind: Hashable) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith(_RAW))


def _tensors_of(raw: Any) -> Iterator[torch.Tensor]:
    """Yield the tensor in a SavedTensor, or the tensors in the object that a hook has packed it into."""
    try:
        data = raw.data
    except RuntimeError:  # freed, or modified in place since: the backward will raise
        return
    yield from tensors_in_containers((data,))


def _saved(tensor: torch.Tensor, what: str, saver: Any) -> SavedTensorInfo:
    producer = _producer(tensor)
    is_cast = producer is not None and producer.name() == _CAST
    return SavedTensorInfo(
        tensor,
        what,
        _op(producer or saver),
        producer is None and not what.startswith(_RESULT),
        saver._sequence_nr(),
        getattr(producer.next_functions[0][0], "variable", None) if is_cast else None,
        by_autocast=is_cast and producer.metadata.get(CLAIMED, False),
    )


def _producer(tensor: torch.Tensor) -> Any:
    """Return the node that allocated a tensor's memory, skipping nodes of views; None for a leaf."""
    node: Any = tensor.grad_fn
    while node is not None and node.name() in _VIEWS and node.next_functions:
        node = node.next_functions[0][0]
    return None if node is None or node.name().endswith(ACCUMULATE) else node


def _op(node: Any) -> str:
    return re.sub(r"Backward\d*$", "", node.name())
