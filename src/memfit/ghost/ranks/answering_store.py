"""A store for a process that is alone in its process group: whatever it waits for has already happened."""

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from memfit.user_lines import innermost_user_line

_PATIENCE = 5.0
"""Seconds in which a line may ask for the same keys, while the GPU has no work."""
_QUESTIONS = 3
"""How often the line must have asked: it may be slow for another reason."""


class EndlessWaitDetector:
    """What a script asks of its stores, to notice a question that it would ask for ever.

    A training loop that asks once a step gives the GPU work in between. Threads other than the main one may
    watch a key for the whole run: they do not stop the script.

    Args:
        refuse: called with the reason when the script waits for a value that no rank will set.
        work: returns a number that grows whenever the script gives the GPU work.
    """

    def __init__(self, refuse: Callable[[str], object], work: Callable[[], int]) -> None:
        self._refuse = refuse
        self._work = work
        self._worked = 0
        self._asked: dict[tuple[str, tuple[str, ...]], tuple[float, int]] = {}

    def ask(self, keys: tuple[str, ...]) -> None:
        """Note that this thread asks for keys; refuse the script if it has waited for them too long."""
        if threading.get_ident() != threading.main_thread().ident:
            return
        now, worked = time.monotonic(), self._work()
        if worked != self._worked:
            self._worked = worked
            self._asked.clear()
        place = innermost_user_line()
        began, times = self._asked.get((place, keys), (now, 0))
        self._asked[place, keys] = began, times + 1
        if times >= _QUESTIONS and now - began > _PATIENCE:
            names = ", ".join(repr(key.rpartition("//")[2]) for key in keys)  # without the group's prefix
            self._refuse(
                f"{place} waits in a loop for another rank to change {names} in a store. memfit runs one "
                "rank at a time, so nothing changes it. Run all ranks at once: "
                "torchrun --nproc-per-node N -m memfit dry-run SCRIPT."
            )


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

    def __init__(self, world_size: int, waits: EndlessWaitDetector) -> None:
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


def answering_store_classes(waits: EndlessWaitDetector) -> dict[str, type[AnsweringStore]]:
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
