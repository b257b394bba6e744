"""Summaries of traces small enough to check by hand."""

import dataclasses
from dataclasses import replace

import pytest

from memfit.analysis.dry_run_result import dry_run_of_trace
from memfit.records import (
    Action,
    Category,
    DeviceUse,
    EventLabel,
    Figure,
    Frame,
    Growth,
    Mark,
    MarkKind,
    Note,
    Phase,
    Provenance,
    ScriptEnd,
)
from support.traces import BASE, Event, freed, segment, trace_of

MIB = 1 << 20
FORWARD, BACKWARD, SETUP = 0, 1, 2
LABELS = (
    EventLabel(Phase.FORWARD, "head", "", -1),
    EventLabel(Phase.BACKWARD, "head", "MmBackward0", 1),
    EventLabel(Phase.SETUP, "", "", -1),
)
FRAMES = (
    Frame("lib/layer.py", 9, "forward", user=False),
    Frame("train.py", 3, "main", user=True),
    Frame("train.py", 7, "main", user=True),
)


def alloc(address, size, label=FORWARD, stack=0, category=Category.UNKNOWN):
    return Event(Action.ALLOC, BASE + address, size, label=label, stack=stack, category=category)


def free(address, size):
    return freed(BASE + address, size, label=FORWARD)


STOPPED = ScriptEnd("steps", 0)
DEVICE = DeviceUse(
    "A100-80GB", Figure(80 << 30, Provenance.EXACT), Figure(512 * MIB, Provenance.ASSUMED, "a table"), 0
)


def trace(*events, marks=(), end=STOPPED, statistics=None, notes=()):
    """Make a trace in one segment of 2 MiB; addresses count from its start."""
    return trace_of(
        [Event(Action.SEGMENT_ALLOC, BASE, 2 * MIB, label=FORWARD), *events],
        [segment(BASE, 2 * MIB, "small")],
        labels=LABELS,
        stacks=((0, 1), (1,), (2,)),
        frames=FRAMES,
        marks=tuple(marks),
        device=DEVICE,
        end=end,
        statistics=statistics or {},
        command=("train.py",),
        notes=notes,
    )


def step_ends(*positions):
    return [Mark(position, MarkKind.TRAINING_STEP, index) for index, position in enumerate(positions)]


def terms(result):
    return {term.name: term.figure.bytes for term in result.terms}


def test_terms_are_blocks_alive_at_the_peak_and_sum_to_it():
    result = dry_run_of_trace(
        trace(
            alloc(0, 1000, category=Category.PARAMETER),
            alloc(1024, 600, category=Category.GRADIENT),
            *free(1024, 600),
            alloc(1024, 2000),
            alloc(3072, 512, category=Category.OPTIMIZER_STATE),
        )
    )
    assert result.peak_allocated == 1024 + 512 + 2048
    assert terms(result)["parameters"] == 1000
    assert terms(result)["gradients"] == 0
    assert terms(result)["optimizer state"] == 512
    assert terms(result)["outputs"] == 2000
    assert terms(result)["rounding"] == 24 + 48
    assert terms(result)["cached, not allocated"] == 2 * MIB - result.peak_allocated
    assert terms(result)["process"] == 2 * MIB + 512 * MIB
    assert result.peak_process.provenance is Provenance.ASSUMED


@pytest.mark.parametrize(("workspaces", "rest"), [(True, Provenance.EXACT), (False, Provenance.ASSUMED)])
def test_an_assumed_size_affects_its_row_and_totals(workspaces, rest):
    note = Note(Provenance.ASSUMED, "a size", sizes=True, workspaces=workspaces)
    result = dry_run_of_trace(
        trace(
            alloc(0, 1000, category=Category.PARAMETER),
            alloc(1024, 4096, category=Category.WORKSPACE),
            notes=(note,),
        )
    )
    provenances = {term.name: term.figure.provenance for term in result.terms}
    assert terms(result)["workspaces"] == 4096
    assert provenances["parameters"] is Provenance.EXACT
    assert provenances["activations"] is rest
    assert provenances["workspaces"] is (Provenance.ASSUMED if workspaces else Provenance.EXACT)
    assert provenances["allocated"] is provenances["reserved"] is Provenance.ASSUMED


