"""The category of each allocation, on traces small enough to check by hand."""

import dataclasses

import numpy as np
import pytest

from memfit.allocator.timeline import memory_timeline
from memfit.analysis.attribution import attribute_allocations
from memfit.analysis.breakdown import LARGEST, breakdown_at, peak_event
from memfit.analysis.event_locations import script_location_at
from memfit.analysis.explanation import memory_changes_by_phase
from memfit.errors import UsageError
from memfit.records import (
    Action,
    Category,
    EventLabel,
    Frame,
    GroupBy,
    Mark,
    MarkKind,
    Phase,
    ScriptEnd,
    TensorInfo,
)
from support.traces import BASE, Event, freed, segment, trace_of

MIB = 1 << 20
PHASES = {phase: place for place, phase in enumerate(Phase)}
LABELS = tuple(EventLabel(phase, "blocks.0.fc" if phase == Phase.FORWARD else "", "", -1) for phase in Phase)
FRAMES = (Frame("train.py", 3, "main", user=True),)


def made(place, size, phase, category=Category.UNKNOWN):
    """Return the allocation of a block in slot ``place``; slots have 512 bytes."""
    return Event(Action.ALLOC, BASE + 512 * place, size, label=PHASES[phase], stack=0, category=category)


def gone(place, size, phase):
    return freed(BASE + 512 * place, size, label=PHASES[phase])


def run(*history, end="steps"):
    """Return a trace of one segment, with a mark at the first event of each forward, backward and step."""
    events = [Event(Action.SEGMENT_ALLOC, BASE, 2 * MIB, label=PHASES[Phase.SETUP])]
    marks, before = [], Phase.SETUP
    kinds = {Phase.FORWARD: MarkKind.FORWARD, Phase.BACKWARD: MarkKind.BACKWARD}
    for group in history:
        for event in group if isinstance(group, list) else [group]:
            phase = tuple(Phase)[event.label]
            if phase in kinds and before not in (phase, Phase.RECOMPUTE):
                marks.append(Mark(len(events), kinds[phase], 0))
            if before == Phase.OPTIMIZER != phase:
                marks.append(Mark(len(events), MarkKind.TRAINING_STEP, 0))
            before = phase
            events.append(event)
    return trace_of(
        events,
        [segment(BASE, 2 * MIB, "small")],
        labels=LABELS,
        stacks=((0,),),
        frames=FRAMES,
        marks=tuple(marks),
        end=ScriptEnd(end, 0),
    )


def categories(trace):
    return [Category(code).name for code in attribute_allocations(trace, memory_timeline(trace)).category]


F, L, B, R, O, S, I, W = (  # noqa: E741 - short, for tables
    *(Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.RECOMPUTE),
    *(Phase.OPTIMIZER, Phase.SETUP, Phase.INPUT, Phase.BETWEEN),
)


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ([made(0, 100, F), gone(0, 100, F)], "TEMPORARY"),
        ([made(0, 100, F), gone(0, 100, L)], "TEMPORARY"),
        ([made(0, 100, F), gone(0, 100, B)], "ACTIVATION"),  # kept by code that memfit cannot see
        ([made(0, 100, F), made(1, 9, B), gone(0, 100, I)], "OUTPUT"),
        ([made(0, 100, F), made(1, 9, B)], "OUTPUT"),
        ([made(0, 100, S), made(1, 9, F)], "INPUT"),
        ([made(0, 100, I), made(1, 9, F), gone(0, 100, F)], "INPUT"),
        ([made(0, 100, S, Category.INPUT), made(1, 9, F)], "INPUT"),
        ([made(0, 100, S, Category.ACTIVATION), made(1, 9, F)], "ACTIVATION"),  # computed outside modules
        ([made(0, 100, F, Category.INPUT), made(1, 9, B)], "ACTIVATION"),  # a mask
        ([made(0, 100, B, Category.INPUT), made(1, 9, F)], "ACTIVATION"),
        ([made(0, 9, B), made(1, 100, W, Category.INPUT), made(2, 9, F)], "INPUT"),
        ([made(0, 9, B), made(1, 100, W), made(2, 9, F)], "INPUT"),  # a window's next batch
        ([made(0, 9, B), made(1, 100, W), gone(1, 100, O)], "TEMPORARY"),
        ([made(0, 100, B), gone(0, 100, B)], "TEMPORARY"),
        ([made(0, 9, B), made(1, 100, W)], "INPUT"),  # as far as the run went
        ([made(0, 100, B), made(1, 9, O)], "GRADIENT"),
        ([made(0, 100, B), made(1, 9, F), gone(0, 100, F)], "GRADIENT"),
        ([made(0, 100, B), made(1, 9, F), gone(0, 100, B)], "ACTIVATION"),  # the graph of a gradient
        ([made(0, 100, R), gone(0, 100, R)], "TEMPORARY"),
        ([made(0, 100, R), gone(0, 100, B)], "RECOMPUTED"),
        ([made(0, 100, O), gone(0, 100, O)], "TEMPORARY"),
        ([made(0, 100, O), made(1, 9, F), gone(0, 100, O)], "TEMPORARY"),  # a closure's forward
        ([made(0, 100, O), made(1, 9, F)], "UNKNOWN"),
        ([made(0, 100, F, Category.PARAMETER), gone(0, 100, F)], "PARAMETER"),
    ],
)
def test_an_allocation_has_the_category_of_its_life(history, expected):
    trace = run(*history)
    attribution = attribute_allocations(trace, memory_timeline(trace))
    (which,) = np.flatnonzero(attribution.requested == 100)
    assert Category(attribution.category[which]).name == expected


