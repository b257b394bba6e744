"""The ranks of a process group that do not exist, for a script that runs as one of them.

    init_process_group ── rendezvous ──> AnsweringStore     in place of a TCPStore, which waits for the others
    TCPStore, FileStore of the script ── the same
    NCCL's communicator ── the ghost                        knows its size and rank, and moves nothing
    Gloo's context ── PyTorch's fake process group          every gathered part is this rank's own
    objects (all_gather_object, …) ── the same, on the CPU
    a distributed checkpoint ── this rank's part of it

What the others would have sent is taken to be what this rank sends (for NCCL in
libraries/nccl_collectives.c). A sum over ranks is unknown, like any number that a GPU computes. For an object
that only another rank has, memfit runs that rank, too (``object_exchange_files.py``).
"""

import os
from abc import ABC
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from memfit.ghost.ranks.files_of_other_ranks import FilesOfOtherRanks
from memfit.ghost.ranks.join_and_pipeline_agreements import assume_ranks_agree_with_this_one
from memfit.ghost.ranks.object_exchange_files import ExchangedObjects
from memfit.ghost.ranks.wrap_group_creation import exchange_objects_on_cpu, wrap_group_creation
from memfit.ghost.runtime_bindings import GhostRuntime
from memfit.patching.patches import Patch

_EXCHANGES = Patch(
    "torch.distributed.distributed_c10d",
    *("broadcast_object_list", "scatter_object_list", "send_object_list", "recv_object_list"),
    "monitored_barrier",
    also="torch.distributed",
    why="answer for ranks that do not exist",
)
_STORES = Patch("torch.distributed", "TCPStore", "FileStore", why="answer for ranks that do not exist")
_CHECKPOINTS = Patch(
    "torch.distributed.checkpoint.utils:_DistWrapper", "__init__", why="plan checkpoints on one rank"
)
_PLANS = Patch(
    "torch.distributed.checkpoint.default_planner",
    "_validate_global_plan",
    why="accept a plan that holds the shards of one rank",
)
_SHARDS = Patch(
    "megatron.core.dist_checkpointing.validation",
    "validate_sharding_integrity",
    why="accept a checkpoint that holds the shards of one rank",
)

_GLOO = Patch(
    "torch.distributed.distributed_c10d", "ProcessGroupGloo", why="answer for ranks that do not exist"
)
_FAKE = Patch(
    "torch._C._distributed_c10d:FakeProcessGroup",
    "_set_sequence_number_for_group",
    why="stand in for Gloo's group",
)
_SPLITS = Patch(
    "torch.distributed.distributed_c10d:ProcessGroup",
    "split_group",
    why="say how many ranks the new group has",
)

VARIABLES = {"TORCH_NCCL_ENABLE_MONITORING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
"""The watchdogs would miss the other ranks."""


def join_groups_with_absent_ranks(
    join: Callable[[int, int], object],
    objects: ExchangedObjects,
    writers: tuple[int, ...],
    ghost: GhostRuntime,
) -> None:
    """Have every process group of the script be joined by ranks that do not exist.

    Call this once PyTorch's ``distributed_c10d`` has been imported.

    Args:
        join: called with its rank and the number of ranks before this process joins the default group.
        objects: those that this rank sends to others, and that others send to it.
        writers: the ranks that may write files for this one.
        ghost: counts what the script gives the GPU.
    """
    from torch._C._distributed_c10d import FakeProcessGroup
    from torch.distributed import distributed_c10d
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the fake backend

    from memfit.ghost.ranks.answering_store import (
        AnsweringStore,
        EndlessWaitDetector,
        answering_store_classes,
    )
    from memfit.ghost.ranks.object_collectives import object_collective_wrappers

    os.environ.update(VARIABLES)
    FilesOfOtherRanks(objects, writers).install()
    plugins = distributed_c10d.Backend._plugins
    plugins["GLOO"] = plugins["FAKE"]

    class AbsentGloo(ABC):  # noqa: B024 - PyTorch asks whether a fake group is an instance
        def __new__(cls, _store: Any, rank: int, size: int, **_: Any) -> Any:
            return FakeProcessGroup._create_internal(rank, size)

    AbsentGloo.register(FakeProcessGroup)
    _GLOO.install("ProcessGroupGloo", lambda _: AbsentGloo)  # until PyTorch 2.13, it is no plugin
    _FAKE.install("_set_sequence_number_for_group", lambda _: lambda _group: None)
    waits = EndlessWaitDetector(objects.refuse, partial(ghost.counter, "launches"))
    store_of = cache(partial(AnsweringStore, waits=waits))

    def rendezvous(_find_peers: Any, url: str, rank: int = -1, world_size: int = -1, **_: Any) -> Any:
        in_url = dict(parse_qsl(urlsplit(url).query))
        rank = rank if rank >= 0 else int(in_url.get("rank") or os.environ["RANK"])
        size = world_size if world_size > 0 else int(in_url.get("world_size") or os.environ["WORLD_SIZE"])
        join(rank, size)
        yield store_of(size), rank, size

    def fake(group: Any) -> tuple[Any, Any]:
        return group.BackendType.CUSTOM, FakeProcessGroup._create_internal(group.rank(), group.size())

    def new_process_group(
        make_group: Any,
        group_size: int,
        group_rank: int,
        ranks: list[int],
        backend: Any,
        _store: Any,
        *args: Any,
        **more: Any,
    ) -> Any:
        if not ranks:  # the default group, perhaps with a store of the script's own
            join(group_rank, group_size)
        with ghost.splitting(group_size, group_rank):
            made = make_group(group_size, group_rank, ranks, backend, store_of(group_size), *args, **more)
        exchange_objects_on_cpu(made, fake)
        return made

    def split(
        original: Callable[..., Any], parent: Any, ranks: Sequence[int], *args: Any, **more: Any
    ) -> Any:
        own = parent.rank()
        with ghost.splitting(len(ranks), ranks.index(own) if own in ranks else 0):
            return original(parent, ranks, *args, **more)

    _SPLITS.wrap("split_group", split)
    for name, exchange in object_collective_wrappers(objects).items():
        _EXCHANGES.wrap(name, exchange)
    _EXCHANGES.install("monitored_barrier", lambda _: distributed_c10d.barrier)  # the fake backend has none
    for name, store in answering_store_classes(waits).items():
        _STORES.install(name, partial(_replaced_by, store))
    wrap_group_creation(rendezvous, new_process_group)
    assume_ranks_agree_with_this_one(objects.quiet)
    _CHECKPOINTS.wrap_when_imported(__init__=_plan_alone)
    _PLANS.wrap_when_imported(_validate_global_plan=_accept_a_part)
    _SHARDS.wrap_when_imported(validate_sharding_integrity=_accept_a_part)


def _replaced_by(replacement: Any, _original: Any) -> Any:
    return replacement


def _plan_alone(
    prepare: Callable[..., None], wrapper: Any, group: Any, _use_dist: bool, coordinator_rank: int
) -> None:
    """Have distributed checkpoints be planned by this rank: the others' parts are not known.

    Ranks send what each of them saves to the first, which plans the files and answers.
    """
    prepare(wrapper, group, use_dist=False, coordinator_rank=coordinator_rank)


def _accept_a_part(validate: Callable[..., Any], *_: object, **_named: object) -> list[Any] | bool:
    """Find no error in a checkpoint that holds this rank's shards only, nor in its plan."""
    errors: list[Any] = []
    return (
        validate.__annotations__.get("return") in {bool, "bool"} or errors
    )  # until PyTorch 2.11, whether it is valid