def test_an_assumed_size_of_the_objects_themselves_leaves_no_figure_exact():
    note = Note(Provenance.ASSUMED, "a dtype", sizes=True, objects=True)
    result = dry_run_of_trace(trace(alloc(0, 1000, category=Category.PARAMETER), notes=(note,)))
    assert {term.figure.provenance for term in result.terms} == {Provenance.ASSUMED}


def test_an_assumed_size_that_a_graph_saved_shows_in_the_activations():
    note = Note(Provenance.ASSUMED, "a size", sizes=True, workspaces=True, activations=True)
    result = dry_run_of_trace(trace(alloc(0, 4096, category=Category.ACTIVATION), notes=(note,)))
    provenances = {term.name: term.figure.provenance for term in result.terms}
    assert provenances["activations"] is provenances["workspaces"] is Provenance.ASSUMED
    assert provenances["inputs"] is provenances["parameters"] is Provenance.EXACT


@pytest.mark.parametrize("others", [(), (Provenance.EXACT,), (Provenance.ASSUMED, Provenance.EXACT)])
def test_a_figure_has_the_least_certain_provenance_of_its_sizes(others):
    notes = [
        Note(provenance, f"size {i}", sizes=True, workspaces=True)
        for i, provenance in enumerate((Provenance.SIMULATED, *others))
    ]
    result = dry_run_of_trace(trace(alloc(0, 4096, category=Category.WORKSPACE), notes=tuple(notes)))
    provenances = {term.name: term.figure.provenance for term in result.terms}
    worst = Provenance.ASSUMED if Provenance.ASSUMED in others else Provenance.SIMULATED
    assert provenances["workspaces"] is provenances["allocated"] is provenances["reserved"] is worst
    assert provenances["activations"] is Provenance.EXACT


def test_the_peak_is_the_first_moment_that_reaches_it_and_names_the_users_line():
    result = dry_run_of_trace(
        trace(
            alloc(0, 1024, BACKWARD, stack=-1),
            *free(0, 1024),
            alloc(0, 1024),
            marks=[Mark(1, MarkKind.FORWARD, 0)],
        )
    )
    place = result.peak_place
    assert (place.phase, place.module, place.op, place.line) == (
        Phase.BACKWARD,
        "head",
        "MmBackward0",
        "train.py:3",
    )
    assert place.step == 1


def test_steps_count_once_something_other_than_setup_happens():
    assert dry_run_of_trace(trace(alloc(0, 512, SETUP))).peak_place.step == 0
    assert dry_run_of_trace(trace(alloc(0, 512, FORWARD))).peak_place.step == 1
    later = trace(alloc(0, 512, FORWARD), alloc(512, 512, SETUP), marks=step_ends(2))
    assert dry_run_of_trace(later).peak_place.step == 2


def test_a_leak_is_what_outlives_a_step_in_bytes_requested():
    # Each step keeps 100 bytes of line 3, and reallocates line 7's: 512 bytes, then 520, then 1,500.
    leaking = trace(
        alloc(0, 100),
        alloc(512, 512, stack=2),
        *free(512, 512),
        alloc(512, 100),
        alloc(1024, 520, stack=2),
        *free(1024, 520),
        alloc(1024, 100),
        alloc(1536, 1500, stack=2),
        marks=step_ends(3, 7, 11),
    )
    assert dry_run_of_trace(leaking).growth == Growth(None, 100, "train.py:3", leak=True)


