"""Which advice is given, and when it ends: cheapest first, what saves a hundredth, until the run fits."""

import pytest

from memfit.analysis.advice import advice
from memfit.analysis.peak import summarize
from memfit.records import Action, Category, DeviceUse, Figure, Label, Phase, Provenance, ScriptEnd
from traces import BASE, Event, freed, segment, trace_of

MIB = 1 << 20
CONTEXT = Figure(100 * MIB, Provenance.ASSUMED, "a table")
DEVICE = DeviceUse("A100-80GB", Figure(80 << 30, Provenance.EXACT), CONTEXT, 0)
STEPS = ScriptEnd("steps", 0)
LABELS = (Label(Phase.BACKWARD, "", "", -1), Label(Phase.OPTIMIZER, "", "", -1))


def trace(size, *, phase=0, category=Category.ACTIVATION, cached=0, end=STEPS):
    """Return a run that holds so many MiB at its peak, after it has cached others that do not serve it."""
    history, segments = [], []
    for index, mib in enumerate((cached, size)):
        if mib:
            address, block = BASE + (index << 40), mib * MIB
            segments.append(segment(address, block))
            history.append(Event(Action.SEGMENT_ALLOC, address, block, label=phase))
            history.append(Event(Action.ALLOC, address, block, label=phase, category=category))
            history += freed(address, block, label=phase) if index == 0 else []
    return trace_of(history, segments, labels=LABELS, device=DEVICE, end=end)


def given(first, *others, total=80 << 30, **more):
    """Return what is advised where each thing tried leads to one of some traces, or fails if that is None."""
    results, tried = list(others), []

    def run(candidate):
        tried.append(candidate.change)
        return results.pop(0)

    found = advice(first, summarize(first), total, run, **more)
    assert not results
    return [(one.what, one.saves.bytes // MIB, one.needs.bytes // MIB, one.fits) for one in found], tried


def test_each_saves_beyond_those_above_it():
    found, tried = given(trace(400), trace(300), trace(50))
    assert found == [
        ("checkpoint the repeated blocks", 100, 400, True),
        ("offload activations", 250, 150, True),
    ]
    assert [change.strategies for change in tried] == [("checkpointing",), ("checkpointing", "offload")]


def test_what_saves_less_than_a_hundredth_or_fails_is_passed_over():
    found, tried = given(trace(400), trace(396), trace(390), None)
    assert found == [("offload activations", 10, 490, True)]
    both = ("offload", "checkpointing")
    assert [change.strategies for change in tried] == [("checkpointing",), ("offload",), both]
    assert given(trace(400), None, None)[0] == []


@pytest.mark.parametrize(("total", "pieces"), [(450, 1), (300, 2), (600, 2)])
def test_it_ends_when_the_run_fits_that_did_not(total, pieces):
    results = [trace(300), trace(50)][:pieces]
    found, _ = given(trace(400), *results, total=total * MIB)
    assert len(found) == pieces
    assert found[-1][-1] is True


def test_a_peak_in_the_optimizer_asks_for_a_fused_one():
    temporaries = {"phase": 1, "category": Category.TEMPORARY}
    found, (change,) = given(trace(400, **temporaries), trace(200, **temporaries))
    assert found == [("fused optimizer", 200, 300, True)]
    assert change.fused


def test_settings_are_replayed_not_run():
    """Expandable segments grow into what was cached."""
    parameters = {"category": Category.PARAMETER}
    found, tried = given(trace(400, cached=300, **parameters))
    assert found == [("expandable segments", 300, 500, True)]
    assert tried == []


def test_at_most_three():
    """Of four that help: the last would be to offload."""
    found, tried = given(trace(800, cached=300, phase=1), trace(700), trace(600))
    assert [one[0] for one in found] == [
        "expandable segments",
        "fused optimizer",
        "checkpoint the repeated blocks",
    ]
    assert tried[0].conf == tried[1].conf == "expandable_segments:True"


def test_what_is_tried_next_is_about_the_peak_that_is_left():
    found, tried = given(trace(400, phase=1), trace(200, category=Category.PARAMETER))
    assert [one[0] for one in found] == ["fused optimizer"]
    assert len(tried) == 1


@pytest.mark.parametrize("reason", ["out of memory", "exception", "interrupted"])
def test_half_a_run_gets_none(reason):
    assert given(trace(400, end=ScriptEnd(reason, 1))) == ([], [])


def test_figures_say_how_sure_they_are():
    first = trace(400, cached=300)
    (one,) = advice(first, summarize(first), 0)
    assert (one.saves.provenance, one.needs.provenance) == (Provenance.SIMULATED, Provenance.ASSUMED)
    assert one.fits is None
    (run, *_) = advice(trace(400), summarize(trace(400)), 0, lambda _: trace(200))
    assert run.saves.provenance is Provenance.EXACT
