"""The purpose of every allocation: its category, module, op and line.

    stage      before          forward       backward        update
    phases     setup input     forward loss  backward        between optimizer
                               │             recompute
    held by a live object              parameter, buffer, gradient, optimizer state, copy, workspace
    saved by autograd's graph          activation
    passed to a model                  input
    freed before its stage ends        temporary; in a recomputation, before that ends
    made before a forward              input; held by the script, if it was made in or before the first
                                       training step, and outlives the second, or a run that has no second;
                                       or if it outlives three forwards without a backward: an evaluation
    made in a forward, alive after it  activation if a graph saved it, or if the next backward frees it (saved
                                       where memfit cannot see it); otherwise output: the script holds it
    made in a backward, alive after    activation if the next backward frees it; otherwise gradient

Live objects and graphs were inspected while the script ran; the rest follows from when an allocation was made
and freed. Anything else is ``UNKNOWN``.
"""

import numpy as np
import numpy.typing as npt

from memfit.analysis.event_locations import NOWHERE, phase_of_events, script_line_of_event
from memfit.analysis.peak_outside_failed_attempts import failed_allocation_events
from memfit.records import Action, Attribution, Category, MarkKind, Phase, Timeline, Trace

_STAGES = {
    Phase.SETUP: 0,
    Phase.INPUT: 0,
    Phase.FORWARD: 1,
    Phase.LOSS: 1,
    Phase.BACKWARD: 2,
    Phase.RECOMPUTE: 2,
    Phase.BETWEEN: 3,
    Phase.OPTIMIZER: 3,
}
_BEFORE, _FORWARD, _BACKWARD, _UPDATE = 0, 1, 2, 3
_PHASES = tuple(Phase)
_STEPS_OUTLIVED = 2
"""Training steps: a batch that was made before the first is freed when the second begins, or in it."""
_FORWARDS_OUTLIVED = 3
"""Forwards of an evaluation: a batch is freed when the next one begins, or later if it was fetched ahead."""
Numbers = npt.NDArray[np.int64]


def attribute_allocations(trace: Trace, line: Timeline) -> Attribution:
    """Determine what each allocation of a trace is for."""
    events = trace.events
    born = np.flatnonzero(np.isin(events.action, (Action.ALLOC, Action.EARLIER)))
    freed = line.freed_by[born]
    labels = [*trace.labels, NOWHERE]
    phase = phase_of_events(trace)
    tensor = events.tensor[born] if events.tensor is not None else np.full(len(born), -1, np.int32)
    label = events.label[born]
    # A module's tensor counts as the module's, wherever it was allocated.
    names = [tensor.module for tensor in trace.tensors] + [""]
    owner = np.array([bool(name) for name in names])[tensor]
    modules, module = _interned([*(one.module for one in labels), *names])
    ops, op = _interned([one.op for one in labels])
    lines, of_line = _lines(trace, born)
    return Attribution(
        born=born,
        freed=freed,
        requested=events.size[born],
        block=line.block_size[born],
        category=_categories(trace, born, freed, phase),
        phase_of_event=phase,
        module=np.where(owner, module[len(labels) :][tensor], module[: len(labels)][label]),
        op=op[label],
        line=of_line,
        tensor=tensor,
        modules=modules,
        ops=ops,
        lines=lines,
    )


