"""Traces that tests write by hand: as little of one as a test is about."""

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
"""Where a segment may lie."""
NOWHERE = DeviceUse("none", Figure(0, Provenance.ASSUMED), Figure(0, Provenance.ASSUMED), 0)
"""A device of which nothing is known."""
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
    """One row of a history; a plain tuple that begins as this one does is as good."""

    action: Action
    address: int
    size: int
    stream: int = 0
    label: int = -1
    stack: int = -1
    category: Category = Category.UNKNOWN
    pool: int = 0


def freed(address, size, **more):
    """Return the two events of a block that is freed while no other stream uses it."""
    return [Event(action, address, size, **more) for action in (Action.FREE_REQUESTED, Action.FREE_COMPLETED)]


def segment(address, size, kind="large", *, expandable=False, blocks=(), pool=(0, 0)):
    """Return a segment at the end of a trace."""
    return Segment(address, size, 0, kind, pool, expandable, tuple(blocks))


def events_of(history, *, pools=False):
    """Return the columns of a history of (action, address, size, ...), and of pools if these are told."""
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
        history: events, or tuples that begin as one.
        segments: those at the end; None for what ``history`` leaves of the ones that it allocates.
        fields: other fields of a ``Trace``. Those not given are empty; the device is not known, and the
            script came to its end.
    """
    return Trace(
        events=events_of(history, pools=bool(fields.get("pools"))),
        segments=_left_by(history) if segments is None else tuple(segments),
        **(_EMPTY | fields),
    )


def _left_by(history):
    left = {}
    for action, address, size, *_ in history:
        if action is Action.SEGMENT_ALLOC:
            left[address] = segment(address, size)
        elif action is Action.SEGMENT_FREE:
            del left[address]
    return tuple(left.values())
