"""Read and write PyTorch's memory snapshots, the pickles of ``torch.cuda.memory._dump_snapshot``.

Source of the format: ``_snapshot`` in torch/cuda/memory.py, PyTorch 2.14.1. Earlier versions lack some
keys and later ones may add some; both are read.
"""

import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from memfit.atomic_files import write_atomically
from memfit.errors import FileFormatError
from memfit.input_files import read_input_file
from memfit.records import (
    DEFAULT_POOL,
    Action,
    DeviceUse,
    Figure,
    MachineKind,
    Provenance,
    ScriptEnd,
    Segment,
    SnapshotBlock,
    Trace,
)
from memfit.trace.pytorch_history_to_columns import (
    ACTIONS,
    check_pool_id,
    distinct_pools_of_history,
    history_columns,
    stream_numbers,
)
from memfit.trace.safe_pickle import NotPlainDataError, load_plain_pickle
from memfit.units import MIB

MAX_BYTES = 1 << 29
"""A million events take 83 MB; a file of this size exceeds what the unpickler decodes."""
_PROTOCOL = 4  # of the pickles that PyTorch's own tools read
_MAX_NUMBER = (1 << 63) - 1

_INACTIVE, _ALLOCATED, _AWAITING_FREE = "inactive", "active_allocated", "active_awaiting_free"
# PyTorch documents the third as active_awaiting_free and writes active_pending_free.
_AS_WRITTEN = {_INACTIVE: _INACTIVE, _ALLOCATED: _ALLOCATED, _AWAITING_FREE: "active_pending_free"}
_AS_READ = {written: state for state, written in _AS_WRITTEN.items()} | {_AWAITING_FREE: _AWAITING_FREE}
_UNKNOWN = Figure(0, Provenance.ASSUMED, "unknown: not in a memory snapshot")


def read_snapshot(path: Path, device: int = 0) -> Trace:
    """Read one device's history from a memory snapshot.

    Nothing in the file is executed: memfit's own unpickler reads plain data only.

    Args:
        path: a file that ``torch.cuda.memory._dump_snapshot`` wrote.
        device: index of the device.

    Returns:
        A trace without labels, marks or categories; its ``statistics`` are the bytes in its segments.
    """
    snapshot = _load(path)
    try:
        return trace_of_snapshot(snapshot, device)
    except FileFormatError as error:
        raise FileFormatError(f"Cannot read {path}: {error}") from None
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        detail = f"it has no key {error}" if isinstance(error, KeyError) else str(error)
        raise FileFormatError(
            f"Cannot read {path}: it is not a memory snapshot written by PyTorch ({detail})."
        ) from None


def trace_of_snapshot(snapshot: Mapping[str, Any], device: int = 0) -> Trace:
    """Convert a memory snapshot to a trace."""
    histories = snapshot["device_traces"]
    with_history = [index for index, history in enumerate(histories) if history]
    if device not in with_history:
        raise FileFormatError(
            f"it has no allocator history for device {device} (devices with a history: "
            f"{', '.join(map(str, with_history)) or 'none'}). Call torch.cuda.memory."
            "_record_memory_history() before the code to record, and _dump_snapshot(file) after it."
        )
    events, stacks, frames = history_columns(
        histories[device], label_of=lambda _metadata: -1, is_user_file=_looks_like_user_file
    )
    at_end = segments_at_end(snapshot, device)
    allocated = sum(block.size for segment in at_end for block in segment.blocks if block.state == _ALLOCATED)
    return Trace(
        events=events,
        labels=(),
        stacks=stacks,
        frames=frames,
        marks=(),
        segments=at_end,
        device=DeviceUse(f"device {device} of a snapshot", _UNKNOWN, _UNKNOWN, 0, MachineKind.UNKNOWN),
        end=ScriptEnd("end", 0),
        settings=allocator_settings(snapshot),
        statistics={
            "allocated_bytes.all.current": allocated,
            "reserved_bytes.all.current": sum(segment.size for segment in at_end),
        },
        versions={},
        command=(),
        pools=distinct_pools_of_history(histories[device], _of_device(snapshot, device)),
    )


