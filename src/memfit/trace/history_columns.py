"""PyTorch's history of its allocator, a list of dicts, as columns and tables.

PyTorch shares the list of frames between the events of one stack, and the frames between lists, so both
are recognised by identity first: a history of 100,000 events 40 frames deep takes well under a second.
"""

import re
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.records import DEFAULT_POOL, Action, Events, Frame
from memfit.user_frame import GENERATED

DEPTH = 40
"""Frames kept of a stack, from the innermost outwards."""

ACTIONS = {action.name.lower(): action for action in Action}
# "user_defined" stood where "annotate" stands now; neither moves memory.
_ACTION_VALUES = {name: int(action) for name, action in ACTIONS.items()} | {
    "user_defined": int(Action.ANNOTATE)
}
_OOM = "oom"
_MAX_LINE = (1 << 31) - 1
_MAX_NUMBER = (1 << 63) - 1

_PACKAGE_OF_OURS = re.compile(r"[/\\](?:site|dist)-packages[/\\](?:torch|memfit)[/\\]")
_NOT_PYTHON = re.compile(r"\?\?|<string>|.*\.(?:c|cc|cpp|cu|cuh|h|hpp|S)|<frozen .*|", re.DOTALL)
_MEMFIT = str(Path(__file__).parents[1]) + "/"


def is_omitted_file(file: str) -> bool:
    """Say whether a frame's file is memfit's own, or no Python: whoever called it is meant."""
    return file.startswith(_MEMFIT) or _NOT_PYTHON.fullmatch(file) is not None


class StackTable:
    """Stacks and frames, each kept once.

    Args:
        is_user_file: whether a source file is the user's own; asked once per file.

    >>> table = StackTable(lambda file: True)
    >>> table.intern([("train.py", 12, "main")]), table.intern([("train.py", 12, "main")])
    (0, 0)
    """

    def __init__(self, is_user_file: Callable[[str], bool]) -> None:
        self._is_user_file = is_user_file
        self._files: dict[str, bool | None] = {}  # file -> whether it is the user's; None: not kept
        self._frames: dict[Frame, int] = {}
        self._stacks: dict[tuple[int, ...], int] = {}
        self._torch = torch_folder()

    @property
    def frames(self) -> tuple[Frame, ...]:
        """Every frame, by index."""
        return tuple(self._frames)

    @property
    def stacks(self) -> tuple[tuple[int, ...], ...]:
        """Every stack, by index: frames, innermost first."""
        return tuple(self._stacks)

    def intern(self, lines: Iterable[tuple[str, int, str]]) -> int:
        """Return the index of a stack, or -1 if nothing of it is kept.

        Args:
            lines: ``(file, line, function)``, innermost first. PyTorch's own frames, memfit's, those
                that torch.compile generated and those that are not Python are left out.
        """
        return self.intern_frames([self.frame(*line) for line in lines])

    def intern_frames(self, frames: Iterable[int]) -> int:
        """Return the index of a stack made of ``frame`` results; those of -1 are left out."""
        stack = tuple([frame for frame in frames if frame >= 0][:DEPTH])
        return self._stacks.setdefault(stack, len(self._stacks)) if stack else -1

    def frame(self, file: str, line: int, function: str) -> int:
        """Return the index of a frame, or -1 if it is PyTorch's, memfit's, generated or not Python."""
        if file not in self._files:
            self._files[file] = self._is_user_file(file) if self._kept(file) else None
        user = self._files[file]
        if user is None:
            return -1
        return self._frames.setdefault(Frame(file, line, function, user), len(self._frames))

    def _kept(self, file: str) -> bool:
        ours = file.startswith(self._torch) or _PACKAGE_OF_OURS.search(file)
        return not ours and not is_omitted_file(file) and not GENERATED.fullmatch(file)


