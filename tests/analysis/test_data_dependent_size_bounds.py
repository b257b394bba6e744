"""Of the sizes that are set to their upper bound, the one that most of the memory follows from is named."""

from dataclasses import replace

import pytest

from memfit.allocator.timeline import memory_timeline
from memfit.analysis.data_dependent_size_bounds import data_dependent_size_bounds
from memfit.analysis.dry_run_result import dry_run_of_trace
from memfit.records import Action, Frame, Mark, MarkKind, Note, Provenance, ScriptEnd, SizeBound
from support.traces import BASE, Event, trace_of

MIB = 1 << 20
FRAMES = (
    Frame("/lib/vision/heads.py", 130, "forward", user=False),
    Frame("/lib/vision/pool.py", 9, "forward", user=False),
    Frame("/home/ada/train.py", 3, "<module>", user=True),
)
IN_HEADS, IN_POOL, IN_SCRIPT = 0, 1, 2
STACKS = ((0, 2), (1, 0, 2), (2,))
HEADS = SizeBound("nonzero", "/home/ada/train.py:3, in vision/heads.py:120", 0)
POOL = SizeBound("unique", "/home/ada/train.py:3, in vision/pool.py:9", 0)
SCRIPT = SizeBound("nonzero", "/home/ada/train.py:2", 0)


def run(blocks, bounds, *, ends=(), failed=False):
    """Return a trace of (bytes, stack) blocks and (position, bound) bounds; the first event is a segment."""
    history = [Event(Action.SEGMENT_ALLOC, BASE, 100 * MIB)]
    address = BASE
    for size, stack in blocks:
        history.append(Event(Action.ALLOC, address, size, stack=stack))
        address += size
    if failed:
        history[-1] = replace_action(history[-1], Action.OOM)
    found = list(dict.fromkeys(bound for _, bound in bounds))
    marks = [Mark(at, MarkKind.SIZE_BOUND, found.index(bound)) for at, bound in bounds]
    marks += [Mark(at, MarkKind.TRAINING_STEP, number) for number, at in enumerate(ends)]
    notes = [
        Note(Provenance.ASSUMED, "A size.", bound.where, sizes=True, bound=bound.operator) for bound in found
    ]
    return trace_of(
        history, frames=FRAMES, stacks=STACKS, notes=tuple(notes),
        marks=tuple(sorted(marks, key=lambda mark: mark.position)),
        end=ScriptEnd("out of memory", 1) if failed else ScriptEnd("end", 0),
    )  # fmt: skip


def replace_action(event, action):
    return event._replace(action=action, address=0)


@pytest.mark.parametrize(
    ("blocks", "bounds", "ends", "held"),
    [
        ([(MIB, IN_SCRIPT)], [], (), ()),
        ([(MIB, IN_SCRIPT)], [(2, SCRIPT)], (), ()),  # after the peak
        ([(MIB, IN_SCRIPT), (MIB, IN_SCRIPT)], [(2, SCRIPT)], (), ((SCRIPT, 1),)),
        # The pool has returned when the larger block is allocated.
        ([(MIB, IN_POOL), (9 * MIB, IN_HEADS)], [(1, HEADS), (1, POOL)], (), ((HEADS, 9), (POOL, 1))),
        ([(9 * MIB, IN_POOL), (MIB, IN_HEADS)], [(1, HEADS), (1, POOL)], (), ((POOL, 9), (HEADS, 1))),
        # Of a step, only what was allocated after the bound.
        (
            [(MIB, IN_HEADS), (8 * MIB, IN_SCRIPT), (2 * MIB, IN_SCRIPT)],
            [(1, HEADS), (3, SCRIPT)],
            (),
            ((SCRIPT, 2), (HEADS, 1)),
        ),
        ([(MIB, IN_HEADS), (8 * MIB, IN_HEADS)], [(1, HEADS)], (2,), ((HEADS, 1),)),
        # A bound of an earlier step holds nothing; the latest is named for lack of a better one.
        (
            [(MIB, IN_SCRIPT), (8 * MIB, IN_SCRIPT)],
            [(1, SCRIPT), (1, POOL)],
            (1, 2),
            ((POOL, 0), (SCRIPT, 0)),
        ),
    ],
)
def test_the_last_bound_in_code_that_still_runs_decides(blocks, bounds, ends, held):
    trace = run(blocks, bounds, ends=ends)
    bounds = tuple(replace(bound, bytes=mib * MIB) for bound, mib in held)
    assert data_dependent_size_bounds(trace, memory_timeline(trace), len(blocks)) == bounds
    assert dry_run_of_trace(trace).bounds == bounds
    assert dry_run_of_trace(trace).bound == (bounds[0] if bounds else None)


@pytest.mark.parametrize(
    ("bounds", "verdict"),
    [
        ([], "out of memory"),
        ([(3, POOL)], "out of memory"),  # after the failure
        ([(1, HEADS), (2, POOL)], "may not fit"),
    ],
)
def test_a_failure_after_a_bound_may_not_happen_in_a_real_run(bounds, verdict):
    answer = dry_run_of_trace(run([(MIB, IN_HEADS), (9 * MIB, IN_POOL)], bounds, failed=True))
    assert answer.verdict == verdict
    pool = replace(POOL, bytes=9 * MIB)  # the request that failed counts
    assert answer.bound == (pool if verdict == "may not fit" else None)


def test_a_mark_without_its_note_is_skipped():
    trace = run([(MIB, IN_SCRIPT)], [(1, SCRIPT)])
    assert dry_run_of_trace(replace(trace, notes=())).bound is None