def with_blocks_before_history(snapshot: Mapping[str, Any], device: int = 0) -> Mapping[str, Any]:
    """Return a snapshot whose history begins with the blocks allocated before it and still in use at its end.

    PyTorch keeps the stack of each block in use, however old, if its allocation was recorded.
    """
    history = snapshot["device_traces"][device]
    allocated = {event["addr"] for event in history if event["action"] == "alloc"}
    begins = history[0].get("time_us", 0) if history else 0
    earlier = [
        {
            "action": Action.EARLIER.name.lower(),
            "addr": address,
            "size": block.get("requested_size", block["size"]),
            "stream": segment["stream"],
            "time_us": begins,
            "frames": block.get("frames", ()),
            **({"pool_id": segment["segment_pool_id"]} if "segment_pool_id" in segment else {}),
        }
        for segment in _of_device(snapshot, device)
        for address, block in _addressed(segment)
        if block["state"] == _ALLOCATED and address not in allocated
    ]
    histories = list(snapshot["device_traces"])
    histories[device] = [*earlier, *history]
    return {**snapshot, "device_traces": histories}


def allocator_settings(snapshot: Mapping[str, Any]) -> dict[str, str]:
    """Return the allocator's settings in force, by their names in ``PYTORCH_ALLOC_CONF``.

    Returns:
        The string that PyTorch was given, as ``conf``, and the settings that decide sizes.

    >>> allocator_settings(
    ...     {"allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": 128 << 20}}
    ... )
    {'conf': '', 'max_split_size_mb': '128'}
    """
    found: Mapping[str, Any] = snapshot.get("allocator_settings") or {}
    result = {"conf": str(found.get("PYTORCH_CUDA_ALLOC_CONF", ""))}
    if "expandable_segments" in found:
        result["expandable_segments"] = str(bool(found["expandable_segments"]))
    if found.get("max_split_size", -1) > 0:  # -1: no limit
        result["max_split_size_mb"] = str(found["max_split_size"] // MIB)
    if found.get("garbage_collection_threshold", 0) > 0:
        result["garbage_collection_threshold"] = str(found["garbage_collection_threshold"])
    divisions = found.get("roundup_power2_divisions") or {}
    if any(divisions.values()):
        intervals = ",".join(f"{start}:{count}" for start, count in divisions.items())
        result["roundup_power2_divisions"] = f"[{intervals}]"
    return result


def segments_at_end(snapshot: Mapping[str, Any], device: int = 0) -> tuple[Segment, ...]:
    """Return the segments of one device at the time of the snapshot.

    Returns:
        In order of address; streams have the numbers that ``history_columns`` gives them.
    """
    stream_of = stream_numbers(snapshot["device_traces"][device])
    return tuple(
        Segment(
            address=_number(segment["address"]),
            size=_number(segment["total_size"]),
            stream=stream_of.setdefault(segment["stream"], len(stream_of)),
            kind=str(segment["segment_type"]),
            pool=check_pool_id(segment.get("segment_pool_id", DEFAULT_POOL)),
            expandable=bool(segment.get("is_expandable")),
            blocks=_blocks(segment),
        )
        for segment in sorted(_of_device(snapshot, device), key=lambda segment: _number(segment["address"]))
    )


def write_snapshot(trace: Trace, path: str | Path) -> None:
    """Write a trace as a memory snapshot, for pytorch.org/memory_viz and torch.cuda._memory_viz.

    Labels become ``user_metadata``: the phase, the module and the operator of each event.

    Raises:
        OutputError: the file cannot be written.
    """
    snapshot = snapshot_of_trace(trace)
    write_atomically(Path(path), lambda file: pickle.dump(snapshot, file, protocol=_PROTOCOL))


def snapshot_of_trace(trace: Trace) -> dict[str, Any]:
    """Convert a trace to a memory snapshot: the inverse of ``trace_of_snapshot``, for what it can hold."""
    frames = [{"name": f.function, "filename": f.file, "line": f.line} for f in trace.frames]
    # One list per stack, shared by its events as PyTorch shares it: pickle writes it once.
    stacks = [[frames[index] for index in stack] for stack in trace.stacks]
    stacks.append([])  # for -1
    events = _history(trace, stacks)
    earlier = Action.EARLIER.name.lower()
    allocated_at = {
        event["addr"]: event["frames"] for event in events if event["action"] in ("alloc", earlier)
    }
    history = [event for event in events if event["action"] != earlier]
    return {
        "segments": [_segment_dict(segment, allocated_at) for segment in trace.segments],
        "device_traces": [history],
        "allocator_settings": _allocator_settings(trace.settings),
        "external_annotations": [],
    }


def _load(path: Path) -> Mapping[str, Any]:
    fewer = "Record fewer events: pass max_entries to _record_memory_history."
    try:
        snapshot = load_plain_pickle(read_input_file(path, MAX_BYTES, fewer))
    except NotPlainDataError as error:
        raise FileFormatError(
            f"Cannot read {path}: it {error}. A memory snapshot is a pickle of plain data: write one with "
            "torch.cuda.memory._dump_snapshot(file). Do not load this file with pickle: that could run code."
        ) from None
    if not isinstance(snapshot, dict):
        raise FileFormatError(
            f"Cannot read {path}: it holds a {type(snapshot).__name__}, but a memory snapshot is a dict. "
            "Write one with torch.cuda.memory._dump_snapshot(file)."
        )
    return snapshot


def _looks_like_user_file(file: str) -> bool:
    """Return whether a file, of any machine, is neither in an installed package nor the standard library."""
    return not re.search(r"[/\\](?:site-packages|dist-packages|lib[/\\]python3\.\d+)[/\\]|^<frozen ", file)


def _blocks(segment: Mapping[str, Any]) -> tuple[SnapshotBlock, ...]:
    return tuple(
        SnapshotBlock(
            address,
            block["size"],
            _number(block.get("requested_size", block["size"])),
            _AS_READ[block["state"]],
        )
        for address, block in _addressed(segment)
    )


def _addressed(segment: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the blocks of a segment, each with its address."""
    # Early versions write no address for a block: blocks are contiguous.
    address = _number(segment["address"])
    for block in segment["blocks"]:
        yield address, block
        address += _number(block["size"])


def _of_device(snapshot: Mapping[str, Any], device: int) -> list[Mapping[str, Any]]:
    return [segment for segment in snapshot["segments"] if segment.get("device", 0) == device]


def _number(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value <= _MAX_NUMBER:
        raise TypeError(f"{str(value)[:40]!r} is not a size or an address")
    return value


def _history(trace: Trace, stacks: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    metadata = [" ".join(filter(None, (label.phase, label.module, label.op))) for label in trace.labels]
    metadata.append("")  # for -1
    names = {int(action): name for name, action in ACTIONS.items()}
    events = trace.events
    names_of_columns = ("action", "address", "size", "stream", "time", "label", "stack")
    history: list[dict[str, Any]] = [
        {
            "action": names[action],
            "device_free" if action == Action.OOM else "addr": address,
            "size": size,
            "stream": stream,
            "time_us": time,
            "compile_context": "N/A",
            "user_metadata": metadata[label],
            "frames": stacks[stack],
        }
        for action, address, size, stream, time, label, stack in zip(
            *(getattr(events, name).tolist() for name in names_of_columns), strict=True
        )
    ]
    if events.pool is not None:
        for event, pool in zip(history, events.pool.tolist(), strict=True):
            event["pool_id"] = trace.pools[pool]
    return history


def _segment_dict(segment: Segment, allocated_at: Mapping[int, list[dict[str, Any]]]) -> dict[str, Any]:
    in_use = [block for block in segment.blocks if block.state != _INACTIVE]
    return {
        "device": 0,
        "address": segment.address,
        "total_size": segment.size,
        "allocated_size": sum(block.size for block in in_use if block.state == _ALLOCATED),
        "active_size": sum(block.size for block in in_use),
        "requested_size": sum(block.requested for block in in_use),
        "stream": segment.stream,
        "segment_type": segment.kind,
        "segment_pool_id": segment.pool,
        "is_expandable": segment.expandable,
        "frames": [],
        "blocks": [
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested,
                "state": _AS_WRITTEN[block.state],
                "frames": [] if block.state == _INACTIVE else allocated_at.get(block.address, []),
            }
            for block in segment.blocks
        ],
    }


def _allocator_settings(in_force: Mapping[str, str]) -> dict[str, Any]:
    """Convert settings to PyTorch's own record of them, which ``allocator_settings`` reads back."""
    left = dict(in_force)
    conf = left.pop("conf", "")
    left.pop("environment", None)
    result: dict[str, Any] = {}
    if "expandable_segments" in left:
        result["expandable_segments"] = left.pop("expandable_segments") == "True"
    if "max_split_size_mb" in left:
        result["max_split_size"] = int(left.pop("max_split_size_mb")) * MIB
    if "garbage_collection_threshold" in left:
        result["garbage_collection_threshold"] = float(left.pop("garbage_collection_threshold"))
    if left.get("roundup_power2_divisions", "").startswith("["):
        entries = left.pop("roundup_power2_divisions")[1:-1].split(",")
        result["roundup_power2_divisions"] = {
            start: int(count) for start, _, count in (entry.partition(":") for entry in entries)
        }
    # Settings for which PyTorch has no key go into the string.
    rest = [f"{name}:{value}" for name, value in left.items()]
    return {"PYTORCH_CUDA_ALLOC_CONF": ",".join(filter(None, [conf, *rest])), **result}