def _categories(
    trace: Trace, born: Numbers, freed: Numbers, phase: npt.NDArray[np.uint8]
) -> npt.NDArray[np.uint8]:
    category = trace.events.category[born].copy()
    failed = failed_allocation_events(trace)
    if trace.end.reason == "out of memory" and len(failed):
        # Memory that the exception freed while unwinding would have stayed.
        freed = np.where(freed > failed[-1], len(phase), freed)
    stage = np.array([_STAGES[one] for one in _PHASES], np.uint8)[phase]
    backwards = _counted(trace, MarkKind.BACKWARD)
    recomputed = phase[born] == _PHASES.index(Phase.RECOMPUTE)
    made = stage[born]
    # Allocations that are never freed count as freed after all events, in a stage of their own.
    until_same_stage = _runs(stage)[freed] == _runs(stage)[born]
    if trace.end.reason == "out of memory" and len(failed):
        # Allocations of the stage that failed would have been freed with it, unless an object holds them.
        failing = (made >= _BACKWARD) & (_runs(stage)[born] == _runs(stage)[failed[-1]])
        until_same_stage |= failing & (freed == len(phase))
    temporary = np.where(recomputed, _runs(phase)[freed] == _runs(phase)[born], until_same_stage)
    # A step may run a closure's forward and backward, and keep its temporaries meanwhile.
    steps = _counted(trace, MarkKind.OPTIMIZER_STEP)
    in_optimizer = phase[born] == _PHASES.index(Phase.OPTIMIZER)
    temporary |= in_optimizer & (steps[freed] == steps[born]) & (freed < len(phase))
    next_backward_frees = (backwards[freed] == backwards[born] + 1) & (
        np.append(stage, 0)[freed] == _BACKWARD
    )
    no_backward = backwards[born] == backwards[-1]
    ended_inside = no_backward & (freed == len(phase)) & (trace.end.reason not in ("end", "steps"))
    kept = (made == _FORWARD) & (next_backward_frees | ended_inside)
    kept |= (made == _BACKWARD) & next_backward_frees  # the graph of a gradient
    # Allocations between the phases that stay are input of the next forward: the next batch of a window.
    given = (made == _BEFORE) | ((made == _UPDATE) & ~in_optimizer)
    # What outlives whole steps is no batch, unless a model was called with it.
    done = _counted(trace, MarkKind.TRAINING_STEP)
    outlives = (done[freed] >= _STEPS_OUTLIVED) | ((freed == len(phase)) & (done[-1] > 0))
    forwards = _entered(stage, _FORWARD)
    evaluated = (backwards[freed] == backwards[born]) & (
        forwards[freed] - forwards[born] >= _FORWARDS_OUTLIVED
    )
    held = given & (((done[born] == 0) & outlives) | evaluated)
    # A saved tensor that no graph computed is an input, unless a forward or backward made it, like a mask.
    category[(category == Category.INPUT) & ~given] = Category.ACTIVATION
    # Without a label, what the script was doing is unknown.
    unknown = (category == Category.UNKNOWN) & (trace.events.label[born] >= 0)
    for which, kind in (
        (given, Category.INPUT),
        (held, Category.HELD),
        (made == _FORWARD, Category.OUTPUT),
        (made == _BACKWARD, Category.GRADIENT),
        (kept, Category.ACTIVATION),
        (recomputed, Category.RECOMPUTED),
        (temporary, Category.TEMPORARY),
    ):
        category[unknown & which] = kind
    return category


def _counted(trace: Trace, kind: MarkKind) -> Numbers:
    """Return the number of marks of a kind up to each event, and after all events."""
    marks = [mark.position for mark in trace.marks if mark.kind is kind]
    return np.searchsorted(marks, np.arange(len(trace.events) + 1), side="right")


def _entered(stage: npt.NDArray[np.uint8], which: int) -> Numbers:
    """Return how often a stage has begun up to each event, and after all events."""
    begins = (stage == which) & (np.append(_BEFORE, stage[:-1]) != which)
    return np.cumsum(np.append(begins, 0))


def _runs(values: npt.NDArray[np.uint8]) -> Numbers:
    """Number the runs of equal values; an extra entry, for after the end, is a run of its own."""
    changes = np.flatnonzero(np.diff(values)) + 1
    number = np.zeros(len(values) + 1, np.int64)
    number[changes] = 1
    number[-1] = 1
    return np.cumsum(number)


def _interned(names: list[str]) -> tuple[tuple[str, ...], npt.NDArray[np.int32]]:
    table = {name: index for index, name in enumerate(dict.fromkeys(names))}
    return tuple(table), np.array([table[name] for name in names], np.int32)


def _lines(trace: Trace, born: Numbers) -> tuple[tuple[str, ...], npt.NDArray[np.int32]]:
    """Return the lines that made allocations; each pair of stack and label is resolved once."""
    places = np.stack((trace.events.stack[born], trace.events.label[born]), axis=1)
    unique, first, inverse = np.unique(places, axis=0, return_index=True, return_inverse=True)
    lines, of_place = _interned([script_line_of_event(trace, int(born[event])) for event in first])
    del unique
    return lines, of_place[inverse.reshape(-1)] if len(born) else np.zeros(0, np.int32)
