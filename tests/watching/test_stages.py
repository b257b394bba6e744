"""A run that evaluates and saves, watched beside the prediction of a shortened one."""

import re
from pathlib import Path

import pytest

from memfit.records import Action, Mark
from memfit.watching.measure_run_stages import RunStageMeter
from memfit.watching.prediction import Prediction, StepMemory
from memfit.watching.prediction_comparison import PredictionComparer
from support.stage_marks import LETTERS
from support.traces import BASE, freed, trace_of

EXAMPLE = (Path(__file__).parents[2] / "examples" / "whole_run.py").read_text()
REAL = """
    import gc, runpy, sys
    import memfit, torch
    for mistake in ([], ["--mistake", "saving"], ["--mistake", "evaluation"]):
        sys.argv[1:] = ["--epochs", "2", "--samples", "384", *mistake]
        with memfit.watch("run.memfit"):
            runpy.run_path("example.py", run_name="__main__")
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
    print("limited", file=sys.stderr)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.005)
    try:
        with memfit.watch("run.memfit"):
            runpy.run_path("example.py", run_name="__main__")
    except torch.OutOfMemoryError:
        sys.exit()
"""
SOURCE = "(predicted: exact on the ghost)"
SEEN = f"""\
step 12 · peak 181.6 MiB measured · 181.6 MiB predicted · +0.00 % {SOURCE}
stage            predicted           measured
training         181.6 MiB          181.6 MiB  +0.00 %
evaluation       161.6 MiB  at most 181.6 MiB
saving           148.5 MiB  at most 181.6 MiB
training, later  181.6 MiB  at most 181.6 MiB
saving 1: peak 247.8 MiB measured, 148.5 MiB predicted, +66.80 % {SOURCE}
step 12 · peak 247.8 MiB measured · 181.6 MiB predicted · +36.42 % {SOURCE}
stage            predicted           measured
training         181.6 MiB          181.6 MiB  +0.00 %
evaluation       161.6 MiB  at most 247.8 MiB
saving           148.5 MiB          247.8 MiB  +66.80 %
training, later  181.6 MiB  at most 247.8 MiB
evaluation 1: peak 701.0 MiB measured, 161.6 MiB predicted, +333.90 % {SOURCE}
step 12 · peak 701.0 MiB measured · 181.6 MiB predicted · +285.95 % {SOURCE}
stage            predicted           measured
training         181.6 MiB          181.6 MiB  +0.00 %
evaluation       161.6 MiB          701.0 MiB  +333.90 %
saving           148.5 MiB  at most 701.0 MiB
training, later  181.6 MiB  at most 701.0 MiB
"""


@pytest.mark.slow
@pytest.mark.warm
def test_stages_are_compared_with_their_prediction(dry_run, rehearse):
    predicted = dry_run(EXAMPLE, "--epochs", "2", options=("--whole", "-o", "run.memfit"))
    assert predicted.answer["steps"] == 6
    (predicted.folder / "example.py").write_text(EXAMPLE)
    done = rehearse(REAL)
    assert done.returncode == 0, done.stderr
    seen, _, limited = done.stderr.partition("limited\n")
    lines = [line for line in seen.splitlines() if line.startswith("memfit: ")]
    assert lines == [f"memfit: {line}" for line in SEEN.splitlines()]
    assert re.search(
        r"^memfit: out of memory: .* in evaluation · forward · [\d.]+ · example.py:", limited, re.MULTILINE
    )
    assert re.search(r"^memfit: evaluation 1: peak .* measured, 161.6 MiB predicted", limited, re.MULTILINE)


MIB = 1 << 20
STEP = ("bf", 200, "w", 100, "s")
SECOND_STEP = ("bf", 210, "w", 100, "s")
TRAINING = (*STEP, *SECOND_STEP, "e")
PREDICTED = (*TRAINING, "Bfv", 150, 100, "E", *TRAINING, "dt", 130, 100)
"""A run that trains for two steps, evaluates, trains again and saves. Numbers are allocated MiB."""


def trace(*moments):
    """Return the trace of a run by hand, with one block at a time."""
    history, marks, held = [(Action.SEGMENT_ALLOC, BASE, 1024 * MIB)], [], 0
    for moment in moments:
        if isinstance(moment, str):
            marks += [Mark(len(history), *LETTERS[letter]) for letter in moment]
        else:
            history += [*(freed(BASE, held) if held else []), (Action.ALLOC, BASE, moment * MIB)]
            held = moment * MIB
    return trace_of(history, marks=tuple(marks))


def compared(*moments, predicted=PREDICTED):
    """Return what differs in a run by hand, and the table of its stages."""
    found, comparison = followed(*moments, predicted=predicted)
    return found, comparison.table()


def followed(*moments, predicted):
    """Return what differs in a run by hand, and its comparison with a predicted one."""
    now = StepMemory(0, 0)
    stages = RunStageMeter(lambda: now, lambda: True)
    comparison = PredictionComparer(Prediction.of(trace(*predicted)), stages)
    found, steps = [], 0
    for moment in moments:
        if isinstance(moment, int):
            now = StepMemory(max(now.peak, moment * MIB), moment * MIB)
            continue
        for letter in moment:
            if letter == "s":
                steps += 1
                found += comparison.step(steps, now)
            else:
                stages.add(*LETTERS[letter])
    return [*found, *comparison.finish(now, ran_out=False)], comparison


