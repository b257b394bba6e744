"""Which advice is given: cheapest first, at least one percent saved, until the run fits."""

from dataclasses import replace

import pytest

from memfit.analysis.advice import ScriptChange, TrialResult, find_advice, find_total
from memfit.analysis.allocator_comparison import compare_settings
from memfit.analysis.summary import summarize
from memfit.cli.console import exit_code
from memfit.records import (
    Action,
    Category,
    DeviceUse,
    Figure,
    Label,
    Mark,
    MarkKind,
    Phase,
    Provenance,
    ScriptEnd,
    Trace,
)
from support.traces import BASE, Event, freed, segment, trace_of

MIB = 1 << 20
CONTEXT = Figure(100 * MIB, Provenance.ASSUMED, "a table")
STEPS = ScriptEnd("steps", 0)
FAILED = ScriptEnd("exception", 1, "FileExistsError: outdir", "train.py:3")
LABELS = (Label(Phase.BACKWARD, "", "", -1), Label(Phase.OPTIMIZER, "", "", -1))


def device(total):
    """Return a device with ``total`` MiB."""
    return DeviceUse("A100-80GB", Figure(total * MIB, Provenance.EXACT), CONTEXT, 0)


def trace(  # noqa: PLR0913 - each test sets one or two
    size,
    *,
    phase=0,
    category=Category.ACTIVATION,
    cached=0,
    released=False,
    oom=False,
    end=STEPS,
    total=80 << 10,
    conf="",
):
    """Return a run that holds ``size`` MiB at its peak.

    Before the peak, the allocator has ``cached`` MiB in blocks too small for it; it keeps them, or releases
    them if ``released``.
    """
    history, segments = [], []
    for index, mib in enumerate((cached, size)):
        if mib:
            address, block = BASE + (index << 40), mib * MIB
            segments.append(segment(address, block))
            history.append(Event(Action.SEGMENT_ALLOC, address, block, label=phase))
            history.append(Event(Action.ALLOC, address, block, label=phase, category=category))
            history += freed(address, block, label=phase) if index == 0 else []
        if released and index == 0:
            history.append(Event(Action.SEGMENT_FREE, address, block, label=phase))
            segments.clear()
    history += [Event(Action.OOM, 0, 1 << 30, label=phase)] * oom
    settings = {"conf": conf, "environment": conf}
    return trace_of(history, segments, labels=LABELS, device=device(total), end=end, settings=settings)


def advice_for(first, *others):
    """Return the answer and the changes tried; each trial results in the next of ``others``."""
    results, tried = list(others), []

    def run(change, _what):
        tried.append(change)
        result = results.pop(0)
        if result is KeyboardInterrupt:
            raise result
        return TrialResult(result, ("Net",)) if isinstance(result, Trace) else result

    answer = find_advice(first, summarize(first), run)
    assert not results
    return answer, tried


