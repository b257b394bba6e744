"""Selective checkpointing: operations whose results are kept while the rest of a region is recomputed.

aten.mm             every call of every overload of aten.mm
aten.mm.default     every call of this overload
aten.mm.default:2   its third call in the region, counted from 0

Eager regions do not use PyTorch's ``create_selective_checkpoint_contexts``: before 2.13, it asks again in the
recomputation whether a call is kept, and no version of it runs a region's backward twice.
"""

import difflib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from memfit.errors import UsageError
from memfit.recording.operation_interception import InterceptionModeAllowingCompilation
from memfit.strategies.mechanisms.replayable_operations import NotedTensor

_Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class KeptResults:
    """The results that one call of a region keeps from its forward for its recomputations.

    A result is released as a recomputation takes it, unless the backward retains its graph. A later
    recomputation, of another part of the region's graph, runs the operation again.
    """

    def __init__(self, operations: Sequence[str]) -> None:
        self.seen: Counter[Any] = Counter()
        """How often the forward ran each operation."""
        self._operations = operations
        self._is_kept = make_keep_decision(operations, self.seen)
        self._results: dict[tuple[Any, int], Any] = {}
        # Read before the checkpoint adds its own: offloading sees kept results as it sees saved tensors.
        self._hooks = _hooks_of_the_script()

    def forward(self) -> InterceptionModeAllowingCompilation:
        """Return the context for the forward: it keeps results."""
        return InterceptionModeAllowingCompilation(self._keep)

    def recomputation(self) -> InterceptionModeAllowingCompilation:
        """Return the context for one recomputation: kept results stand in for their operations."""
        return InterceptionModeAllowingCompilation(_Recomputation(self._results).run)

    def others(self) -> dict[Any, int]:
        """Return, by operation of which results are to be kept, how often the forward called it otherwise."""
        every, calls = _kept_calls(self._operations)
        return {
            operation: sum((operation, number) not in calls for number in range(self.seen[operation]))
            * (operation not in every)
            for operation in every | {each for each, _ in calls}
            if not _is_in_place_or_view(operation)
        }

    def _keep(self, operation: Any, args: Any, kwargs: Any) -> Any:
        result = operation(*args, **kwargs)
        number = self.seen[operation]
        if self._is_kept(operation) and not _is_in_place_or_view(operation):
            self._results[operation, number] = _map(torch.Tensor, self._held, result)
        return result

    def _held(self, tensor: torch.Tensor) -> "_Held":
        return _Held(_alias(tensor), self._hooks)


class _Held:
    """A tensor that is kept, perhaps by the script's saved-tensor hooks."""

    def __init__(self, tensor: torch.Tensor, hooks: "_Hooks | None") -> None:
        self._unpack: Callable[[Any], torch.Tensor]
        pack, self._unpack = (NotedTensor, NotedTensor.tensor) if hooks is None else hooks
        self._packed = pack(tensor)

    def tensor(self) -> torch.Tensor:
        """Return a tensor of its own for autograd, which adds a history to it."""
        return _alias(self._unpack(self._packed))


class _Recomputation:
    def __init__(self, results: dict[tuple[Any, int], Any]) -> None:
        self._results = results
        self._seen: Counter[Any] = Counter()

    def run(self, operation: Any, args: Any, kwargs: Any) -> Any:
        call = operation, self._seen[operation]
        self._seen[operation] += 1
        if call not in self._results:
            return operation(*args, **kwargs)
        # True outside of a backward, too: when something else reads what autograd saved.
        stays = torch._C._autograd._get_current_graph_task_keep_graph()
        held = self._results[call] if stays else self._results.pop(call)
        return _map(_Held, _Held.tensor, held)


