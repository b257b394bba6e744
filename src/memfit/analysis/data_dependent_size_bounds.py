"""Sizes that depend on GPU values and are set to the largest possible: which of them decides a figure.

    bound in heads.py:120     bound in pool.py:9, returns      block of heads.py:130     peak
    |                         |                                |------------------------ |

A block whose size follows from such a size is allocated after it, in the same training step, while the code
that found the size is still running: here heads.py:120 decides. What belongs to the model or an optimizer's
step, and workspaces, have sizes of their own.
"""

import os
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from memfit.analysis.event_locations import phase_of_events, stack_index_of_event
from memfit.analysis.run_stages import NEEDED_BY_TRAINING
from memfit.records import Action, MarkKind, Phase, SizeBound, Timeline, Trace

_Marks = list[tuple[int, int]]
"""(position, number from 1 among all marks of the trace) of some marks, in order."""


def data_dependent_size_bounds(trace: Trace, line: Timeline, event: int) -> tuple[SizeBound, ...]:
    """Return the sizes found before an event, with the bytes that follow from each; the most first.

    Each block, and a request that fails at the event, counts for the last bound of a file on its stack.
    """
    moments = _moments(trace, event)
    if not moments:
        return ()
    upto = slice(event + 1)
    alive = (trace.events.action[upto] == Action.ALLOC) & (line.freed_by[upto] > event)
    alive[event] |= trace.events.action[event] == Action.OOM
    alive &= ~np.isin(trace.events.category[upto], NEEDED_BY_TRAINING)
    alive &= phase_of_events(trace)[upto] != tuple(Phase).index(Phase.OPTIMIZER)
    blocks = np.flatnonzero(alive)
    began = _last_before(_marks(trace, MarkKind.TRAINING_STEP), blocks)
    stacks = np.array([stack_index_of_event(trace, block) for block in blocks.tolist()], np.int64)
    last = np.zeros((len(moments), len(blocks)), np.int64)  # the mark of each bound before each block, or 0
    for row, (bound, marks) in enumerate(moments.items()):
        found = _last_before(marks, blocks)
        last[row] = np.where((found > began) & _runs_on(trace, bound, stacks), found, 0)
    follows = last.max(axis=0, initial=0) > 0
    held = np.zeros(len(moments), np.int64)
    np.add.at(held, last.argmax(axis=0)[follows], trace.events.size[blocks[follows]])
    found_last = {bound: marks[-1] for bound, marks in moments.items()}
    bounds = [replace(bound, bytes=size) for bound, size in zip(moments, held.tolist(), strict=True)]
    return tuple(sorted(bounds, key=lambda one: (one.bytes, found_last[replace(one, bytes=0)]), reverse=True))


def _moments(trace: Trace, event: int) -> dict[SizeBound, _Marks]:
    """Return the marks of each size that was set to its upper bound before an event."""
    moments: dict[SizeBound, _Marks] = {}
    for position, number in _marks(trace, MarkKind.SIZE_BOUND):
        index = trace.marks[number - 1].index
        if position <= event and index < len(trace.notes):
            note = trace.notes[index]
            moments.setdefault(SizeBound(note.bound, note.where, 0), []).append((position, number))
    return moments


def _marks(trace: Trace, kind: MarkKind) -> _Marks:
    return [(mark.position, at) for at, mark in enumerate(trace.marks, start=1) if mark.kind is kind]


def _last_before(marks: _Marks, events: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the number of the last mark before each event, or 0."""
    positions, numbers = ([part[column] for part in marks] for column in (0, 1))
    before: npt.NDArray[np.int64] = np.array([0, *numbers])[np.searchsorted(positions, events, side="right")]
    return before


def _runs_on(trace: Trace, bound: SizeBound, stacks: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return on which stacks the file that a bound was found in is running."""
    path = bound.where.rpartition(", in ")[2].rpartition(":")[0]
    frames = [f"{os.sep}{frame.file}".endswith(f"{os.sep}{path}") for frame in trace.frames]
    running = [any(frames[index] for index in stack) for stack in trace.stacks]
    return np.array([*running, False], np.bool_)[stacks]