def step(place=1):
    """Return a training step that leaves nothing behind."""
    return [event for phase in (F, B, O) for event in (made(place, 9, phase), *gone(place, 9, phase))]


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ([made(0, 100, S), step(), step(), step(), made(1, 9, I)], "HELD"),
        ([made(0, 100, S), step(), made(1, 9, I)], "HELD"),  # as far as the run went
        ([made(0, 9, F), gone(0, 9, F), made(0, 100, I), step(), step(), made(1, 9, I)], "HELD"),
        ([made(0, 100, S), step(), gone(0, 100, I), step(0), made(0, 9, I)], "INPUT"),  # the first batch
        ([made(0, 100, S), step(), step(), gone(0, 100, I), step(0), made(0, 9, I)], "HELD"),
        ([made(0, 100, S, Category.INPUT), step(), step(), made(1, 9, I)], "INPUT"),  # passed to a model
        ([made(0, 100, S, Category.COPY), step(), step(), made(1, 9, I)], "COPY"),
        ([step(0), made(0, 100, I), step(), step(), made(1, 9, I)], "INPUT"),  # later data
    ],
)
def test_what_outlives_whole_training_steps_is_held_by_the_script(history, expected):
    trace = run(*history)
    attribution = attribute_allocations(trace, memory_timeline(trace))
    (which,) = np.flatnonzero(attribution.requested == 100)
    assert Category(attribution.category[which]).name == expected


def forwards(number, place=1):
    """Return the forwards of an evaluation, each with its batch."""
    return [
        event
        for _ in range(number)
        for phase in (I, F)
        for event in (made(place, 9, phase), *gone(place, 9, phase))
    ]


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ([step(0), step(0), step(0), made(0, 100, I), forwards(3)], "HELD"),
        ([step(0), step(0), step(0), made(0, 100, I), forwards(3), gone(0, 100, I)], "HELD"),
        (
            [step(0), step(0), step(0), made(0, 100, I), forwards(2)],
            "INPUT",
        ),  # a batch that was fetched ahead
        ([forwards(3, 0), step(0), step(0), step(0), made(0, 100, I), forwards(2), gone(0, 100, I)], "INPUT"),
        ([step(0), step(0), made(0, 100, I), step(), step(), step()], "INPUT"),  # no evaluation
        ([made(0, 100, I, Category.INPUT), forwards(3)], "INPUT"),  # passed to a model
    ],
)
def test_what_outlives_an_evaluation_s_forwards_is_held_by_the_script(history, expected):
    trace = run(*history)
    attribution = attribute_allocations(trace, memory_timeline(trace))
    (which,) = np.flatnonzero(attribution.requested == 100)
    assert Category(attribution.category[which]).name == expected


def test_allocations_alive_at_an_out_of_memory_error_count_as_kept():
    failing = Event(Action.OOM, 0, 4096, label=PHASES[F])
    history = (made(0, 100, F), made(1, 50, F), gone(1, 50, F), failing, gone(0, 100, F))
    assert categories(run(*history, end="out of memory")) == ["ACTIVATION", "TEMPORARY"]
    assert categories(run(*history)) == ["TEMPORARY", "TEMPORARY"]


def test_an_event_without_a_label_is_unknown():
    trace = run(made(0, 100, F)._replace(label=-1), made(1, 9, F), gone(0, 100, F))
    assert categories(trace)[0] == "UNKNOWN"
    saved = made(0, 100, F, Category.ACTIVATION)._replace(label=-1)
    assert categories(run(saved, made(1, 9, F)))[0] == "ACTIVATION"


