"""Operations noted while they ran, so that what they made can be made again.

    Content     what a storage holds between two writes: kept, or to be made by a step
    Step        an operation with its arguments, which are views of contents
    View        a tensor as a part of a content

A content refers to the step that makes it, and a step to the contents that it reads. So what nothing needs
any more is freed by counting references, and a step that has run lets go of its arguments.
"""

import weakref
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from memfit.recording.tensor_storage import storage_of
from memfit.strategies.mechanisms.inspect_tensors import tensor_version
from memfit.strategies.mechanisms.recomputation_counter import mark_as_recomputed


class NotedTensor:
    """A tensor that is kept, as it is now."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version = tensor, tensor_version(tensor)

    def tensor(self) -> torch.Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: it has been changed in place, or its memory was freed.
        """
        tensor, version = self._tensor, tensor_version(self._tensor)
        if version != self._version:
            raise RuntimeError(
                f"memfit: the backward needs a tensor of shape {list(tensor.shape)} that was changed "
                f"in place after the forward used it (it is at version {version}; expected {self._version}). "
                "Use an out-of-place operation, or change it after the backward."
            )
        if tensor.numel() and not storage_of(tensor).nbytes():
            raise RuntimeError(
                f"memfit: the backward needs a tensor of shape {list(tensor.shape)} whose memory was freed "
                "after the forward, as FSDP frees parameters. Recompute whole modules there, not tensors."
            )
        return tensor


class NotedContent:
    """What a storage holds between two writes: kept, copied, or made by a step."""

    __slots__ = ("__weakref__", "_held", "step")

    def __init__(
        self, held: NotedTensor | torch.UntypedStorage | None, step: "NotedOperation | None" = None
    ) -> None:
        self._held, self.step = held, step

    def hold(self, storage: torch.UntypedStorage) -> None:
        """Be what a storage holds, which nothing else changes."""
        self._held, self.step = storage, None

    def storage(self) -> torch.UntypedStorage:
        """Return the storage; if a step makes the content, it must have run."""
        if isinstance(self._held, NotedTensor):
            return self._held.tensor().untyped_storage()
        if self._held is None:
            raise AssertionError("this content has not been made")
        return self._held

    def make(self) -> None:
        """Run the step that makes it, after those that make its arguments."""
        pending = [self]
        while pending:
            step = pending[-1].step
            missing = step.missing() if step is not None else []
            pending += missing
            if not missing:
                pending.pop()
                if step is not None:
                    step.run()


class PlaceInStorage(NamedTuple):
    """Where in a storage a tensor is."""

    dtype: torch.dtype
    offset: Any
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "PlaceInStorage":
        """Return a tensor's place."""
        return cls(tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())

    def tensor(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor at this place."""
        with _unseen():
            empty = torch.empty(0, dtype=self.dtype, device=storage.device)
            return empty.set_(storage, self.offset, self.size, self.stride)


class NotedView(NamedTuple):
    """A tensor as a part of a content."""

    content: NotedContent
    place: PlaceInStorage

    def tensor(self) -> torch.Tensor:
        """Return the tensor, whose content is kept or has been made."""
        return self.place.tensor(self.content.storage())


class FlattenedArguments(NamedTuple):
    """How the arguments of an operation become a list, and the list arguments again.

    PyTorch's own trees take a third of the time of a note. Only lists of tensors need them.
    """

    positional: int
    """How many come first."""
    names: tuple[str, ...]
    """Of those that follow."""
    spec: TreeSpec | None
    """Of PyTorch's tree, if there are lists of tensors."""

    @classmethod
    def flatten(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "tuple[list[Any], FlattenedArguments]":
        """Return arguments as a list, and how."""
        leaves = [*args, *kwargs.values()]
        if any(_has_tensors(each) for each in leaves):
            leaves, spec = tree_flatten((args, kwargs))
            return leaves, cls(0, (), spec)
        return leaves, cls(len(args), tuple(kwargs), None)

    def put_together(self, leaves: list[Any]) -> tuple[Any, Any]:
        """Return the arguments of a list."""
        if self.spec is not None:
            args, kwargs = tree_unflatten(leaves, self.spec)
            return args, kwargs
        return leaves[: self.positional], dict(zip(self.names, leaves[self.positional :], strict=True))


def flatten_values(value: Any) -> list[Any]:
    """Return an argument or the results of an operation as a list."""
    if isinstance(value, torch.Tensor):
        return [value]
    if type(value) is tuple and not any(type(each) in (list, tuple) for each in value):
        return list(value)
    return tree_leaves(value)


def _has_tensors(argument: Any) -> bool:
    return type(argument) in (list, tuple) and any(isinstance(each, torch.Tensor) for each in argument)


class NotedOperation:
    """An operation that can run again.

    Args:
        operation: as PyTorch dispatched it.
        arguments: flattened; a ``NotedView`` in place of each tensor.
        layout: what puts them together.
        written: by number, the arguments that it changes in place.
    """

    __slots__ = ("_arguments", "_layout", "_operation", "_written", "changes", "creates")

    def __init__(
        self, operation: Any, arguments: list[Any], layout: "FlattenedArguments", written: tuple[int, ...]
    ) -> None:
        self._operation, self._arguments, self._layout = operation, arguments, layout
        self._written = written
        self.creates: dict[int, weakref.ref[NotedContent]] = {}
        """By the number of a result: what it makes in a new storage."""
        self.changes: dict[int, weakref.ref[NotedContent]] = {}
        """By the number of an argument: what it makes in that storage."""

    def missing(self) -> list[NotedContent]:
        """Return what must be made before it can run."""
        contents = (each.content for each in self._arguments if isinstance(each, NotedView))
        return [each for each in contents if each.step is not None]

    def run(self) -> None:
        """Run the operation, and let go of its arguments."""
        noted, self._arguments = self._arguments, []
        arguments = [each.tensor() if isinstance(each, NotedView) else each for each in noted]
        before = {index: (weakref.ref(noted[index].content), noted[index].place) for index in self._written}
        del noted
        for index, (content, place) in before.items():
            if content() is not None:  # something else needs it unchanged
                arguments[index] = place.tensor(copy_of_storage(arguments[index]))
        args, kwargs = self._layout.put_together(arguments)
        # With gradients, as in the forward: oneDNN's LSTM makes its workspace only then.
        with mark_as_recomputed(), torch.enable_grad():
            results = flatten_values(self._operation(*args, **kwargs))
        for made, tensors in ((self.creates, results), (self.changes, arguments)):
            for index, reference in made.items():
                if (still := reference()) is not None:
                    still.hold(tensors[index].untyped_storage())


def copy_of_storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return a copy of a tensor's storage."""
    with _unseen():
        copy: torch.UntypedStorage = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]
        return copy


def _unseen() -> Any:
    """Return a context in which no dispatch mode sees operations on plain tensors."""
    return torch._C._DisableTorchDispatch()
