"""PyTorch's allocator history: switch it on, stamp its events, forget past events, read it, switch it off.

the recorder's own    started and stopped by the recorder, which can forget past events; scripts get a part
the script's          was on already: it is read, and otherwise left alone

PyTorch keeps no history of the host memory that it pins, only the peak.
"""

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

import torch

from memfit.ghost.runtime_bindings import AllocationLogAction, GhostRuntime
from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch
from memfit.recording.event_labels import LabelBook, metadata_of_serial, serial_in_metadata
from memfit.recording.script_recorded_history import (
    FREES,
    ScriptRecordedHistory,
    history_with_stacks_on_frees,
)
from memfit.trace.snapshot import allocator_settings, with_blocks_before_history

_HISTORY = Patch(
    "torch.cuda.memory", "_record_memory_history", "_snapshot", why="share one history with the script"
)

UNCACHED = "PYTORCH_NO_CUDA_MEMORY_CACHING"
_NO_HISTORY_NOTES = {
    True: "Caching is off (PYTORCH_NO_CUDA_MEMORY_CACHING), so PyTorch keeps no allocator history: figures "
    "come from calls to the CUDA runtime, without source lines. cudaMalloc is assumed to round sizes up to "
    "512 bytes below 1 MiB, and to 2 MiB from there on.",
    False: "PyTorch keeps no allocator history with backend:cudaMallocAsync: figures come from calls to the "
    "CUDA runtime, without source lines. CUDA's memory pool is assumed to grow by 32 MiB at a time.",
}
"""Notes on figures without a history, by whether caching is off."""
_SNAPSHOT_OPTIONS = inspect.signature(torch.cuda.memory_snapshot).parameters
# PyTorch 2.10 copies the history into every snapshot.
_WITHOUT_EVENTS = {"include_traces": False} if "include_traces" in _SNAPSHOT_OPTIONS else {}
_HISTORY_NAMES = {
    AllocationLogAction.MALLOC: ("alloc",),
    AllocationLogAction.MALLOC_ASYNC: ("alloc",),
    AllocationLogAction.FREE: FREES,
    AllocationLogAction.FREE_ASYNC: FREES,
    AllocationLogAction.OUT_OF_MEMORY: ("oom",),
}