def test_a_pool_captured_in_the_last_steps_is_not_a_leak():
    events = [
        Event(Action.SEGMENT_ALLOC, BASE + 2 * MIB, 2 * MIB, label=FORWARD),
        alloc(0, 1000),
        *(alloc(2 * MIB + at, 512) for at in (0, 512, 1024)),
    ]
    run = trace(*events, marks=step_ends(3, 4, 5))
    second = dataclasses.replace(run.segments[0], address=BASE + 2 * MIB)
    run = dataclasses.replace(run, segments=(*run.segments, second))
    assert dry_run_of_trace(run).growth == Growth(None, 512, "train.py:3", leak=True)
    captured = (run.segments[0], dataclasses.replace(second, pool=(0, 1)))
    assert dry_run_of_trace(dataclasses.replace(run, segments=captured)).growth == Growth(
        1, 0, "", leak=False
    )


def test_batches_of_varying_size_are_not_a_leak():
    varying = trace(
        alloc(0, 100), *free(0, 100), alloc(0, 200), *free(0, 200), alloc(0, 450), marks=step_ends(2, 5, 8)
    )
    assert dry_run_of_trace(varying).growth == Growth(None, 250, "", leak=False)


def test_steady_names_the_first_of_the_equal_steps():
    steady = trace(alloc(0, 100), alloc(512, 100), alloc(1024, 1), *free(1024, 1), marks=step_ends(2, 3, 6))
    assert dry_run_of_trace(steady).growth == Growth(2, 0, "", leak=False)


def test_a_shrinking_step_is_not_steady():
    shrinking = trace(alloc(0, 100), *free(0, 100), marks=step_ends(2, 4))
    assert dry_run_of_trace(shrinking).growth == Growth(None, -100, "", leak=False)


@pytest.mark.parametrize("ends", [(), (2,)])
def test_growth_needs_more_than_one_step(ends):
    assert dry_run_of_trace(trace(alloc(0, 100), marks=step_ends(*ends))).growth.steady_from is None


def oom(size, available):
    return Event(Action.OOM, available, size, label=FORWARD, stack=0)


def test_the_last_failure_is_reported_if_it_ended_the_script():
    failed = trace(
        oom(4 * MIB, MIB), oom(30 * MIB, 3 * MIB), end=ScriptEnd("out of memory", 1, "OutOfMemoryError")
    )
    result = dry_run_of_trace(failed)
    assert result.verdict == "out of memory"
    assert result.out_of_memory.requested == 30 * MIB
    assert result.out_of_memory.shortfall == 27 * MIB
    assert result.out_of_memory.place.line == "train.py:3"


def test_expandable_segments_grow_by_whole_handles():
    """Of 18 MiB free, 16 are not enough: a handle has 20."""
    failed = trace(oom(16 * MIB, 18 * MIB), end=ScriptEnd("out of memory", 1, "OutOfMemoryError"))
    expandable = dataclasses.replace(failed, settings={"conf": "expandable_segments:True"})
    assert dry_run_of_trace(failed).out_of_memory.shortfall == 0
    assert dry_run_of_trace(expandable).out_of_memory.shortfall == 2 * MIB


def test_the_first_failure_is_reported_if_the_script_continued():
    result = dry_run_of_trace(trace(oom(4 * MIB, MIB), oom(30 * MIB, 3 * MIB), end=ScriptEnd("end", 0)))
    assert result.verdict == "does not fit"
    assert result.out_of_memory.requested == 4 * MIB
    assert result.out_of_memory.shortfall == 19 * MIB  # of the 20 MiB segment that 4 MiB are cut from


def test_a_script_that_recovers_needs_what_it_used_after_its_last_failure():
    attempts = (alloc(0, MIB), oom(30 * MIB, MIB), *free(0, MIB), oom(8 * MIB, MIB))
    events = (*attempts, alloc(0, 512), *free(0, 512))
    recovered = dry_run_of_trace(trace(*events, marks=step_ends(1 + len(events))))
    assert (recovered.verdict, recovered.caught, recovered.steps) == ("fits", 2, 1)
    assert recovered.peak_allocated == 512
    assert recovered.out_of_memory.requested == 30 * MIB
    too_early = dry_run_of_trace(trace(*events, marks=step_ends(1)))
    assert (too_early.verdict, too_early.caught) == ("does not fit", 0)
    assert too_early.peak_allocated == MIB


