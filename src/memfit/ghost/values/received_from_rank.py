"""What one rank sends to others: broadcasts, scatters, sends and receives (``sent_elements.py``).

The methods of process groups are wrapped where Python calls them. PyTorch's C++ code broadcasts weights, and
what DistributedDataParallel compares, without calling these: there, other ranks are taken to be as this one.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from memfit.ghost.kernel_override_registry import Kernel, KernelOverrides
from memfit.ghost.values.assumed_values import AssumedValues
from memfit.ghost.values.sent_elements import await_elements, key_of_call, leave_elements
from memfit.patching.patches import Patch

_SENDING = Patch(
    "torch.distributed:ProcessGroup",
    *("broadcast", "scatter", "send", "recv"),
    why="know small tensors that one rank sends to others",
    source="torch/csrc/distributed/c10d/init.cpp",
)
_FUNCTIONAL = Patch(
    "torch:ops._c10d_functional",
    *("broadcast", "broadcast_"),
    why="know small tensors that one rank sends to others",
    source="torch/csrc/distributed/c10d/Functional.cpp",
)


def track_sent_elements(values: AssumedValues) -> None:
    """Follow the methods of process groups that send from one rank."""
    for name, around in (("broadcast", _broadcast), ("scatter", _scatter), ("send", _send), ("recv", _recv)):
        _SENDING.wrap(name, partial(around, values))


def override_functional_broadcasts(values: AssumedValues) -> KernelOverrides:
    """Do the same for the functional broadcasts, which call no method; return the overrides."""
    overrides = KernelOverrides(_FUNCTIONAL)
    for op in _FUNCTIONAL.names:

        @overrides.add(op, "CUDA")
        def broadcast(run: Kernel, tensor: torch.Tensor, root: int, group_name: str) -> object:
            from torch.distributed import distributed_c10d

            resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
            group = resolve(group_name)
            finish = _begin_broadcast(values, group, root, [tensor])
            result: torch.Tensor = run(tensor, root, group_name)
            finish([result])
            return result

    return overrides


def _broadcast(
    values: AssumedValues, method: Callable[..., Any], group: Any, tensors: Any, *more: Any, **options: Any
) -> Any:
    listed = tensors if isinstance(tensors, list | tuple) else [tensors]
    finish = _begin_broadcast(values, group, _root(more, options), listed)
    work = method(group, tensors, *more, **options)
    finish(listed)
    return work


def _begin_broadcast(
    values: AssumedValues, group: Any, root: int, sent: Sequence[Any]
) -> Callable[[Sequence[Any]], None]:
    """Leave what this rank broadcasts, or return what to call with the tensors that have received."""
    if group.size() == 1:
        return lambda _: None
    sender = _rank_in_job(group, root)
    key = key_of_call(values, "broadcast", group, sender)
    if sender == torch.distributed.get_rank():
        for part, tensor in enumerate(sent):
            leave_elements(values, _part(key, part), tensor)
        return lambda _: None

    def finish(received: Sequence[Any]) -> None:
        for part, tensor in enumerate(received):
            if values.senders_exist:  # one that does not is taken to have what this rank has
                values.known.forget(tensor)
            await_elements(values, _part(key, part), tensor, sender)

    return finish


def _scatter(
    values: AssumedValues,
    method: Callable[..., Any],
    group: Any,
    outputs: Any,
    inputs: Any,
    *more: Any,
    **options: Any,
) -> Any:
    if group.size() == 1:
        return method(group, outputs, inputs, *more, **options)
    sender = _rank_in_job(group, _root(more, options))
    key = key_of_call(values, "scatter", group, sender)
    if sender == torch.distributed.get_rank():
        for part, tensor in enumerate(flat(inputs)):
            leave_elements(values, _part(key, part), tensor)
    work = method(group, outputs, inputs, *more, **options)
    for tensor in flat(outputs):
        await_elements(values, _part(key, group.rank()), tensor, sender)
    return work


def _send(
    values: AssumedValues, method: Callable[..., Any], group: Any, tensors: Any, to: int, tag: int
) -> Any:
    key = key_of_call(values, "send", group, torch.distributed.get_rank(), _rank_in_job(group, to), tag)
    for part, tensor in enumerate(tensors):
        leave_elements(values, _part(key, part), tensor)
    return method(group, tensors, to, tag)


def _recv(
    values: AssumedValues, method: Callable[..., Any], group: Any, tensors: Any, source: int, tag: int
) -> Any:
    sender = _rank_in_job(group, source)
    key = key_of_call(values, "send", group, sender, torch.distributed.get_rank(), tag)
    work = method(group, tensors, source, tag)
    for part, tensor in enumerate(tensors):
        await_elements(values, _part(key, part), tensor, sender)
    return work


def _root(more: tuple[Any, ...], options: dict[str, Any]) -> int:
    """Return the rank in the group that sends, from the options of a method or from its own argument."""
    given = next(iter((*more, *options.values())), 0)
    return int(getattr(given, "rootRank", given))


def _rank_in_job(group: Any, rank: int) -> int:
    return torch.distributed.get_process_group_ranks(group)[rank]


def _part(key: str, part: int) -> str:
    return key and f"{key}-{part}"


def flat(tensors: Any) -> list[Any]:
    """Return the tensors in a list of tensors or of lists of them."""
    if not isinstance(tensors, list | tuple):
        return [tensors]
    return [each for part in tensors for each in flat(part)]