def columns(
    history: Sequence[Mapping[str, Any]],
    *,
    label_of: Callable[[str], int],
    is_user_file: Callable[[str], bool],
    table: StackTable | None = None,
) -> tuple[Events, tuple[tuple[int, ...], ...], tuple[Frame, ...]]:
    """Turn one device's history into columns; ``pools`` tells what the numbers of pools stand for.

    Args:
        history: ``torch.cuda.memory._snapshot()["device_traces"][device]``, ``n`` events of any PyTorch
            from 2.0 on; keys that a version lacks count as empty.
        label_of: the label's index for an event's ``user_metadata`` string; asked once per string.
        is_user_file: whether a source file is the user's own.
        table: where stacks are kept; give the one that already holds the labels' stacks.

    Returns:
        Events of length ``n``, categories all 0, and the stacks and frames they refer to.

    Raises:
        KeyError, TypeError, ValueError, OverflowError: an event is not what PyTorch writes.

    Source: ``TraceEntry`` in torch/cuda/memory.py, PyTorch 2.14.1; ``pool_id`` is in it from 2.12 on.
    """
    table = table or StackTable(is_user_file)
    stacks = _stack_column(history, table)
    labels = _Memo(label_of)
    stream_of = streams(history)
    events = Events(
        action=np.array(array("B", [_ACTION_VALUES[event["action"]] for event in history]), np.uint8),
        address=np.array(array("Q", [_address(event) for event in history]), np.uint64),
        size=np.array(array("q", [event["size"] for event in history]), np.int64),
        stream=np.array(array("i", [stream_of[event["stream"]] for event in history]), np.int32),
        time=np.array(array("q", [event.get("time_us", 0) for event in history]), np.int64),
        label=np.array(array("i", [labels[event.get("user_metadata", "")] for event in history]), np.int32),
        stack=np.array(array("i", stacks), np.int32),
        category=np.zeros(len(history), np.uint8),
        pool=_pool_column(history),
    )
    return events, table.stacks, table.frames


def streams(history: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """Number the streams of a history: the default stream (handle 0) is 0, the others count from 1 up.

    >>> streams([{"stream": 9000}, {"stream": 0}, {"stream": 8000}])
    {0: 0, 9000: 1, 8000: 2}
    """
    return {stream: index for index, stream in enumerate(dict.fromkeys([0, *(e["stream"] for e in history)]))}


def pools(
    history: Iterable[Mapping[str, Any]], segments: Iterable[Mapping[str, Any]] = ()
) -> tuple[tuple[int, int], ...]:
    """Number the pools of a history: the default one is the first, the others follow as they come.

    Args:
        history: events.
        segments: those at the end; some may be older than all events.

    Returns:
        Nothing if an event does not tell its pool.

    >>> pools([{"pool_id": (0, 7)}, {"pool_id": (0, 0)}], [{"segment_pool_id": (3, 0)}])
    ((0, 0), (0, 7), (3, 0))
    """
    named = [event.get("pool_id") for event in history]
    if None in named or not named:
        return ()
    named += [segment["segment_pool_id"] for segment in segments if "segment_pool_id" in segment]
    return tuple(dict.fromkeys([DEFAULT_POOL, *map(pool_id, named)]))


def _pool_column(history: Sequence[Mapping[str, Any]]) -> npt.NDArray[np.int32] | None:
    number = {pool: index for index, pool in enumerate(pools(history))}
    if not number:
        return None
    return np.array(array("i", [number[event["pool_id"]] for event in history]), np.int32)


def pool_id(value: Any) -> tuple[int, int]:
    """Return what PyTorch wrote as a pool's number, checked.

    Raises:
        TypeError, ValueError: it is not two numbers.
    """
    first, second = value
    if not all(isinstance(part, int) and 0 <= part <= _MAX_NUMBER for part in (first, second)):
        raise TypeError(f"{str(value)[:40]!r} is no pool")
    return first, second


class _Memo(dict[str, int]):
    """A function's results, each asked for once."""

    def __init__(self, function: Callable[[str], int]) -> None:
        super().__init__()
        self._function = function

    def __missing__(self, key: str) -> int:
        value = self[key] = self._function(key)
        return value


def _address(event: Mapping[str, Any]) -> Any:
    # Where an allocation failed there is no address; PyTorch tells what the device had free.
    return event["device_free"] if event["action"] == _OOM else event["addr"]


def _stack_column(history: Sequence[Mapping[str, Any]], table: StackTable) -> list[int]:
    """Return each event's stack. Identities are safe as keys: the history keeps its objects alive."""
    by_list: dict[int, int] = {}
    by_frame: dict[int, int] = {}
    column = []
    for event in history:
        frames = event.get("frames", ())
        stack = by_list.get(id(frames))
        if stack is None:
            for frame in frames:
                if id(frame) not in by_frame:
                    by_frame[id(frame)] = table.frame(*_line(frame))
            stack = by_list[id(frames)] = table.intern_frames([by_frame[id(frame)] for frame in frames])
        column.append(stack)
    return column


def _line(frame: Mapping[str, Any]) -> tuple[str, int, str]:
    file, line, function = frame["filename"], frame["line"], frame["name"]
    whole = isinstance(file, str) and isinstance(line, int) and isinstance(function, str)
    if not whole or abs(line) > _MAX_LINE:
        raise TypeError("a frame has no file, line and function")
    return file, line, function


def torch_folder() -> str:
    """Return the folder of the imported torch, which need not be an installed package."""
    torch = sys.modules.get("torch")
    # A path that no file has stands for a torch that is not here.
    return str(Path(str(torch.__file__)).parent) + "/" if torch is not None else "\0"