def selective_contexts_for_compile(operations: Sequence[str]) -> tuple[Any, Any]:
    """Return PyTorch's contexts for a region that torch.compile traces: it reads them as marks in its graph.

    A module-level function of plain strings: torch.compile calls it by name.
    """
    is_kept = make_keep_decision(operations, Counter())

    def decide(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if is_kept(operation) else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(decide)  # type: ignore[no-untyped-call]
    return contexts


def operations_not_run(operations: Sequence[str], seen: "Counter[Any]") -> list[str]:
    """Return the names of calls, such as ``aten.mm.default:2``, that a forward did not make."""
    return [
        name
        for name in operations
        if ":" in name
        and all(seen[each] <= int(name.partition(":")[2]) for each in operation_overloads(name))
    ]


def products_called_less_often(missing: Sequence[str], seen: "Counter[Any]") -> list[str]:
    """Return those of the calls that ``operations_not_run`` names whose product was called, but less often.

    Another device may have another operation in place of one that was not called at all, and a model may run
    more beside its products for a GPU: TRL picks the tokens that count where Triton computes its loss.
    """
    from torch.utils.flop_counter import flop_registry  # it imports Triton

    return [
        name
        for name in missing
        if any(seen[each] and each.overloadpacket in flop_registry for each in operation_overloads(name))
    ]


def make_keep_decision(operations: Sequence[str], seen: "Counter[Any]") -> Callable[[Any], bool]:
    """Return the function that is asked, for each call of an operation, whether its results are kept."""
    every, calls = _kept_calls(operations)

    def is_kept(operation: Any) -> bool:
        call = (operation, seen[operation])
        seen[operation] += 1
        return operation in every or call in calls

    return is_kept


def _kept_calls(operations: Sequence[str]) -> tuple[set[Any], set[tuple[Any, int]]]:
    """Return the operations of which every result is kept, and the single calls."""
    every = {each for name in operations if ":" not in name for each in operation_overloads(name)}
    calls = {
        (each, int(name.partition(":")[2]))
        for name in operations
        if ":" in name
        for each in operation_overloads(name)
    }
    return every, calls


def _map(kind: type, function: Callable[[Any], Any], results: Any) -> Any:
    """Return results with the function's value in place of each object of a kind; most are one object."""
    return function(results) if isinstance(results, kind) else tree_map_only(kind, function, results)


def _hooks_of_the_script() -> "_Hooks | None":
    """Return the saved-tensor hooks outside of PyTorch's checkpoints, as a pair; None without any.

    Source: ``_current_user_saved_tensors_hooks`` in torch/utils/checkpoint.py, PyTorch 2.14.1. Before 2.14, a
    checkpoint inside of another does not know the hooks around both.
    """
    hooks: _Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    while hooks is not None and hooks[0].__module__ == checkpoint.__module__:
        hooks = getattr(hooks[0], "_user_hooks", None)
    return hooks


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return another tensor of the same storage and version, without a history.

    Source: ``_detach_helper`` in torch/utils/checkpoint.py, PyTorch 2.14.1: below autograd, views share their
    version only with this guard.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


@cache
def _is_in_place_or_view(operation: Any) -> bool:
    """Whether an operation's results are memory of its arguments, which a recomputation must write again."""
    return bool(operation.is_view or operation._schema.is_mutable)


def operation_overloads(operation: str) -> list[torch._ops.OpOverload]:
    """Return the operations that a name such as ``aten.mm`` or ``aten.mm.default:2`` stands for."""
    path, numbered, call = operation.partition(":")
    if numbered and not call.isdecimal():
        raise UsageError(
            f"checkpointing: save_ops={operation!r} does not say which call to keep. Write its number, "
            f"counted from 0: '{path}:0'."
        )
    space, _, rest = path.partition(".")
    name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, space), name, None) if name else None
    if isinstance(packet, torch._ops.OpOverloadPacket):
        known = packet.overloads()  # type: ignore[no-untyped-call]
        if not overload or overload in known:
            return [getattr(packet, each) for each in ([overload] if overload else known)]
    near = difflib.get_close_matches(path, [f"{space}.{each}" for each in dir(getattr(torch.ops, space))])
    raise UsageError(
        f"checkpointing: save_ops={operation!r} is not a PyTorch operation. "
        + (f"Nearest: {', '.join(near)}." if near else "Use a name from torch.ops, such as 'aten.mm'.")
    )