class AllocatorHistory:
    """PyTorch's allocator history of this process.

    Args:
        ghost: the ghost that is loaded, or None on a real GPU.
        book: its serials are stamped on the events.
        limit: number of events to keep: the last ones.
    """

    def __init__(self, ghost: GhostRuntime | None, book: LabelBook, limit: int = sys.maxsize) -> None:
        self._ghost = ghost
        self._book = book
        self._limit = limit
        self._record = torch.cuda.memory._record_memory_history
        self._snapshot = torch.cuda.memory._snapshot
        self._yields = False
        self._has_stacks_of_frees = False
        self._own = True
        self.on = False
        """Whether PyTorch keeps a history; otherwise the ghost's log replaces it, if there is a ghost."""
        self.caveat = ""
        """Note on figures that are based on that log."""

    def start(self) -> None:
        """Switch the history on, once CUDA is initialised: it contains allocations from now on."""
        self.on = _keeps_history()
        if self.on:
            self._own = not (self._yields and torch._C._cuda_isHistoryEnabled())
            self._restart()
            self._book.stamp_with(self._stamp)
        elif self._ghost is not None:
            self._ghost.log_allocations(True)
            self._book.stamp_with(self._ghost.set_label)

    def share_with_script(self, hooks: InstalledHooks) -> None:
        """Answer the script's own calls from this history, which they do not change."""
        script = ScriptRecordedHistory(self._snapshot, self._record_frees)

        def call_on(answer: Callable[..., Any]) -> Callable[..., Any]:
            def around(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
                torch.cuda._lazy_init()  # type: ignore[no-untyped-call] # as the original does; starts this history
                return answer(*args, **options) if self.on else original(*args, **options)

            return around

        hooks.wrap(_HISTORY, "_record_memory_history", call_on(script.record))
        hooks.wrap(_HISTORY, "_snapshot", call_on(script.snapshot))

    def yield_to_script(self, hooks: InstalledHooks) -> None:
        """Leave the history to the script if it calls ``_record_memory_history`` itself, now or earlier."""
        self._yields = True

        def yield_history(original: Callable[..., None], *args: object, **kwargs: object) -> None:
            self._own = False
            original(*args, **kwargs)

        hooks.wrap(_HISTORY, "_record_memory_history", yield_history)

    def forget(self) -> None:
        """Restart the history, unless it is the script's, and have the book forget past serials."""
        if self.on:
            self._restart()
        self._book.forget()

    def stop(self) -> None:
        """Switch the history off, unless it is the script's."""
        self._book.stamp_with(None)
        if self.on:
            torch._C._cuda_setMemoryMetadata("")
        if self.on and self._own:
            self._record(None, clear_history=True)

    def serial_of(self, metadata: str) -> int:
        """Return the serial in an event's metadata, relative to the first that the book has kept, or -1."""
        return max(-1, serial_in_metadata(metadata) - self._book.forgotten)

    def read(self, index: int, failed: Mapping[str, Any] | None) -> tuple[Mapping[str, Any], dict[str, str]]:
        """Read the history of a device.

        Args:
            index: of the device.
            failed: the event of an allocation that has just failed, for a history that does not contain it.

        Returns:
            A snapshot as of ``torch.cuda.memory._snapshot()``, preceded by events for the older blocks that
            still exist, and the allocator's settings in force.
        """
        if not _keeps_history():
            in_force = {
                "backend": torch.cuda.get_allocator_backend(),
                UNCACHED: os.environ.get(UNCACHED, ""),
            }
            return {"device_traces": [self._ghost_log()], "segments": []}, in_force
        with _without_inductor():
            snapshot = self._snapshot()
        if self._has_stacks_of_frees:
            snapshot["device_traces"][index] = history_with_stacks_on_frees(snapshot["device_traces"][index])
        if failed is not None and not self.on:
            now = {"user_metadata": metadata_of_serial(self._book.forgotten + self._book.moment())}
            snapshot["device_traces"][index].append({**failed, **now})
        in_force = allocator_settings(snapshot) | _environment() | _fraction(index)
        return with_blocks_before_history(snapshot, index), in_force

    def alive(self) -> dict[int, int]:
        """Return the bytes of the allocations that are alive, by address: as requested, if PyTorch knows."""
        if _keeps_history():
            with _without_inductor():
                found = torch.cuda.memory_snapshot(**_WITHOUT_EVENTS)  # type: ignore[no-untyped-call]
            return {
                block["address"]: block.get("requested_size", block["size"])
                for segment in found
                for block in segment["blocks"]
                if block["state"] == "active_allocated"
            }
        alive: dict[int, int] = {}
        for event in self._ghost.allocation_log() if self._ghost is not None else ():
            if _HISTORY_NAMES[event.action] == ("alloc",):
                alive[event.address] = event.size
            elif _HISTORY_NAMES[event.action] == FREES:
                alive.pop(event.address, None)
        return alive

    def _ghost_log(self) -> list[dict[str, Any]]:
        """Return the ghost's log in the form of PyTorch's history, for allocator backends that keep none."""
        if self._ghost is None:
            return []
        self.caveat = _NO_HISTORY_NOTES[UNCACHED in os.environ]
        return [
            {
                "action": action,
                "addr": event.address,
                "device_free": event.address,
                "size": event.size,
                "stream": event.stream,
                "time_us": event.time_us,
                "user_metadata": metadata_of_serial(event.label),
            }
            for event in self._ghost.allocation_log()
            for action in _HISTORY_NAMES[event.action]
        ]

    def _restart(self) -> None:
        if self._own:
            self._continue(clear_history=True)

    def _record_frees(self) -> None:
        """Record the stacks of frees from now on, for the script; otherwise a free has that of its block."""
        self._has_stacks_of_frees = True
        self._continue(context="all")

    def _continue(self, *, context: str = "alloc", clear_history: bool = False) -> None:
        """Record from now on."""
        self._record(
            "all", context=context, stacks="python", max_entries=self._limit, clear_history=clear_history
        )

    def _stamp(self, serial: int) -> None:
        """Stamp a serial on the events from now on, and on the ghost's log of workspaces."""
        torch._C._cuda_setMemoryMetadata(metadata_of_serial(serial))
        if self._ghost is not None:
            self._ghost.set_label(serial)


def _keeps_history() -> bool:
    """Return whether PyTorch's allocator keeps a history."""
    return torch.cuda.get_allocator_backend() == "native" and UNCACHED not in os.environ


def _environment() -> dict[str, str]:
    """Return the settings that PyTorch started with: it remembers only the latest ones."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return {"environment": next((os.environ[name] for name in names if name in os.environ), "")}


def _fraction(index: int) -> dict[str, str]:
    """Return the share of the GPU that PyTorch may reserve, as a setting; empty if it may reserve everything.

    PyTorch stores the share rounded to bytes: the script's own number is the shortest within one byte of it.
    """
    fraction, total = (
        torch.cuda.get_per_process_memory_fraction(index),
        torch.cuda.get_device_properties(index).total_memory,
    )
    if fraction == 1:
        return {}
    shorter = (round(fraction, digits) for digits in range(1, 16))
    shortest = next((share for share in shorter if abs(share - fraction) * total < 1), fraction)
    return {"per_process_memory_fraction": format(Decimal(repr(shortest)), "f")}


@contextmanager
def _without_inductor() -> Iterator[None]:
    """Take snapshots in the block without importing ``torch._inductor``.

    PyTorch looks it up for the lines of compiled code, and so imports it if nothing else did: more than a
    second for nothing. Source: ``py_symbolize`` in torch/csrc/profiler/python/combined_traceback.cpp,
    PyTorch 2.14.1.
    """
    if "torch._inductor" in sys.modules:
        yield
        return
    torch._inductor = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del torch._inductor


def peak_pinned_host_bytes() -> int:
    """Return the most bytes of host memory that PyTorch has pinned.

    Its cache of pinned blocks included: PyTorch uses a block again once the copies from it are done.
    """
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0))
