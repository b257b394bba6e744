"""Handwritten traces for tests, with defaults for everything that a test is not about."""

from typing import NamedTuple

import numpy as np

from memfit.records import (
    Action,
    Category,
    DeviceUse,
    Events,
    Figure,
    Provenance,
    ScriptEnd,
    Segment,
    Trace,
)

BASE = 0x7F00_0000_0000
"""A plausible segment address."""
NOWHERE = DeviceUse("none", Figure(0, Provenance.ASSUMED), Figure(0, Provenance.ASSUMED), 0)
"""A device without known properties."""
_EMPTY = {
    "labels": (),
    "stacks": (),
    "frames": (),
    "marks": (),
    "device": NOWHERE,
    "end": ScriptEnd("end", 0),
    "settings": {},
    "statistics": {},
    "versions": {},
    "command": (),
}


class Event(NamedTuple):
    """One row of a history. A plain tuple with the same leading fields may be used instead."""

    action: Action
    address: int
    size: int
    stream: int = 0
    label: int = -1
    stack: int = -1
    category: Category = Category.UNKNOWN
    pool: int = 0


def freed(address, size, **more):
    """Return the two events of freeing a block that no other stream uses."""
    return [Event(action, address, size, **more) for action in (Action.FREE_REQUESTED, Action.FREE_COMPLETED)]


def segment(address, size, kind="large", *, expandable=False, blocks=(), pool=(0, 0)):
    """Return a segment at the end of a trace."""
    return Segment(address, size, 0, kind, pool, expandable, tuple(blocks))


def events_of(history, *, pools=False):
    """Return the columns of a history of (action, address, size, ...), with a pool column if requested."""
    rows = [Event(*row) for row in history]

    def column(name, dtype):
        return np.array([getattr(row, name) for row in rows], dtype)

    return Events(
        action=column("action", np.uint8),
        address=column("address", np.uint64),
        size=column("size", np.int64),
        stream=column("stream", np.int32),
        time=np.arange(len(rows), dtype=np.int64),
        label=column("label", np.int32),
        stack=column("stack", np.int32),
        category=column("category", np.uint8),
        pool=column("pool", np.int32) if pools else None,
    )


def trace_of(history, segments=None, **fields):
    """Return a trace.

    Args:
        history: events, or tuples with their leading fields.
        segments: those at the end; None for those that ``history`` allocates and does not free.
        fields: other fields of a ``Trace``. By default they are empty, the device is unknown and the script
            ran to its end.
    """
    return Trace(
        events=events_of(history, pools=bool(fields.get("pools"))),
        segments=_remaining_segments(history) if segments is None else tuple(segments),
        **(_EMPTY | fields),
    )


def _remaining_segments(history):
    remaining = {}
    for action, address, size, *_ in history:
        if action is Action.SEGMENT_ALLOC:
            remaining[address] = segment(address, size)
        elif action is Action.SEGMENT_FREE:
            del remaining[address]
    return tuple(remaining.values())
