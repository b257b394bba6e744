"""The ranks of a process group that do not exist, for a script that runs as one of them.

    init_process_group ── rendezvous ──> AnsweringStore     in place of a TCPStore, which waits for the others
    NCCL's communicator ── the ghost                        knows its size and rank, and moves nothing

What the others would have sent is taken to be what this rank sends (libraries/nccl.c). A sum over ranks is
unknown, like any number that a GPU computes.
"""

import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

_UNKNOWN_VALUE = bytes(128)
"""What a key that another rank would have set reads as: as long as NCCL's unique id."""
_ANNOUNCEMENTS = ("dump", "exception", "abort", "signal")
"""Words in the keys by which PyTorch's watchdogs tell each other of a failure."""
_VARIABLES = {"TORCH_NCCL_ENABLE_MONITORING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
"""The watchdogs would miss the other ranks."""


def stand_for_a_rank() -> None:
    """Have every process group of the script be joined by ranks that do not exist.

    Call this once PyTorch's ``distributed_c10d`` has been imported.
    """
    from torch.distributed import distributed_c10d

    os.environ.update(_VARIABLES)
    make_group: Callable[..., Any] = distributed_c10d._new_process_group_helper
    store_of = functools.cache(_answering_store)

    @functools.wraps(distributed_c10d.rendezvous)  # type: ignore[attr-defined]
    def rendezvous(url: str, rank: int = -1, world_size: int = -1, **_: Any) -> Any:
        in_url = dict(parse_qsl(urlsplit(url).query))
        rank = rank if rank >= 0 else int(in_url.get("rank") or os.environ["RANK"])
        size = world_size if world_size > 0 else int(in_url.get("world_size") or os.environ["WORLD_SIZE"])
        yield store_of(size), rank, size

    @functools.wraps(make_group)
    def new_process_group(
        group_size: int, group_rank: int, ranks: list[int], backend: Any, store: Any, *args: Any, **more: Any
    ) -> Any:
        return make_group(group_size, group_rank, ranks, backend, store_of(group_size), *args, **more)

    distributed_c10d.rendezvous = rendezvous  # type: ignore[attr-defined]
    distributed_c10d._new_process_group_helper = new_process_group  # type: ignore[assignment]


def _answering_store(world_size: int) -> Any:
    """Return a store in which the other ranks have already done what this one waits for."""
    import torch.distributed as dist

    class AnsweringStore(dist.Store):
        def __init__(self) -> None:
            super().__init__()
            self._values: dict[str, bytes] = {}

        def set(self, key: str, value: Any) -> None:
            self._values[key] = value if isinstance(value, bytes) else str(value).encode()

        def get(self, key: str) -> bytes:
            return self._values.get(key, _UNKNOWN_VALUE)

        def compare_set(self, key: str, expected: str, desired: str) -> bytes:  # noqa: ARG002
            return self._values.setdefault(key, desired.encode())

        def add(self, key: str, amount: int) -> int:  # noqa: ARG002
            return world_size

        def wait(self, *_: Any) -> None:
            pass

        def check(self, keys: list[str]) -> bool:
            return not any(word in key.lower() for key in keys for word in _ANNOUNCEMENTS)

        def delete_key(self, key: str) -> bool:
            return self._values.pop(key, None) is not None

        def num_keys(self) -> int:
            return len(self._values)

        def set_timeout(self, timeout: timedelta) -> None:
            pass

    return AnsweringStore()
