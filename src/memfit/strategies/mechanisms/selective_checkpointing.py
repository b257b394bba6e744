"""Selective checkpointing: operations whose results are kept while the rest of a region is recomputed.

aten.mm             every call of every overload of aten.mm
aten.mm.default     every call of this overload
aten.mm.default:2   its third call in the region, counted from 0
"""

import difflib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from memfit.errors import UsageError


def selective_contexts(operations: Sequence[str], seen: "Counter[Any] | None" = None) -> tuple[Any, Any]:
    """Return the contexts for the forward and the recomputation of one call, which keep the results.

    A module-level function of plain strings: torch.compile calls it by name while it traces.

    Args:
        operations: whose results are kept.
        seen: receives how often the forward ran each operation.
    """
    if not operations:
        return nullcontext(), nullcontext()
    saving, saved = create_selective_checkpoint_contexts(
        _policy(keeper(operations, Counter() if seen is None else seen))
    )  # type: ignore[no-untyped-call]
    # Kept results pass through saved-tensor hooks like other saved tensors, so that offloading sees them.
    # checkpoint() has a parameter of this name that does nothing else (torch/utils/checkpoint.py, 2.14);
    # versions without it ignore the attribute.
    saving.respect_saved_tensors_hooks = True
    return saving, saved


def not_run(operations: Sequence[str], seen: "Counter[Any]") -> list[str]:
    """Return the names of calls, such as ``aten.mm.default:2``, that a forward did not make.

    Args:
        operations: as for ``selective_contexts``.
        seen: how often the forward ran each operation.
    """
    return [
        name
        for name in operations
        if ":" in name
        and all(seen[each] <= int(name.partition(":")[2]) for each in operation_overloads(name))
    ]


def keeper(operations: Sequence[str], seen: "Counter[Any]") -> Callable[[Any], bool]:
    """Return the function that is asked, for each call of an operation, whether its results are kept.

    Args:
        operations: as for ``selective_contexts``.
        seen: receives how often it was asked.
    """
    every = {each for name in operations if ":" not in name for each in operation_overloads(name)}
    calls = {
        (each, int(name.partition(":")[2]))
        for name in operations
        if ":" in name
        for each in operation_overloads(name)
    }

    def is_kept(operation: Any) -> bool:
        call = (operation, seen[operation])
        seen[operation] += 1
        return operation in every or call in calls

    return is_kept


def _policy(is_kept: Callable[[Any], bool]) -> Callable[..., CheckpointPolicy]:
    """Return what decides for one call of a region, which PyTorch asks in the forward only."""

    def decide(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if is_kept(operation) else CheckpointPolicy.PREFER_RECOMPUTE

    return decide


def operation_overloads(operation: str) -> list[torch._ops.OpOverload]:
    """Return the operations that a name such as ``aten.mm`` or ``aten.mm.default:2`` stands for.

    Raises:
        UsageError: no operation has that name.
    """
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
