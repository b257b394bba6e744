"""Wrap the functions by which a process joins a group in PyTorch: it finds peers, and makes the group."""

import functools
from collections.abc import Callable
from typing import Any

from memfit.patching.patches import Patch

_GROUPS = Patch(
    "torch.distributed.distributed_c10d",
    *("rendezvous", "_new_process_group_helper"),
    why="have a script join process groups as its rank, or refuse them",
)


def wrap_process_groups(rendezvous: Callable[..., Any], new_process_group: Callable[..., Any]) -> None:
    """Call these in place of the functions from now on; PyTorch's ``distributed_c10d`` has been imported.

    Args:
        rendezvous: called with the original and its arguments, as the other one.
        new_process_group: in place of ``_new_process_group_helper``.
    """

    def around(original: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(original)(functools.partial(call, original))

    _GROUPS.install("rendezvous", functools.partial(around, call=rendezvous))
    _GROUPS.install("_new_process_group_helper", functools.partial(around, call=new_process_group))