def test_what_a_failed_attempt_held_is_no_part_of_what_the_next_one_needs():
    """It is freed only after the failure, while the exception leaves the attempt's functions."""
    attempt = (alloc(0, MIB), alloc(MIB, 1024), oom(30 * MIB, MIB))
    events = (*attempt, *free(MIB, 1024), *free(0, MIB), alloc(0, 512), *free(0, 512))
    recovered = dry_run_of_trace(trace(*events, marks=step_ends(1 + len(events))))
    assert (recovered.verdict, recovered.caught) == ("fits", 1)
    assert recovered.peak_allocated == 512


def test_what_failed_attempts_left_cached_does_not_make_a_fit_tight():
    """They fill a GPU of any size; PyTorch releases its cache when memory is short."""
    events = (alloc(0, MIB), oom(30 * MIB, MIB), *free(0, MIB), alloc(0, 512), *free(0, 512))
    found = trace(*events, marks=step_ends(1 + len(events)))
    full = found.device.context.bytes + 2 * MIB  # the context and the only segment
    for caught, total, expected in (
        (True, full, "fits"),
        (True, found.device.context.bytes, "tight"),
        (False, full, "does not fit"),
    ):
        device = replace(found.device, total=replace(found.device.total, bytes=total))
        device = replace(device, context=replace(device.context, provenance=Provenance.MEASURED))
        marks = step_ends(1 + len(events)) if caught else ()
        result = dry_run_of_trace(replace(found, device=device, marks=marks))
        assert (result.verdict, result.peak_process.bytes) == (expected, full)


def test_steps_before_a_caught_failure_count():
    """A script that skips a batch which is too large needs what its other steps used."""
    step = (alloc(0, MIB), *free(0, MIB))
    attempt = (alloc(0, 2 * MIB), oom(30 * MIB, MIB), *free(0, 2 * MIB))
    last = (alloc(0, 512), *free(0, 512))
    marks = step_ends(1 + len(step), 1 + len(step + attempt + last))
    recovered = dry_run_of_trace(trace(*step, *attempt, *last, marks=marks))
    assert (recovered.verdict, recovered.caught, recovered.steps) == ("fits", 1, 2)
    assert recovered.peak_allocated == MIB


def test_a_workspace_that_did_not_fit_is_no_failure_of_the_script():
    workspace = oom(30 * MIB, MIB)._replace(category=Category.WORKSPACE)
    events = alloc(0, 512), workspace, alloc(512, 1024), *free(512, 1024)
    result = dry_run_of_trace(trace(*events, marks=step_ends(len(events))))
    assert (result.verdict, result.caught, result.out_of_memory) == ("fits", 0, None)
    (note,) = result.notes
    assert note.text.startswith("1 of the workspaces that cuDNN suggested did not fit.")


def test_a_counter_that_disagrees_is_noted():
    agreeing = trace(alloc(0, 100), statistics={"allocated_bytes.all.peak": 512})
    assert dry_run_of_trace(agreeing).notes == ()
    differing = trace(alloc(0, 100), statistics={"allocated_bytes.all.peak": 1024})
    assert "1,024" in dry_run_of_trace(differing).notes[0].text


def test_a_script_without_steps_is_noted():
    (note,) = dry_run_of_trace(trace(alloc(0, 100), end=ScriptEnd("end", 0))).notes
    assert "no training step" in note.text


def test_figures_are_at_most_as_certain_as_their_sizes():
    read = Note(Provenance.ASSUMED, "a value was read")
    sized = Note(Provenance.ASSUMED, "a size was taken at its upper bound", sizes=True)
    weights = alloc(0, 100, category=Category.PARAMETER)
    for notes, expected in (((read,), "exact"), ((read, sized), "assumed")):
        found = {
            term.name: term.figure.provenance for term in dry_run_of_trace(trace(weights, notes=notes)).terms
        }
        assert {found[name] for name in ("activations", "allocated", "reserved")} == {expected}
        assert found["parameters"] == "exact"