def rows(answer):
    """Return each piece of advice: what, MiB saved, MiB then needed, whether the run fits."""
    return [
        (piece.what, piece.saves.bytes // MIB, piece.needs.bytes // MIB, piece.fits)
        for piece in answer.advice
    ]


def test_each_saving_is_relative_to_the_advice_before_it():
    answer, tried = advice_for(trace(400), trace(300), trace(50))
    assert rows(answer) == [
        ("checkpoint the repeated blocks", 100, 400, True),
        ("offload activations", 250, 150, True),
    ]
    assert [change.strategies for change in tried] == [("checkpointing",), ("checkpointing", "offload")]
    assert (answer.in_all.bytes, answer.untried) == (500 * MIB, None)


def test_advice_names_the_models_it_applies_to():
    results = iter((TrialResult(trace(300), ("Net",)), TrialResult(trace(100), ("Net", "Net"))))
    first = trace(400)
    assert [piece.how for piece in find_advice(first, summarize(first), lambda *_: next(results)).advice] == [
        "memfit.apply(model, [memfit.Checkpointing()])  # after creating Net",
        "memfit.apply(model, [memfit.Checkpointing(), memfit.Offload()])  # after creating each of Net, Net",
    ]


def test_changes_that_save_under_one_percent_or_fail_are_skipped():
    answer, tried = advice_for(trace(400), trace(396), trace(390), FAILED)
    assert rows(answer) == [("offload activations", 10, 490, True)]
    assert answer.untried == FAILED
    both = ("offload", "checkpointing")
    assert [change.strategies for change in tried] == [("checkpointing",), ("offload",), both]
    answer, _ = advice_for(trace(400), FAILED, ScriptEnd("end", 3))
    assert (answer.advice, answer.untried) == ((), FAILED)


@pytest.mark.parametrize(("total", "pieces"), [(450, 1), (300, 2), (600, 2)])
def test_advice_ends_once_the_run_fits(total, pieces):
    results = [trace(300), trace(50)][:pieces]
    answer, _ = advice_for(trace(400, total=total), *results)
    assert len(answer.advice) == pieces
    assert answer.advice[-1].fits is True


def test_a_peak_in_the_optimizer_suggests_a_fused_one():
    temporaries = {"phase": 1, "category": Category.TEMPORARY}
    answer, (change,) = advice_for(trace(400, **temporaries), trace(200, **temporaries))
    assert rows(answer) == [("fused optimizer", 200, 300, True)]
    assert change.fused


PARAMETERS = {"category": Category.PARAMETER}


def test_settings_are_replayed_not_run():
    """Expandable segments reuse the cached memory. Settings already in force stay."""
    answer, tried = advice_for(trace(400, cached=300, conf="max_split_size_mb:128", **PARAMETERS))
    assert rows(answer) == [("expandable segments", 300, 500, True)]
    assert answer.advice[0].how == "PYTORCH_ALLOC_CONF=max_split_size_mb:128,expandable_segments:True"
    assert tried == []


def test_settings_already_in_force_are_not_advised():
    assert advice_for(trace(400, cached=300, conf="expandable_segments:True", **PARAMETERS))[0].advice == ()


def test_the_cost_of_settings_is_that_of_their_driver_calls():
    """A script that empties its cache each step maps its segments again each step."""
    history, marks = [], []
    blocks = [(BASE, 300 * MIB), (BASE + (1 << 40), 400 * MIB)]
    for step in range(3):
        for block in blocks:
            history += [Event(Action.SEGMENT_ALLOC, *block), Event(Action.ALLOC, *block), *freed(*block)]
        history += [Event(Action.SEGMENT_FREE, *block) for block in blocks]
        marks.append(Mark(len(history), MarkKind.TRAINING_STEP, step))
    first = trace_of(history, marks=tuple(marks), device=device(80 << 10), end=STEPS)
    before, after = (
        row.seconds_per_step for row in compare_settings(first, "expandable_segments:True").outcomes
    )
    assert after - before > 0.5e-3
    (piece,) = advice_for(first)[0].advice
    assert piece.costs == f"{1000 * (after - before):.1f} ms per step (assumed) in driver calls"
    answer, _ = advice_for(trace(400, cached=300, **PARAMETERS))
    assert answer.advice[0].costs == "an unknown amount of time: fewer than two steps completed"


def test_at_most_three_pieces_of_advice():
    """Four changes would help; the last would be offloading."""
    answer, tried = advice_for(trace(800, cached=300, phase=1), trace(700), trace(600))
    assert [piece.what for piece in answer.advice] == [
        "expandable segments",
        "fused optimizer",
        "checkpoint the repeated blocks",
    ]
    assert tried[0].conf == tried[1].conf == "expandable_segments:True"


def test_the_next_change_targets_the_remaining_peak():
    answer, tried = advice_for(trace(400, phase=1), trace(200, category=Category.PARAMETER))
    assert [piece.what for piece in answer.advice] == ["fused optimizer"]
    assert len(tried) == 1


@pytest.mark.parametrize(
    "end", [ScriptEnd("exception", 1), ScriptEnd("interrupted", 130), ScriptEnd("end", 3)]
)
def test_an_interrupted_run_gets_no_advice_and_is_not_rerun(end):
    answer, tried = advice_for(trace(400, end=end))
    assert (answer.advice, answer.in_all, answer.untried, tried) == ((), None, end, [])


def test_an_interrupted_run_that_does_not_fit_is_not_rerun_either():
    found = summarize(trace(200, oom=True, end=ScriptEnd("interrupted", 130), total=300))
    assert found.verdict == "does not fit"
    assert find_total(found, None) is found


@pytest.mark.parametrize("end", [STEPS, ScriptEnd("out of memory", 1)])
def test_a_run_out_of_memory_is_first_rerun_with_unlimited_memory(end):
    """Even if the script caught the exception: it may have done less since."""
    short = trace(200, oom=True, end=end, total=300)
    answer, tried = advice_for(short, trace(400), trace(150))
    assert rows(answer) == [("checkpoint the repeated blocks", 250, 250, True)]
    assert tried[0] == ScriptChange()
    assert answer.in_all.bytes == 500 * MIB
    assert (answer.verdict, answer.peak_reserved) == (summarize(short).verdict, 200 * MIB)
    answer, _ = advice_for(short, FAILED)
    assert (answer.advice, answer.in_all, answer.untried) == ((), None, FAILED)
    assert find_advice(short, summarize(short)).advice == ()


def test_an_interrupt_keeps_the_advice_found_so_far():
    answer, _ = advice_for(trace(400), trace(300), KeyboardInterrupt)
    assert rows(answer) == [("checkpoint the repeated blocks", 100, 400, True)]
    assert answer.untried == ScriptEnd("interrupted", 130)
    assert exit_code(answer, fail=False) == 130
    assert exit_code(replace(answer, untried=FAILED), fail=False) == 0


def test_a_trace_that_cannot_be_replayed_gives_the_reason():
    answer, tried = advice_for(trace(400, conf="backend:cudaMallocAsync"))
    assert (answer.advice, tried) == ((), [])
    assert "the run used backend:cudaMallocAsync" in answer.untried.exception


def test_figures_carry_their_provenance():
    first = trace(400, cached=300, total=0)
    (piece,) = find_advice(first, summarize(first)).advice
    assert (piece.saves.provenance, piece.needs.provenance) == (Provenance.SIMULATED, Provenance.ASSUMED)
    assert piece.fits is None
    (piece,) = advice_for(trace(400), trace(200, **PARAMETERS))[0].advice
    assert piece.saves.provenance is Provenance.EXACT
    *_, last = advice_for(trace(400, cached=300), trace(300), trace(100))[0].advice
    # The trial ran without the settings; a replay adds them.
    assert last.saves.provenance is Provenance.SIMULATED


def test_a_peak_that_no_run_reached_is_simulated():
    """When memory was short, the cache was released; with unlimited memory it is kept."""
    first = trace(4000, cached=2, released=True, total=4101)
    answer, _ = advice_for(first, trace(200, **PARAMETERS))
    (piece,) = answer.advice
    assert (answer.in_all.bytes, piece.saves.bytes) == (4120 * MIB, 3820 * MIB)
    assert piece.saves.provenance is Provenance.SIMULATED
