"""On which streams a step's work ran, and what it waited for, from the ghost's marks in its trace.

    memfit:gpu:stream:S                 the calling thread's work is on stream S from here on
    memfit:gpu:record:E:S               event E: all that stream S has been given
    memfit:gpu:wait:E:S                 what stream S is given from here on waits for event E
    memfit:gpu:nccl:NAME:...:C:S        a call of NCCL on stream S, by communicator C, and
    memfit:gpu:launch                     the kernel that runs all calls of a group
    memfit:gpu:synchronize_stream:S     the host waits for stream S; so for an event, or for all streams
    memfit:gpu:malloc, free, ...        the host asks memory of the driver; to free some, it waits for all

``runtime/cuda/stream_marks.c`` leaves them. Handles are addresses, and events are used again and again.
NCCL runs what a communicator is asked for in order, whatever the streams. Source: NVIDIA/nccl, issue 574.
"""

from collections import defaultdict

from memfit.records import DRIVER, EVERY_STREAM, NO_STREAM, Operand, Operation

MARK = "memfit:gpu:"
_DEFAULT = "(nil)"
_SENT = {"send": "send_recv", "recv": "send_recv"}
_DTYPES = (
    *("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16"),
    *("float8_e4m3fn", "float8_e5m2"),
)
"""Source: nccl.h, ncclDataType_t."""

Frontier = dict[int, int]
"""By stream, the last operation that must have ended, by its place in the step."""


class StepStreams:
    """Follows the marks of a step.

    >>> streams = StepStreams()
    >>> streams.issued(streams.of_thread(1), 0)
    >>> for mark in ("record:0xe:(nil)", "wait:0xe:0x5", "stream:0x5"):
    ...     _ = streams.read(MARK + mark, thread=1)
    >>> streams.issued(streams.of_thread(1), 1)
    >>> streams.after
    [(1, 0)]
    """

    def __init__(self) -> None:
        self.after: list[tuple[int, int]] = []
        """As in ``WholeStep``."""
        self._numbers = {_DEFAULT: 0}
        self._of_thread: dict[int, int] = {}
        self._frontiers: defaultdict[int, Frontier] = defaultdict(dict)
        self._events: dict[str, Frontier] = {}
        self._calls: defaultdict[int, list[Operation]] = defaultdict(list)
        self._last_of: defaultdict[str, Frontier] = defaultdict(dict)
        """By communicator."""
        self._begun: defaultdict[int, set[str]] = defaultdict(set)
        """By stream, the communicators of calls that are not launched."""

    def of_thread(self, thread: int) -> int:
        """Return the stream that a thread gives its work to."""
        return self._of_thread.get(thread, 0)

    def issued(self, stream: int, place: int) -> None:
        """Note that an operation was issued, by its place in the step."""
        before = self._frontiers[stream]
        self.after += [(place, last) for other, last in before.items() if other != stream]
        self._frontiers[stream] = {stream: place}
        for communicator in self._begun.pop(stream, ()):
            self._last_of[communicator] = {stream: place}

    def read(self, name: str, thread: int) -> list[Operation]:
        """Follow a mark; return what NCCL launches there."""
        kind, *values = name.removeprefix(MARK).split(":")
        if kind == "launch":
            return _launched(self._calls.pop(thread, []))
        if kind in {"malloc", "map", "free", "unmap", "synchronize", "synchronize_event"}:
            return self._asked_of_driver(kind, values)
        stream = self._numbers.setdefault(values[-1], len(self._numbers))
        if kind == "stream":
            self._of_thread[thread] = stream
        elif kind == "synchronize_stream":
            return [_call_of_driver(kind, stream, waits=True)]
        elif kind == "record":
            self._events[values[0]] = dict(self._frontiers[stream])
        elif kind == "wait":
            self._wait(stream, self._events.get(values[0], {}))
        else:
            *call, communicator, _ = values
            self._wait(stream, self._last_of[communicator])
            self._begun[stream].add(communicator)
            self._calls[thread].append(_call(call, stream))
        return []

    def _asked_of_driver(self, kind: str, values: list[str]) -> list[Operation]:
        """Return what the host does itself, and what it waits for before that."""
        if kind == "synchronize_event":
            self._wait(NO_STREAM, self._events.get(values[0], {}))
            return [_call_of_driver(kind, NO_STREAM, waits=True)]
        everything = _call_of_driver("synchronize", EVERY_STREAM, waits=True)
        return [everything] * (kind not in {"malloc", "map"}) + [_call_of_driver(kind, NO_STREAM)] * (
            kind != "synchronize"
        )

    def _wait(self, stream: int, frontier: Frontier) -> None:
        own = self._frontiers[stream]
        for other, last in frontier.items():
            own[other] = max(last, own.get(other, -1))


def _call_of_driver(kind: str, stream: int, *, waits: bool = False) -> Operation:
    fields = f"{DRIVER}{kind}", -1, -1, (), (), (), 0, 0, "", False, 0.0, 0
    return Operation(*fields, stream=stream, waits=waits)


def _call(values: list[str], stream: int) -> Operation:
    name, *numbers = values
    sent, received, dtype, ranks = map(int, numbers)
    kind = _DTYPES[dtype] if dtype < len(_DTYPES) else "int8"
    operands, results = ((Operand((count,), kind),) if count else () for count in (sent, received))
    return collective(name, operands, results, ranks, stream)


def collective(
    name: str, operands: tuple[Operand, ...], results: tuple[Operand, ...], ranks: int, stream: int
) -> Operation:
    """Return the record of a call of NCCL, such as ``all_reduce``."""
    dtype = (*operands, *results)[0].dtype
    fields = f"nccl.{name}", -1, -1, (), (), (), 0, 0, dtype, False, 0.0, 0
    return Operation(*fields, operands=operands, results=results, launches=1, stream=stream, ranks=ranks)


def _launched(calls: list[Operation]) -> list[Operation]:
    """Return the calls of a group by name; sends and receives are one."""
    groups: defaultdict[tuple[str, int, int], list[Operation]] = defaultdict(list)
    for each in calls:
        name = each.name.partition(".")[2]
        groups[_SENT.get(name, name), each.ranks, each.stream].append(each)
    return [
        collective(
            name,
            tuple(tensor for each in some for tensor in each.operands),
            tuple(tensor for each in some for tensor in each.results),
            ranks,
            stream,
        )
        for (name, ranks, stream), some in groups.items()
    ]
