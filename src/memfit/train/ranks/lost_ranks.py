"""Ranks that ended without a report: killed by the system, or on a machine that is gone.

The connection breaks, or a collective runs into the time-out of its process group; PyTorch's error names an
address, not a rank. Ranks of one machine see each other's processes.
"""

import os
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_BROKEN = re.compile(
    "Connection (closed|reset|refused)|Broken pipe|timed? ?out|remote process exited|communicator .*aborted",
    re.IGNORECASE,
)
_SECONDS = 2.0  # in which the system ends a process after its connections


def is_broken_connection(error: BaseException) -> bool:
    """Return whether an exception says that another rank could not be reached."""
    if not isinstance(error, RuntimeError):
        return False
    return isinstance(error, torch.distributed.DistError) or _BROKEN.search(str(error)) is not None


@dataclass(frozen=True, slots=True)
class RankProcesses:
    """The processes of all ranks."""

    places: tuple[tuple[str, int], ...]
    """Of each rank: the machine and the process id."""

    @classmethod
    def of(cls, group: Any) -> "RankProcesses":
        """Collect the processes of a group; all of its ranks call this."""
        places: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(places, (_machine(), os.getpid()), group=group)
        return cls(tuple(places))

    def ended(self) -> list[int]:
        """Return the ranks of this machine whose processes have ended; wait a moment for the first."""
        until = time.monotonic() + _SECONDS
        while True:
            here = _machine()
            found = [
                rank for rank, (machine, pid) in enumerate(self.places) if machine == here and not _runs(pid)
            ]
            if found or time.monotonic() > until:
                return found
            time.sleep(0.02)

    def describe(self, ended: list[int]) -> str:
        """Return which ranks have ended, as a sentence."""
        if not ended:
            return (
                "Another rank does not answer: its process has ended on another machine, or it waits for "
                "something else."
            )
        named = " and ".join(f"rank {rank} (process {self.places[rank][1]})" for rank in ended)
        have = "has" if len(ended) == 1 else "have"
        return f"{named[0].upper()}{named[1:]} {have} ended without reporting an error."


def _machine() -> str:
    """Return a name of this machine, or of this container: process ids mean the same wherever it is equal."""
    return f"{socket.gethostname()}/{Path('/proc/self/ns/pid').readlink()}"


def _runs(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")  # killed, but its parent has not yet looked
