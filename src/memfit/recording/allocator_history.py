"""PyTorch's history of its allocator, for as long as a recorder needs it: on, stamped, forgotten, off.

the recorder's own    begins with it, and ends with it; what is long past can be forgotten
the script's          was on already: it is read, and left as it is
"""

import os
import sys
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from memfit.ghost.ffi import Ghost, LogAction
from memfit.recording.event_counter import CountedStamps
from memfit.recording.hooks import LiftedHooks
from memfit.recording.labels import LabelBook, metadata_of, serial_of
from memfit.records import Action, Events
from memfit.trace.snapshot import settings, with_earlier

UNCACHED = "PYTORCH_NO_CUDA_MEMORY_CACHING"
_UNLOGGED = {
    True: "Caching is off (PYTORCH_NO_CUDA_MEMORY_CACHING), so PyTorch counts nothing: figures are the CUDA "
    "runtime's own, without source lines. How cudaMalloc rounds is assumed: to 512 bytes below 1 MiB, to "
    "2 MiB from there on.",
    False: "PyTorch keeps no history with backend:cudaMallocAsync: figures are the CUDA runtime's own, "
    "without source lines. How CUDA's pool grows is assumed: by 32 MiB.",
}
_FREED = ("free_requested", "free_completed")
_HISTORY_NAMES = {
    LogAction.MALLOC: ("alloc",),
    LogAction.MALLOC_ASYNC: ("alloc",),
    LogAction.FREE: _FREED,
    LogAction.FREE_ASYNC: _FREED,
    LogAction.OUT_OF_MEMORY: ("oom",),
}


