"""Agreements between ranks that PyTorch's own modules reach through the device.

Where the other ranks do not exist, all are as this one:

    Join                       the other ranks have as many inputs, so they join when this one does
    pipelining                 the other stages were given shapes, or must infer them, as this one
    DTensor                    random numbers on the others' GPUs have the state of this one's
    ZeroRedundancyOptimizer    the state that another rank sends has the entries that this rank's has

Where they exist, stages of a pipeline tell each other whether they were given shapes.

Without this, the script would read a number that nothing computed, and wait in a loop or fail.

Source: torch/distributed/algorithms/join.py, pipelining/stage.py (``_warmup_*``), optim/
zero_redundancy_optimizer.py, PyTorch 2.14.1. Earlier versions of pipelining do not vote.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from memfit.patching.after_import import call_after_import
from memfit.patching.patches import Patch

_JOIN = Patch(
    "torch.distributed.algorithms.join:Join", "_get_num_nonjoined_procs", why="have all ranks join together"
)
_STAGE = Patch(
    "torch.distributed.pipelining.stage:PipelineStage",
    *("_warmup_forward_vote", "_warmup_backward_result"),
    why="have the stages of a pipeline agree whether shapes were given",
    optional="before PyTorch 2.13, stages do not vote",
)
_ZERO = Patch(
    "torch.distributed.optim.zero_redundancy_optimizer",
    "_broadcast_object",
    why="stand for the optimizer state of other ranks",
)
_ZERO_OPTIMIZER = Patch(
    "torch.distributed.optim.zero_redundancy_optimizer:ZeroRedundancyOptimizer",
    "consolidate_state_dict",
    why="stand for the optimizer state of other ranks",
)
_RANDOM = Patch(
    "torch.distributed.tensor._random:OffsetBasedRNGTracker",
    "__init__",
    why="have the ranks agree on the state of random numbers",
)


def assume_ranks_agree_with_this_one(quiet: Callable[[], AbstractContextManager[None]]) -> None:
    """Have the modules agree once the script imports them.

    Args:
        quiet: returns a context in which this rank sends nothing to the others, and awaits nothing.
    """
    _JOIN.wrap_when_imported(_get_num_nonjoined_procs=_count_none)
    call_after_import(_STAGE.module, lambda: _vote(lambda _, own: own))
    _send_state_of_partitions(quiet)

    def begin(original: Callable[..., None], *args: Any, **options: Any) -> None:
        with quiet():
            original(*args, **options)

    _RANDOM.wrap_when_imported(__init__=begin)


def exchange_pipeline_agreements() -> None:
    """Have stages of a pipeline agree, where each rank exists, once the script imports them."""
    call_after_import(_STAGE.module, lambda: _vote(_vote_of_all))


def _count_none(count: Callable[[Any], int], join: Any) -> int:
    """Have ``Join`` find, once this rank has no more inputs, that no rank has."""
    count(join)  # it allocates
    return 0


def _vote_of_all(stage: Any, own: int) -> int:
    """Return 1 if each rank of a stage's pipeline votes 1. Each calls this for as many stages."""
    import torch.distributed as dist

    votes = [own] * dist.get_world_size(stage.group)
    dist.all_gather_object(votes, own, group=stage.group)
    return min(votes)


def _vote(result: Callable[[Any, int], int]) -> None:
    """Have the stages of a pipeline take ``result(stage, own vote)`` as their vote: 0 to infer shapes."""
    from torch.distributed.pipelining import stage as stages

    own_votes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def vote(original: Callable[..., Any], self: Any, has_backward: bool, *args: Any, **options: Any) -> Any:
        infers = stages.InferenceMode.needs_dynamic(self._user_meta, has_backward)  # type: ignore[attr-defined]
        own_votes[self] = int(not infers)
        return original(self, has_backward, *args, **options)

    def agree(original: Callable[..., Any], self: Any, *args: Any, **options: Any) -> Any:
        return original(self, *args, **options).fill_(result(self, own_votes[self]))

    _STAGE.wrap("_warmup_forward_vote", vote)
    _STAGE.wrap("_warmup_backward_result", agree)


def _send_state_of_partitions(quiet: Callable[[], AbstractContextManager[None]]) -> None:
    """Have the other ranks send state for their parameters, with the entries that this rank's state has."""
    import torch.distributed as dist

    consolidating: list[Any] = []

    def consolidate(original: Callable[..., None], optimizer: Any, *args: Any, **options: Any) -> None:
        consolidating.append(optimizer)
        try:
            original(optimizer, *args, **options)
        finally:
            consolidating.pop()

    def send(
        original: Callable[..., Any], obj: Any, src_rank: int, group: Any = None, device: Any = "cpu"
    ) -> Any:
        if dist.get_rank() == src_rank or not consolidating:
            with quiet():
                return original(obj, src_rank, group, device)
        optimizer = consolidating[-1]
        return _state_of_partition(optimizer, dist.get_group_rank(optimizer.process_group, src_rank), device)

    _ZERO.wrap_when_imported(_broadcast_object=send)
    _ZERO_OPTIMIZER.wrap_when_imported(consolidate_state_dict=consolidate)


def _state_of_partition(optimizer: Any, rank: int, device: Any) -> dict[str, Any]:
    """Return the state dict of the parameters of one rank, received as bytes and unpacked on the device.

    The bytes of pickling itself are left out.
    """
    import torch

    groups = optimizer._partition_parameters()[rank]
    own = optimizer.optim.state_dict()
    sample = next(iter(optimizer.optim.state.items()), None)
    entries = {} if sample is None else sample[1]
    parameters = [parameter for group in groups for parameter in group["params"]]

    def shape(entry: Any, parameter: Any) -> Any:
        return parameter.shape if sample is not None and entry.shape == sample[0].shape else entry.shape

    wanted = [
        {
            name: (shape(entry, parameter), entry.dtype)
            for name, entry in entries.items()
            if torch.is_tensor(entry)
        }
        for parameter in parameters
    ]
    size = sum(size.numel() * dtype.itemsize for each in wanted for size, dtype in each.values())
    received = torch.empty(size, dtype=torch.uint8, device=device)
    state = {
        index: entries
        | {name: torch.empty(*form[:1], dtype=form[1], device=device) for name, form in each.items()}
        for index, each in enumerate(wanted)
    }
    del received
    numbers = iter(range(len(parameters)))
    packed = [
        {**settings, "params": [next(numbers) for _ in group["params"]]}
        for settings, group in zip(own["param_groups"], groups, strict=True)
    ]
    return {"state": state, "param_groups": packed}