def test_phases_agree_everywhere():
    trace = run(made(0, 1000, S), made(2, 9, F), made(3, 9, F)._replace(label=-1), made(4, 9, B))
    line = memory_timeline(trace)
    attribution = attribute_allocations(trace, line)
    phases = [tuple(Phase)[code] for code in attribution.phase_of_event]
    assert phases == [script_location_at(trace, event).phase for event in range(len(trace.events))]
    for phase in dict.fromkeys(phases):
        at = peak_event(trace, line, phase)
        assert phases[at] is phase
        assert line.allocated[at] == max(
            level for other, level in zip(phases, line.allocated.tolist(), strict=True) if other is phase
        )
    assert [change.phase for change in memory_changes_by_phase(trace, line, attribution)] == [S, F, S, B]


HELD = (
    made(0, 1000, S, Category.PARAMETER),
    made(2, 300, F, Category.ACTIVATION),
    made(3, 513, F),
    gone(3, 513, F),
    made(3, 700, B, Category.GRADIENT),
    gone(2, 300, B),
    made(5, 40, O, Category.OPTIMIZER_STATE),
    made(6, 40, O),
    gone(6, 40, O),
    made(6, 11, I),
)


def test_rows_of_every_kind_sum_to_the_allocated_bytes():
    trace = run(*HELD)
    line = memory_timeline(trace)
    attribution = attribute_allocations(trace, line)
    for event in range(len(trace.events)):
        found = breakdown_at(trace, line, attribution, event)
        assert found.allocated == line.allocated[event]
        assert set(found.rows) == set(GroupBy)
        for rows in found.rows.values():
            assert sum(row.bytes for row in rows) == found.allocated
            assert rows[-1].name == "rounding"


def test_a_tensor_belongs_to_the_module_that_owns_it():
    trace = run(*HELD)
    tensor = np.full(len(trace.events), -1, np.int32)
    tensor[1] = 0
    trace = dataclasses.replace(
        trace,
        events=dataclasses.replace(trace.events, tensor=tensor),
        tensors=(TensorInfo("blocks.1.fc", "weight", "float32", (250,)),),
    )
    line = memory_timeline(trace)
    found = breakdown_at(trace, line, attribute_allocations(trace, line), len(trace.events) - 1)
    names = {row.name: row.bytes for row in found.rows[GroupBy.MODULE]}
    assert names["blocks.0-1.fc"] == 1000  # the forward's blocks are gone by then
    assert (found.largest[0].name, found.largest[0].shape) == ("weight", (250,))
    assert len(found.largest) <= LARGEST


@pytest.mark.parametrize(
    ("at", "event"), [("peak", 10), ("setup", 1), ("forward", 3), ("optimizer", 10), ("1", 10), ("2", 13)]
)
def test_a_moment_is_the_peak_of_its_phase_or_step(at, event):
    trace = run(*HELD)
    line = memory_timeline(trace)
    assert peak_event(trace, line, at) == event


@pytest.mark.parametrize("at", ["3", "0", "lunch", "recompute", "9" * 5000])
def test_a_missing_moment_is_refused(at):
    trace = run(*HELD)
    with pytest.raises(UsageError, match=f"--at {at}"):
        peak_event(trace, memory_timeline(trace), at)


def test_the_ledger_has_the_change_of_each_phase():
    trace = run(*HELD)
    line = memory_timeline(trace)
    changes = memory_changes_by_phase(trace, line, attribute_allocations(trace, line))
    assert [(change.phase, dict(change.by_category)) for change in changes] == [
        (Phase.SETUP, {"parameters": 1024}),
        (Phase.FORWARD, {"activations": 512}),
        (Phase.BACKWARD, {"gradients": 1024, "activations": -512}),
        (Phase.OPTIMIZER, {"optimizer state": 512}),
        (Phase.INPUT, {"inputs": 512}),
    ]
    assert all(change.change == sum(size for _, size in change.by_category) for change in changes)
    assert changes[-1].after == line.allocated[-1]
    assert changes[1].peak == 1024 + 512 + 1024


def test_recomputation_is_part_of_its_backward_in_the_ledger():
    trace = run(made(0, 9, F), made(1, 9, B), made(2, 9, R), made(3, 9, B), made(4, 9, O))
    line = memory_timeline(trace)
    changes = memory_changes_by_phase(trace, line, attribute_allocations(trace, line))
    assert [(change.phase, change.step) for change in changes] == [(S, 0), (F, 1), (B, 1), (O, 1)]
    assert (changes[2].change, changes[2].peak) == (3 * 512, 4 * 512)


def test_a_trace_without_events_has_no_breakdown():
    trace = trace_of([])
    line = memory_timeline(trace)
    attribution = attribute_allocations(trace, line)
    assert len(attribution.category) == 0
    assert memory_changes_by_phase(trace, line, attribution) == ()
    with pytest.raises(UsageError, match="allocated no memory"):
        peak_event(trace, line, "peak")
