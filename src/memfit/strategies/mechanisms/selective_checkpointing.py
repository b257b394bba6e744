"""Selective checkpointing: operations whose results are kept while the rest of a region is recomputed."""

import difflib
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from memfit.errors import UsageError


def selective_contexts(operations: Sequence[str]) -> tuple[Any, Any]:
    """Return the contexts for the forward and the recomputation of one call, which keep the results.

    A module-level function of plain strings: torch.compile calls it by name while it traces.
    """
    if not operations:
        return nullcontext(), nullcontext()
    saving, saved = create_selective_checkpoint_contexts(  # type: ignore[no-untyped-call]
        [overload for operation in operations for overload in operation_overloads(operation)]
    )
    # Kept results pass through saved-tensor hooks like other saved tensors, so that offloading sees them.
    # checkpoint() has a parameter of this name that does nothing else (torch/utils/checkpoint.py, 2.14);
    # versions without it ignore the attribute.
    saving.respect_saved_tensors_hooks = True
    return saving, saved


def operation_overloads(operation: str) -> list[torch._ops.OpOverload]:
    """Return the operations that a name such as ``aten.mm`` or ``aten.mm.default`` stands for.

    Raises:
        UsageError: no operation has that name.
    """
    space, _, rest = operation.partition(".")
    name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, space), name, None) if name else None
    if isinstance(packet, torch._ops.OpOverloadPacket):
        known = packet.overloads()  # type: ignore[no-untyped-call]
        if not overload or overload in known:
            return [getattr(packet, each) for each in ([overload] if overload else known)]
    near = difflib.get_close_matches(
        operation, [f"{space}.{each}" for each in dir(getattr(torch.ops, space))]
    )
    raise UsageError(
        f"checkpointing: save_ops={operation!r} is not a PyTorch operation. "
        + (f"Nearest: {', '.join(near)}." if near else "Use a name from torch.ops, such as 'aten.mm'.")
    )
