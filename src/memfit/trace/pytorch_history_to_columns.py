"""Convert PyTorch's allocator history, a list of dicts, to columns and tables.

PyTorch shares frames between events, so frames and stacks are looked up by identity first: a history of
100,000 events 40 frames deep takes well under a second.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.records import DEFAULT_POOL, Action, Events, Frame
from memfit.trace.stack_table import StackTable

ACTIONS = {action.name.lower(): action for action in Action}
# "user_defined" is the former name of "annotate"; neither moves memory.
_ACTION_VALUES = {name: int(action) for name, action in ACTIONS.items()} | {
    "user_defined": int(Action.ANNOTATE)
}
_OOM = "oom"
_MAX_LINE = (1 << 31) - 1
_MAX_NUMBER = (1 << 63) - 1


def history_columns(
    history: Sequence[Mapping[str, Any]],
    *,
    label_of: Callable[[str], int],
    is_user_file: Callable[[str], bool],
    table: StackTable | None = None,
) -> tuple[Events, tuple[tuple[int, ...], ...], tuple[Frame, ...]]:
    """Convert one device's history to columns, with pools by number (``distinct_pools_of_history``).

    Args:
        history: ``torch.cuda.memory._snapshot()["device_traces"][device]``, ``n`` events of any PyTorch
            from 2.0 on; keys that a version lacks count as empty.
        label_of: the label's index for an event's ``user_metadata`` string; called once per string.
        is_user_file: whether a source file is the user's own.
        table: where stacks are stored; pass the one that already holds the labels' stacks.

    Returns:
        Events of length ``n``, categories all 0, and the stacks and frames they refer to.

    Raises:
        KeyError, TypeError, ValueError, OverflowError: PyTorch does not write such an event.

    Source: ``TraceEntry`` in torch/cuda/memory.py, PyTorch 2.14.1; ``check_pool_id`` is in it from 2.12 on.
    """
    table = table or StackTable(is_user_file)
    stacks = _stack_column(history, table)
    label = cache(label_of)
    stream_of = stream_numbers(history)
    events = Events(
        action=np.array(array("B", [_ACTION_VALUES[event["action"]] for event in history]), np.uint8),
        address=np.array(array("Q", [_address(event) for event in history]), np.uint64),
        size=np.array(array("q", [event["size"] for event in history]), np.int64),
        stream=np.array(array("i", [stream_of[event["stream"]] for event in history]), np.int32),
        time=np.array(array("q", [event.get("time_us", 0) for event in history]), np.int64),
        label=np.array(array("i", [label(event.get("user_metadata", "")) for event in history]), np.int32),
        stack=np.array(array("i", stacks), np.int32),
        category=np.zeros(len(history), np.uint8),
        pool=_pool_column(history),
    )
    return events, table.stacks, table.frames


def stream_numbers(history: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """Number the streams of a history: the default stream (handle 0) is 0, others follow as they appear.

    >>> stream_numbers([{"stream": 9000}, {"stream": 0}, {"stream": 8000}])
    {0: 0, 9000: 1, 8000: 2}
    """
    return {stream: index for index, stream in enumerate(dict.fromkeys([0, *(e["stream"] for e in history)]))}


def distinct_pools_of_history(
    history: Iterable[Mapping[str, Any]], segments: Iterable[Mapping[str, Any]] = ()
) -> tuple[tuple[int, int], ...]:
    """List the pools of a history: the default pool first, others in order of appearance.

    Args:
        history: events.
        segments: those at the end; some may be older than every event.

    Returns:
        Nothing if an event has no pool.

    >>> distinct_pools_of_history([{"pool_id": (0, 7)}, {"pool_id": (0, 0)}], [{"segment_pool_id": (3, 0)}])
    ((0, 0), (0, 7), (3, 0))
    """
    named = [event.get("pool_id") for event in history]
    if None in named or not named:
        return ()
    named += [segment["segment_pool_id"] for segment in segments if "segment_pool_id" in segment]
    return tuple(dict.fromkeys([DEFAULT_POOL, *map(check_pool_id, dict.fromkeys(named))]))


def _pool_column(history: Sequence[Mapping[str, Any]]) -> npt.NDArray[np.int32] | None:
    number = {pool: index for index, pool in enumerate(distinct_pools_of_history(history))}
    if not number:
        return None
    return np.array(array("i", [number[event["pool_id"]] for event in history]), np.int32)


def check_pool_id(value: Any) -> tuple[int, int]:
    """Return a pool id as PyTorch wrote it, checked.

    Raises:
        TypeError, ValueError: it is not a pair of non-negative integers.
    """
    first, second = value
    if not all(isinstance(part, int) and 0 <= part <= _MAX_NUMBER for part in (first, second)):
        raise TypeError(f"{str(value)[:40]!r} is not a pool id")
    return first, second


def _address(event: Mapping[str, Any]) -> Any:
    # A failed allocation has no address; PyTorch reports the device's free bytes instead.
    return event["device_free"] if event["action"] == _OOM else event["addr"]


def _stack_column(history: Sequence[Mapping[str, Any]], table: StackTable) -> list[int]:
    """Return each event's stack index. Identities are safe keys: the history keeps its objects alive."""
    by_frames: dict[tuple[int, ...], int] = {}
    by_frame: dict[int, int] = {}
    column = []
    for event in history:
        frames = event.get("frames", ())
        identities = tuple(map(id, frames))
        stack = by_frames.get(identities)
        if stack is None:
            for frame in frames:
                if id(frame) not in by_frame:
                    by_frame[id(frame)] = table.frame(*_line(frame))
            stack = by_frames[identities] = table.intern_frames(map(by_frame.__getitem__, identities))
        column.append(stack)
    return column


def _line(frame: Mapping[str, Any]) -> tuple[str, int, str]:
    file, line, function = frame["filename"], frame["line"], frame["name"]
    complete = isinstance(file, str) and isinstance(line, int) and isinstance(function, str)
    if not complete or abs(line) > _MAX_LINE:
        raise TypeError("a frame lacks its file, line or function")
    return file, line, function
