"""The ranks of a process group that exist, each a process on a ghost of its own.

rendezvous, stores, Gloo                    PyTorch's own
short buffers that NCCL sends               go through the store (libraries/rank_exchange.c); one that a rank
                                            sends to one other is waited for when the other reads it
long ones                                   are not sent: what they hold is unknown
small tensors that are known by element     go through the store, too; what they bring is waited for when the
                                            script reads it (values/sent_elements.py)
objects (all_gather_object, …) on the GPU   go through Gloo, where their bytes are known; also if the script
                                            says on which device (stages of a pipeline do)
"""

import inspect
import os
import pickle
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from memfit.ghost.ranks.absent_ranks import VARIABLES
from memfit.ghost.ranks.join_and_pipeline_agreements import exchange_pipeline_agreements
from memfit.ghost.ranks.wrap_group_creation import exchange_objects_on_cpu, wrap_group_creation
from memfit.ghost.runtime_bindings import GhostRuntime
from memfit.patching.patches import Patch

_TIMEOUT = timedelta(minutes=5)
"""How long a rank waits for the others in a collective."""
_INTERVAL = 0.05
_ON_A_DEVICE = Patch(
    "torch.distributed.distributed_c10d",
    *("broadcast_object_list", "send_object_list", "recv_object_list"),
    also="torch.distributed",
    why="send objects by the device where their bytes are known",
)
"""The functions that take the device by which they send objects."""


class PresentRanks:
    """The job's ranks, once this process has joined them.

    Args:
        ghost: of this process.
        run: names this run of the script: the store of an earlier one may still hold its keys.
        refuse: called with the reason when the script needs a value that cannot be had.
    """

    real = True
    missing = ""

    def __init__(self, ghost: GhostRuntime, run: str, refuse: Callable[[str], object]) -> None:
        self.refuse = refuse
        self.sources: set[int] = set()
        self._ghost = ghost
        self._run = run
        self._store: Any = None
        self._waiting: Any = None
        self._calls: Counter[tuple[object, ...]] = Counter()
        self._size = 1
        self._sent: dict[str, str] = {}

    def meet(self, joined: Callable[[], object]) -> None:
        """Have the script's process groups exchange bytes; PyTorch's ``distributed_c10d`` is imported.

        Args:
            joined: called when this process has joined the default group.
        """
        import torch.distributed as dist

        os.environ.update(VARIABLES)  # a rank that has ended is no failure

        def rendezvous(find_peers: Any, *args: Any, **more: Any) -> Any:
            for store, rank, size in find_peers(*args, **more):
                yield dist.PrefixStore(self._run, store), rank, size  # type: ignore[attr-defined]

        def new_process_group(
            make_group: Any,
            size: int,
            rank: int,
            ranks: list[int],
            backend: Any,
            store: Any,
            *args: Any,
            **more: Any,
        ) -> Any:
            if not ranks:  # the default group
                self._join(store.clone(), size)
                joined()
            made = make_group(size, rank, ranks, backend, store, *args, **more)
            exchange_objects_on_cpu(made, lambda group: _gloo(group, store))
            return made

        exchange_pipeline_agreements()
        for name in _ON_A_DEVICE.names:
            _ON_A_DEVICE.wrap(name, _by_the_preferred_device)
        wrap_group_creation(rendezvous, new_process_group)

    def _join(self, store: Any, size: int) -> None:
        store.set_timeout(_TIMEOUT)
        self._store, self._size = store, size
        self._waiting = waiting = store.clone()  # one that waits holds up the threads that send by it
        waiting.set_timeout(_TIMEOUT)
        self._ghost.exchange_between_ranks(
            self._exchange,
            send=lambda name, sent: store.set(f"memfit/{name}", _written(sent)),
            receive=lambda name: _receive(waiting, f"memfit/{name}"),
        )

    def key(self, *call: object) -> str:
        """Return the key of the next tensor of a call, given by its kind, its group and the ranks in it."""
        if self._store is None:
            return ""
        self._calls[call] += 1
        return f"memfit/{'/'.join(map(str, call))}/{self._calls[call]}"

    def leave(self, key: str, sent: Any) -> None:
        """Leave a tensor's elements for the other ranks."""
        self._store.set(key, pickle.dumps(sent))

    def leave_awaited(self, key: str, sent: Callable[[], Any]) -> None:
        """Leave elements that another rank sends first."""
        self.leave(key, sent())

    def receive(self, key: str, _sender: int) -> Any:
        """Return what another rank has left.

        Raises:
            LookupError: it has not come in time.
        """
        try:
            return pickle.loads(self._waiting.get(key))  # noqa: S301 - a rank of the same job wrote it
        except RuntimeError as error:  # among them is DistStoreError
            raise LookupError(f"it did not come: {error}") from error

    def _exchange(self, name: str, ranks: int, rank: int, sent: bytes | None) -> list[bytes | None]:
        """Return what each rank sent."""
        group, _, call = name.rpartition("/")
        keys = [f"memfit/{group}/{call}/{each}" for each in range(ranks)]
        self._store.set(keys[rank], _written(sent))
        values = [self._store.get(key) for key in keys]
        # Every rank has sent this one, and so has received the one before it.
        if before := self._sent.get(group):
            self._store.delete_key(before)
        self._sent[group] = keys[rank]
        return [_read(value) for value in values]

    def fail(self) -> bool:
        """Tell the others that this rank has failed; return whether it is the first to do so."""
        if self._store is None:
            return True
        try:
            return bool(self._store.add("memfit/failed", 1) == 1)
        except RuntimeError:  # the process of the store has ended
            return False

    def wait_for_all(self) -> None:
        """Wait until every rank has come here; at once if one of them has already ended."""
        if self._store is None:
            return
        with suppress(RuntimeError):  # the process of the store has ended
            ended = self._store.add("memfit/ended", 1)
            while ended < self._size:
                time.sleep(_INTERVAL)
                ended = self._store.add("memfit/ended", 0)


def _receive(store: Any, key: str) -> bytes | None:
    value = _read(store.get(key))
    store.delete_key(key)
    return value


def _written(sent: bytes | None) -> bytes:
    """Return what the store holds: a byte before the others says whether the rank knows what it sends."""
    return b"\0" if sent is None else b"\1" + sent


def _read(value: bytes) -> bytes | None:
    return value[1:] if value[:1] == b"\1" else None


def _by_the_preferred_device(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Send objects by the device that PyTorch prefers, not by one that the script names."""
    given = inspect.signature(function).bind(*args, **options)
    given.arguments["device"] = None
    return function(*given.args, **given.kwargs)


def _gloo(group: Any, store: Any) -> tuple[Any, Any]:
    from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

    own = PrefixStore(f"memfit/{group.group_name}", store)
    return group.BackendType.GLOO, ProcessGroupGloo(own, group.rank(), group.size(), timeout=_TIMEOUT)