def test_a_longer_run_equals_its_prediction():
    epoch = (*STEP, *SECOND_STEP * 5, "e")
    found, table = compared(*epoch, *("Bfv", 150, 100) * 9, "E", *epoch, "dt", 130, 100)
    assert found == []
    assert table == [
        "stage            predicted           measured",
        "training         210.0 MiB          210.0 MiB  +0.00 %",
        "evaluation       150.0 MiB  at most 210.0 MiB",
        "training, later  210.0 MiB  at most 210.0 MiB",
        "saving           130.0 MiB  at most 210.0 MiB",
    ]


def test_a_step_is_compared_by_its_number_in_its_stage():
    epoch = (*STEP, *SECOND_STEP * 5, "e")
    early, _ = compared("bf", 205, "w", 100, "s", *SECOND_STEP * 5)
    assert early == ["step 1: peak 205.0 MiB measured, 200.0 MiB predicted, +2.50 %"]
    later, table = compared(*epoch, "Bfv", 300, 100, "E", *epoch, "Bfv", 310, 100, "E", *epoch)
    assert later == ["evaluation 1: peak 300.0 MiB measured, 150.0 MiB predicted, +100.00 %"]
    assert table[-1] == "saving           130.0 MiB                  -"
    higher, _ = compared(*epoch, "Bfv", 150, 100, "E", "bf", 230, "w", 100, "s")
    assert higher == ["step 7: peak 230.0 MiB measured, 200.0 MiB predicted, +15.00 %"]


def test_each_time_of_a_stage_has_its_own_prediction():
    first, second = ("Bfv", 250, 140, "E"), ("Bfv", 300, 140, "E")
    more = ("bf", 240, "w", 140, "s")
    predicted = (*TRAINING, *first, *more, *second, *more)
    found, _ = compared(*TRAINING, *first, *more * 3, *second, *more * 3, *second, *more, predicted=predicted)
    assert found == []
    found, _ = compared(*TRAINING, *second, *more, predicted=predicted)
    assert found == ["evaluation 1: peak 300.0 MiB measured, 250.0 MiB predicted, +20.00 %"]


def test_what_a_stage_leaves_behind_is_compared():
    found, table = compared(*TRAINING, "Bfv", 150, 120, "E", *TRAINING)
    left = "allocated at the end of the stage 120.0 MiB measured, 100.0 MiB predicted, +20.00 %"
    assert found == [f"evaluation 1: {left}"]
    assert compared(*TRAINING, "Bfv", 150, 120)[0] == []  # the run ended in it
    found, table = compared(*TRAINING, "Bfv", 190, 180, "E", *TRAINING)
    assert found[0].startswith(
        "evaluation 1: peak at least 180.0 MiB measured, 150.0 MiB predicted, +20.00 %;"
    )
    assert "evaluation       150.0 MiB  at least 180.0 MiB  +20.00 %" in table


def test_a_stage_that_needs_less_or_is_not_predicted():
    found, table = compared(
        *TRAINING, "Bfv", 150, 100, "E", predicted=(*TRAINING, "Bfv", 300, 100, "E", *TRAINING)
    )
    assert found == ["evaluation 1: peak at most 210.0 MiB measured, 300.0 MiB predicted, -30.00 %"]
    found, table = compared(*TRAINING, "dt", 300, 100, predicted=(*TRAINING, "Bfv", 150, 100, "E"))
    assert found == []
    assert table[2:] == [
        "saving              -  300.0 MiB",
        "evaluation  150.0 MiB          -",
    ]


def test_what_needs_less_does_not_silence_what_needs_more():
    rest = ("Bfv", 150, 100, "E")
    predicted = (*STEP, *SECOND_STEP, *rest, *STEP, *SECOND_STEP, *rest, *STEP)
    less, more = ("Bfv", 150, 90, "E"), ("Bfv", 150, 130, "E")
    found, _ = compared(*STEP, *SECOND_STEP, *less, *STEP, *SECOND_STEP, *more, *STEP, predicted=predicted)
    at_end = "allocated at the end of the stage"
    assert found == [
        f"evaluation 1: {at_end} 90.0 MiB measured, 100.0 MiB predicted, -10.00 %",
        f"evaluation 2: {at_end} 130.0 MiB measured, 100.0 MiB predicted, +30.00 %",
    ]


def test_what_follows_the_last_training_is_compared_with_what_does_so_in_the_trace():
    epoch = (*TRAINING, "Bfv", 150, 100, "E", "dt", 130, 100)
    predicted = (*epoch * 2, "Bfv", 300, 50, "E", "dt", 60, 20)
    assert compared(*epoch * 4, "Bfv", 300, 50, "E", "dt", 60, 20, predicted=predicted)[0] == []
    found, _ = compared(*epoch * 4, "Bfv", 400, 50, "E", predicted=predicted)
    assert found == ["evaluation 5: peak 400.0 MiB measured, 300.0 MiB predicted, +33.33 %"]


def test_the_peak_of_the_run_is_compared_with_the_peak_of_all_that_was_run():
    run = (*TRAINING, "dt", 300, 100)
    assert followed(*run, predicted=run)[1].expected.peak == 300 * MIB
    assert followed(*TRAINING, predicted=run)[1].expected.peak == 210 * MIB