class Recording:
    """The history of this process.

    Args:
        ghost: the ghost that is loaded, or None on a real GPU.
        book: whose serials go on the events.
        most: so many events at most, the last ones.
    """

    def __init__(self, ghost: Ghost | None, book: LabelBook, most: int = sys.maxsize) -> None:
        self._ghost = ghost
        self._book = book
        self._most = most
        self._counted: CountedStamps | None = None
        self._record = torch.cuda.memory._record_memory_history
        self._yields = False
        self._own = True
        self.on = False
        """Whether there is a history; otherwise the ghost's log stands for it, or nothing."""
        self.caveat = ""
        """What must be known of figures that rest on that log."""

    def start(self) -> None:
        """Switch it on, with CUDA just initialised, or later: what is allocated from now on is in it."""
        self.on = _is_kept()
        if self.on:
            self._own = not (self._yields and torch._C._cuda_isHistoryEnabled())
            self._clear()
            self._stamp()
        elif self._ghost is not None:
            self._ghost.log_allocations(True)
            self._book.stamp_with(self._ghost.set_label)

    def pass_over(self, hooks: LiftedHooks, said: Callable[[], None]) -> None:
        """Have the script's own calls of ``_record_memory_history`` do nothing.

        Args:
            hooks: where everything goes that is put into PyTorch.
            said: called at each.
        """
        hooks.replace(torch.cuda.memory, "_record_memory_history", lambda *_, **__: said())

    def give_way(self, hooks: LiftedHooks) -> None:
        """Leave the history to the script, if it has called ``_record_memory_history`` itself or does."""
        self._yields = True

        def to_the_script(original: Callable[..., None], *args: object, **kwargs: object) -> None:
            self._own = False
            original(*args, **kwargs)

        hooks.wrap(torch.cuda.memory, "_record_memory_history", to_the_script)

    def forget(self) -> None:
        """Begin anew, and have the book forget, too; a history that is the script's stays as it is."""
        if self.on:
            self._clear()
        self._book.forget()
        if self._counted:
            self._stamp()

    def stop(self) -> None:
        """Switch it off, unless it is the script's."""
        self._book.stamp_with(None)
        set_metadata = getattr(torch._C, "_cuda_setMemoryMetadata", None)
        if self.on and set_metadata is not None:
            set_metadata("")
        if self.on and self._own:
            self._record(None, clear_history=True)

    def serial_of(self, metadata: str) -> int:
        """Return the serial in an event's metadata as the book counts those that it has kept, or -1."""
        return max(-1, serial_of(metadata) - self._book.forgotten)

    def serials(self, events: Events) -> npt.NDArray[np.int32]:
        """Return the serial of each event, whose labels are what ``serial_of`` made of its metadata."""
        if self._counted is None:
            return events.label
        serials = self._counted.serials(events.action) - self._book.forgotten
        return np.where(events.action == Action.EARLIER, -1, np.maximum(-1, serials))

    def read(self, index: int, failed: Mapping[str, Any] | None) -> tuple[Mapping[str, Any], dict[str, str]]:
        """Read the history of a device.

        Args:
            index: of the device.
            failed: the last that happened, where nothing else has recorded it.

        Returns:
            What ``torch.cuda.memory._snapshot()`` returns, with what is older and still there at its
            beginning; the allocator's settings in force.
        """
        if not _is_kept():
            in_force = {
                "backend": torch.cuda.get_allocator_backend(),
                UNCACHED: os.environ.get(UNCACHED, ""),
            }
            return {"device_traces": [self._logged()], "segments": []}, in_force
        snapshot = torch.cuda.memory._snapshot()
        if failed is not None and not self.on:
            now = {"user_metadata": metadata_of(self._book.forgotten + self._book.moment())}
            snapshot["device_traces"][index].append({**failed, **now})
        in_force = settings(snapshot) | _environment() | _fraction(index)
        return with_earlier(snapshot, index), in_force

    def _logged(self) -> list[dict[str, Any]]:
        """Return the ghost's own log in the form of PyTorch's history, for back ends that keep none."""
        if self._ghost is None:
            return []
        self.caveat = _UNLOGGED[UNCACHED in os.environ]
        return [
            {
                "action": action,
                "addr": event.address,
                "device_free": event.address,
                "size": event.size,
                "stream": event.stream,
                "time_us": event.time_us,
                "user_metadata": metadata_of(event.label),
            }
            for event in self._ghost.allocation_log()
            for action in _HISTORY_NAMES[event.action]
        ]

    def _clear(self) -> None:
        if self._own:
            self._record("all", context="alloc", stacks="python", max_entries=self._most, clear_history=True)

    def _stamp(self) -> None:
        set_metadata = getattr(torch._C, "_cuda_setMemoryMetadata", None)
        if set_metadata is None:  # PyTorch 2.8 and 2.9
            self._counted = CountedStamps()
            self._book.stamp_with(self._and_for_workspaces(self._counted.stamp))
        else:
            self._book.stamp_with(self._and_for_workspaces(lambda serial: set_metadata(metadata_of(serial))))

    def _and_for_workspaces(self, stamp: Callable[[int], None]) -> Callable[[int], None]:
        """Stamp the ghost's log of workspaces, too."""
        ghost = self._ghost
        if ghost is None:
            return stamp

        def both(serial: int) -> None:
            stamp(serial)
            ghost.set_label(serial)

        return both


def _is_kept() -> bool:
    """Say whether PyTorch's allocator is one that keeps a history."""
    return torch.cuda.get_allocator_backend() == "native" and UNCACHED not in os.environ


def _environment() -> dict[str, str]:
    """Return the settings that PyTorch began with: it knows only the last it was given."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return {"environment": next((os.environ[name] for name in names if name in os.environ), "")}


def _fraction(index: int) -> dict[str, str]:
    """Return the share of the GPU that may be reserved, as a setting; nothing if that is all of it.

    PyTorch keeps it as whole bytes: the script's own number is the shortest within one of them.
    """
    fraction, total = (
        torch.cuda.get_per_process_memory_fraction(index),
        torch.cuda.get_device_properties(index).total_memory,
    )
    if fraction == 1:
        return {}
    shorter = (round(fraction, digits) for digits in range(1, 16))
    said = next((share for share in shorter if abs(share - fraction) * total < 1), fraction)
    return {"per_process_memory_fraction": format(Decimal(repr(said)), "f")}
