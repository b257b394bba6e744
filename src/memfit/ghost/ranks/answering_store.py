"""A store for a process that is alone in its process group: whatever it waits for has already happened."""

import os
from datetime import timedelta

import torch.distributed as dist

from memfit.ghost.ranks.endless_waits import EndlessWaits

_UNKNOWN_VALUE = bytes(128)
"""What a key that another rank would have set reads as: as long as NCCL's unique ID."""
_ANNOUNCEMENTS = ("dump", "exception", "abort", "signal")
"""Words in the keys by which PyTorch's watchdogs tell each other of a failure: no rank has set them."""


class AnsweringStore(dist.Store):  # type: ignore[name-defined, misc]
    """A store in which the other ranks have already done what this one waits for.

    Args:
        world_size: the number of ranks that use the store.
        waits: notices a script that waits in a loop for what no rank does.
    """

    def __init__(self, world_size: int, waits: EndlessWaits) -> None:
        super().__init__()
        self._world_size = world_size
        self._waits = waits
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        """Keep a value."""
        self._values[key] = value if isinstance(value, bytes) else value.encode()

    def get(self, key: str) -> bytes:
        """Return what this rank has set, or bytes that stand for what another rank would have set."""
        self._waits.ask((key,))
        return self._values.get(key, _UNKNOWN_VALUE)

    def compare_set(self, key: str, _expected: str, desired: str) -> bytes:
        """Set a value, as the first rank to do so."""
        self._waits.ask((key,))
        return self._values.setdefault(key, desired.encode())

    def add(self, key: str, _amount: int) -> int:
        """Count the other ranks, too: every counter has reached the number of ranks."""
        self._waits.ask((key,))
        return self._world_size

    def wait(self, *_: object) -> None:
        """Return at once: the keys are there."""

    def check(self, keys: list[str]) -> bool:
        """Return whether the keys are there; those that announce a failure are not."""
        self._waits.ask(tuple(keys))
        return not any(word in key.lower() for key in keys for word in _ANNOUNCEMENTS)

    def delete_key(self, key: str) -> bool:
        """Forget a value, and return whether there was one."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """Return the number of keys that this rank has set."""
        return len(self._values)

    def set_timeout(self, _timeout: timedelta) -> None:
        """Do nothing: nothing waits."""


def script_stores(waits: EndlessWaits) -> dict[str, type[AnsweringStore]]:
    """Return what stands for the stores of ``torch.distributed`` that connect ranks, by name."""

    class TCPStore(AnsweringStore):
        def __init__(
            self, host_name: str, port: int, world_size: int | None = None, *_: object, **__: object
        ) -> None:
            super().__init__(world_size or int(os.environ["WORLD_SIZE"]), waits)
            self.host, self.port = host_name, port

    class FileStore(AnsweringStore):
        def __init__(self, path: str, world_size: int = -1) -> None:  # noqa: ARG002 - no file is written
            super().__init__(world_size if world_size > 0 else int(os.environ["WORLD_SIZE"]), waits)

    return {"TCPStore": TCPStore, "FileStore": FileStore}
