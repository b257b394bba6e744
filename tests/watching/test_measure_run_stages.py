"""Stages that are measured while the run goes on, against those of the same marks when it is over."""

import itertools

import pytest

from memfit.records import MarkKind, Stage
from memfit.watching import measure_run_stages
from memfit.watching.measure_run_stages import RunStageMeter
from memfit.watching.prediction import StepMemory
from support.stage_marks import LETTERS, NAMES, ORDERS

STAGES = {letter: stage for letter, stage in NAMES.items() if stage is not Stage.SETUP}


class Run:
    """A run by hand: marks by their letters, what is allocated between them, and "r" for a reset."""

    def __init__(self, *, gradients=True):
        self.peak = self.allocated = self.reads = 0
        self.kept = []
        self.stages = RunStageMeter(self.read, lambda: gradients)

    def read(self):
        self.reads += 1
        return StepMemory(self.peak, self.allocated)

    def go(self, *moments):
        """Return the stages after the setup."""
        found = []
        for moment in moments:
            if isinstance(moment, int):
                self.allocated = moment
                self.peak = max(self.peak, moment)
                continue
            for letter in moment:
                if letter == "s":
                    found += self.stages.complete_step(self.read())
                elif letter == "r":
                    self.stages.add(MarkKind.RESET_PEAK, 0)
                    self.peak = self.allocated
                else:
                    self.stages.add(*LETTERS[letter])
                self.kept.append(len(self.stages._marks))
        found += self.stages.finish(self.read(), ran_out=False)
        return found[1:] if found[0].stage is Stage.SETUP else found


@pytest.mark.parametrize(("marks", "stages"), ORDERS)
def test_stages_are_those_of_the_analysis(marks, stages):
    expected = [STAGES[letter] for letter, _ in itertools.groupby(stages.replace("-", ""))]
    assert [each.stage for each in Run().go(marks)] == expected


def test_the_middle_of_a_pass_does_not_change_its_stage():
    found = Run().go("bfws" * 9, "bfwse", "BfvBfvE", "bfws" * 9, "BfBf", "BfE", "bfws" * 9, "e", "dt")
    assert [each.stage for each in found] == [STAGES[letter] for letter in "TVTVTS"]
    assert [each.steps for each in found] == [10, 0, 9, 0, 9, 0]


def test_passes_go_on_from_one_step_to_the_next():
    found = Run().go("bbfwsbfwsbefws", "bbfwsbfws", "BBfvBEfvdt", "befws")  # accelerate reads one batch ahead
    assert [each.stage for each in found] == [STAGES[letter] for letter in "TVST"]
    assert Run().go("Bfvbs", "fws")[-1].stage is Stage.TRAINING  # a batch is read before a step is complete


@pytest.mark.parametrize(
    ("evaluation", "reset", "peaks"),
    [
        (300, "", [(200, 200), (300, 300), (100, 300)]),
        (150, "", [(200, 200), (120, 200), (100, 200)]),  # all that is known is that it is not higher
        (150, "r", [(200, 200), (150, 150), (200, 200)]),
    ],
)
def test_the_peak_of_a_stage_is_known_where_it_raises_that_of_the_run(evaluation, reset, peaks):
    training = ("bf", 200, "w", 100, "s", reset)
    run = Run().go(*training, "Bfv", evaluation, 120, "E", reset, *training)
    assert [(each.peak.low, each.peak.high) for each in run] == peaks
    assert [each.allocated for each in run] == [100, 120, 100]


@pytest.mark.parametrize(
    ("marks", "gradients", "reads"),
    [
        ("bfws", True, 0),
        ("bfwfws", True, 0),
        ("fws", True, 0),
        ("bfwsBfv", False, 1),  # not after a step, whose counters have been read
        ("Bfv", False, 0),
        ("fv", False, 0),  # a text that is generated
        ("Bfm", True, 0),
        ("fm", True, 1),  # the next forward may train
    ],
)
def test_counters_are_read_where_a_stage_may_begin_only(marks, gradients, reads):
    run = Run(gradients=gradients)
    run.go(marks)
    few = run.reads
    run = Run(gradients=gradients)
    run.go(marks * 11)
    assert run.reads - few == 10 * (reads + marks.count("s"))


def test_marks_of_a_long_evaluation_are_bounded(monkeypatch):
    monkeypatch.setattr(measure_run_stages, "MOST_MARKS", 5000)
    run = Run()
    found = run.go("bf", 200, "ws", "Bfv" * 4000, "Bfv", 300, "BfvdBfv" * 2000, 150, "EBfv", "bf", 200, "ws")
    assert max(run.kept) <= 5000
    assert [each.stage for each in found] == [STAGES[letter] for letter in "TVT"]
    assert [each.peak.high for each in found] == [200, 300, 300]
    assert found[1].peak.low == 300
    assert found[1].allocated == 150
