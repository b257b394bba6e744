"""What scripts feed their models, whole and in micro-batches, as two runs on the ghost show it."""

import pytest

from memfit.analysis.script_change import ScriptChange
from memfit.planning.same_samples import samples_of_parts
from memfit.planning.sample_independence import why_dependent
from memfit.run.options import RunOptions
from memfit.run.resolve_options import ghost_settings
from memfit.strategies.trial_run import run_trial
from support.fed_scripts import (
    AUGMENTED,
    CARRIED,
    CORPUS,
    DRAWN_ANEW,
    LOADER,
    MADE_ON_GPU,
    ON_GPU,
    RECURRENT,
    REMEMBERED,
    SEQUENCE_FIRST,
    write,
)

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("warm_scripts")]


def compared(folder, script):
    """Run a script with whole batches and with halves; return what their samples and operations show."""
    path = folder / "train.py"
    write(path, script)

    def run(*arguments, parts=1):
        options = RunOptions()
        change = ScriptChange(operations=True, arguments=arguments, micro_batches=parts)
        result = run_trial((str(path),), options, ghost_settings(options), change, lambda _: None)
        return result.operations

    whole, parts = run(), run("4", parts=2)
    return samples_of_parts(whole, parts, 2), why_dependent(whole, parts)


@pytest.mark.parametrize(
    "script", [LOADER, ON_GPU, SEQUENCE_FIRST.format(batch_first=False, transposed=True)]
)
def test_parts_of_the_same_batches_are_seen(tmp_path, script):
    """A script that seeds nothing draws the same in both runs; sequences may come first."""
    samples, dependent = compared(tmp_path, script)
    assert (samples.why, samples.seen, samples.draws, dependent) == ("", True, False, "")


def test_a_loader_s_samples_may_be_augmented(tmp_path):
    samples, _ = compared(tmp_path, AUGMENTED)
    assert (samples.why, samples.seen, samples.draws) == ("", True, True)


def test_what_the_gpu_makes_is_not_seen(tmp_path):
    samples, _ = compared(tmp_path, MADE_ON_GPU)
    assert (samples.why, samples.seen) == ("", False)


@pytest.mark.parametrize("to_gpu", ["", "columns = columns.cuda()"])
def test_a_corpus_that_is_cut_by_the_batch_size_has_other_rows(tmp_path, to_gpu):
    samples, _ = compared(tmp_path, CORPUS.format(to_gpu=to_gpu))
    assert "other rows than the whole batch" in samples.why


def test_samples_that_are_drawn_anew_are_others(tmp_path):
    samples, _ = compared(tmp_path, DRAWN_ANEW)
    assert "other rows than the whole batch" in samples.why


def test_state_that_the_script_carries_is_seen(tmp_path):
    samples, _ = compared(tmp_path, CARRIED)
    assert "goes on from what it returned in the step before" in samples.why


@pytest.mark.parametrize(
    "begin", ["self.memory = None", "self.register_buffer('memory', torch.zeros(size, 16))"]
)
def test_state_that_the_model_carries_is_seen(tmp_path, begin):
    _, dependent = compared(tmp_path, REMEMBERED.format(begin=begin))
    assert "the model goes on from what an earlier step has left in it" in dependent


@pytest.mark.parametrize(
    "script",
    [
        SEQUENCE_FIRST.format(batch_first=False, transposed=False),
        RECURRENT.format(batch_first=False),
    ],
    ids=["attention", "LSTM"],
)
def test_batches_in_place_of_sequences_are_combined(tmp_path, script):
    """nn.Transformer and nn.LSTM take sequences first by default, whatever they are passed."""
    samples, dependent = compared(tmp_path, script)
    assert samples.seen
    assert "samples are combined with each other" in dependent


@pytest.mark.parametrize(
    "script",
    [SEQUENCE_FIRST.format(batch_first=True, transposed=False), RECURRENT.format(batch_first=True)],
    ids=["attention", "LSTM"],
)
def test_batches_before_sequences_are_independent(tmp_path, script):
    samples, dependent = compared(tmp_path, script)
    assert (samples.seen, dependent) == (True, "")
