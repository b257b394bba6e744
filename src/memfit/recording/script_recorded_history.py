"""The allocator history that the script records itself, as a part of memfit's own.

    the script calls     _record_memory_history(max_entries=3)     _record_memory_history(None)
    memfit's history     e0  e1  |  e2  e3  e4  e5                 |  e6
    the script's         -       |  e3  e4  e5                     |  -

PyTorch keeps one history. The script's calls choose which of memfit's events, and what of them, it gets from
``_snapshot`` and ``_dump_snapshot``. The stacks hold Python frames only, also with ``stacks="all"``.

Source: ``recordHistory`` in c10/cuda/CUDACachingAllocator.cpp and ``_record_memory_history`` in
torch/csrc/cuda/memory_snapshot.cpp, PyTorch 2.14.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from memfit.recording.event_labels import PREFIX
from memfit.user_lines import is_memfit_file

FREES = ("free_requested", "free_completed")
_RUNS_SCRIPT = str(Path(__file__).parents[1] / "run" / "run_script_as_python.py")
_Entry = Mapping[str, Any]
"""A snapshot, or an event, segment or block in it."""
_Stack = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class _Period:
    """The part of the history between two calls of ``_record_memory_history``."""

    begins: Sequence[int]
    """On each device, the number of events before it."""
    ends: Sequence[int] | None
    """On each device, the number of events until its end; None while it lasts."""
    context: str | None
    """What has a stack: ``all``; ``alloc`` (frees have that of their block); ``state`` (existing blocks); or
    nothing."""
    skipped: frozenset[str]
    max_entries: int

    def contains(self, device: int, event: int) -> bool:
        """Return whether an event of a device, by its number, is in this period."""
        return self.begins[device] <= event and (self.ends is None or event < self.ends[device])


class ScriptRecordedHistory:
    """What the script's own calls have asked for.

    Args:
        snapshot: PyTorch's ``_snapshot``, of memfit's own history.
        record_frees: has that history contain the stacks of frees from now on.
    """

    def __init__(self, snapshot: Callable[..., _Entry], record_frees: Callable[[], None]) -> None:
        self._snapshot = snapshot
        self._record_frees = record_frees
        self._periods: list[_Period] = []
        self._cleared = 0  # periods whose events the script has cleared; blocks keep their stacks

    def record(self, *args: Any, **options: Any) -> None:
        """Do what ``torch.cuda.memory._record_memory_history`` does, for the script's part."""
        asked = _arguments(*args, **options)
        lengths = [len(events) for events in self._snapshot()["device_traces"]]
        if self._periods and self._periods[-1].ends is None:
            self._periods[-1] = replace(self._periods[-1], ends=lengths)
        if asked["enabled"] is None or asked["clear_history"]:
            self._cleared = len(self._periods)
        if asked["enabled"] is None:
            return
        begins = [length + 1 for length in lengths]  # the snapshot above is an event, too
        skipped = frozenset(asked.get("skip_actions") or ())
        most = asked["max_entries"] if asked["enabled"] == "all" else 1
        self._periods.append(_Period(begins, None, asked["context"], skipped, most))
        if asked["context"] == "all":
            self._record_frees()

    def snapshot(self, *args: Any, **options: Any) -> _Entry:
        """Return what ``torch.cuda.memory._snapshot`` would return without memfit's own history."""
        whole = self._snapshot(*args, **options)
        parts = [self._part(device, history) for device, history in enumerate(whole["device_traces"])]
        segments = [_with_stacks(segment, parts[segment["device"]][1]) for segment in whole["segments"]]
        return {**whole, "device_traces": [events for events, _ in parts], "segments": segments}

    def _part(self, device: int, history: Sequence[_Entry]) -> tuple[list[_Entry], dict[int, _Stack]]:
        """Return the script's events of a device, and the stacks of the blocks it recorded, by address."""
        part: list[_Entry] = []
        stacks: dict[int, _Stack] = {}
        latest = None
        for number, event in enumerate(history):
            index, period = next(
                ((at, one) for at, one in enumerate(self._periods) if one.contains(device, number)),
                (-1, None),
            )
            if event["action"] == "alloc":
                stacks[event["addr"]] = event["frames"] if period is not None and period.context else []
            if period is None or index < self._cleared:
                continue
            if latest is not None and latest is not period:
                part = part[-latest.max_entries :]
            latest = period
            if event["action"] not in period.skipped:
                part.append(_shown(event, _stack(event, period, stacks)))
        return (part[-latest.max_entries :] if latest is not None else part), stacks


def _arguments(enabled: Any = "all", *args: Any, **options: Any) -> dict[str, Any]:
    """Return the arguments of ``_record_memory_history`` by name, in today's form.

    Raises:
        TypeError: as PyTorch would.
    """
    memory: Any = torch.cuda.memory
    form = (
        memory._record_memory_history_legacy if type(enabled) is bool else memory._record_memory_history_impl
    )
    bound = inspect.signature(form).bind(enabled, *args, **options)
    bound.apply_defaults()
    asked = bound.arguments
    if type(enabled) is not bool:
        return asked
    contexts = {"alloc": asked["trace_alloc_record_context"], "state": asked["record_context"]}
    return {
        "enabled": "all" if enabled else None,
        "context": next((context for context, chosen in contexts.items() if chosen), None),
        "max_entries": asked["trace_alloc_max_entries"],
        "clear_history": asked["clear_history"],
        "skip_actions": asked.get("skip_actions"),
    }


def _stack(event: _Entry, period: _Period, stacks: Mapping[int, _Stack]) -> _Stack:
    """Return the stack that an event has in a period, given those of the blocks before it."""
    if period.context not in ("all", "alloc"):
        return []
    of_block = period.context == "alloc" and event["action"] in FREES
    return stacks.get(event["addr"], []) if of_block else event.get("frames", [])


def _with_stacks(segment: _Entry, stacks: Mapping[int, _Stack]) -> _Entry:
    """Return a segment whose allocated blocks have the given stacks, by address, or none."""
    blocks = [
        _shown(block, stacks.get(block["address"], [])) if block.get("frames") else block
        for block in segment["blocks"]
    ]
    return {**segment, "blocks": blocks}


def _shown(entry: _Entry, stack: _Stack) -> _Entry:
    """Return an event or a block with a stack, without memfit's frames in it, and without memfit's label."""
    changes: dict[str, Any] = {}
    if "frames" in entry:
        files = [frame["filename"] for frame in stack]
        outside = next((at for at, file in enumerate(files) if file == _RUNS_SCRIPT), len(files))
        changes["frames"] = [frame for frame in stack[:outside] if not is_memfit_file(frame["filename"])]
    if str(entry.get("user_metadata", "")).startswith(PREFIX):
        changes["user_metadata"] = ""
    return {**entry, **changes}


def history_with_stacks_on_frees(history: Sequence[_Entry]) -> list[_Entry]:
    """Return a history in which frees have the stack of their block, as under the context ``alloc``."""
    stacks: dict[int, _Stack] = {}
    changed = []
    for event in history:
        if event["action"] == "alloc":
            stacks[event["addr"]] = event["frames"]
        frees = event["action"] in FREES
        changed.append({**event, "frames": stacks.get(event["addr"], [])} if frees else event)
    return changed
