"""Replace how a process joins a group in PyTorch: it finds peers, makes the group, and exchanges objects."""

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
        rendezvous: called with the original and its arguments, like the other one.
        new_process_group: in place of ``_new_process_group_helper``.
    """
    _GROUPS.wrap("rendezvous", rendezvous)
    _GROUPS.wrap("_new_process_group_helper", new_process_group)


def exchange_objects_on_cpu(made: Any, backend: Callable[[Any], tuple[Any, Any]]) -> None:
    """Give a group of GPUs a backend for the CPU, where the bytes of objects are known.

    PyTorch prefers the CPU for objects if a group has a backend for it (``_get_object_coll_device``).

    Args:
        made: what ``_new_process_group_helper`` returned: its first part is no group on ranks outside it.
        backend: returns the kind of the backend, and one for a group.
    """
    import torch
    from torch.distributed import ProcessGroup

    group, cpu = made[0], torch.device("cpu")
    if isinstance(group, ProcessGroup) and cpu not in group._device_types:
        name, description = group.group_name, group.group_desc
        group._register_backend(cpu, *backend(group))
        group._set_group_name(name)  # the group reads both from one of its backends
        group._set_group_desc(description)
