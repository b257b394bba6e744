"""What scripts feed their models, whole and in micro-batches, as two runs on the ghost show it."""

import pytest

from memfit.planning.sample_independence import compare_steps_of_parts, why_samples_depend
from memfit.records import Change, DividedBatches
from memfit.run.options import RunOptions
from memfit.run.resolve_ghost_settings import resolve_ghost_settings
from memfit.trials.script_standbys import ScriptRun
from memfit.trials.trial_run import run_trial
from support.fed_scripts import (
    AUGMENTED,
    BASELINE,
    CARRIED,
    CENTERED,
    CORPUS,
    DRAWN_ANEW,
    LOADED_CORPUS,
    LOADER,
    MADE_ON_GPU,
    MIXED,
    MIXED_ON_GPU,
    ON_GPU,
    PADDED,
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
        divided = DividedBatches(parts, 1, "", "") if parts > 1 else None
        change = Change(operations=True, arguments=arguments, micro_batches=divided)
        run = ScriptRun((str(path),), options, resolve_ghost_settings(options), change)
        result = run_trial(run, lambda _: None)
        return result.operations

    whole, parts = run(), run("4", parts=2)
    return compare_steps_of_parts(whole, parts, 2, independent=True), why_samples_depend(whole, parts)


@pytest.mark.parametrize(
    "script", [LOADER, ON_GPU, SEQUENCE_FIRST.format(batch_first=False, transposed=True)]
)
def test_parts_of_the_same_batches_are_seen(tmp_path, script):
    """A script that seeds nothing draws the same in both runs; sequences may come first."""
    samples, dependent = compared(tmp_path, script)
    assert (samples.why, samples.assumed, dependent) == ("", "", "")


@pytest.mark.parametrize("script", [AUGMENTED, PADDED, MIXED])
def test_a_loader_s_samples_may_have_other_contents(tmp_path, script):
    samples, _ = compared(tmp_path, script)
    assert samples.why == ""
    assert "augmented at random, padded to another length, or mixed with each other" in samples.assumed


@pytest.mark.parametrize("script", [MADE_ON_GPU, MIXED_ON_GPU])
def test_what_the_gpu_makes_is_not_seen(tmp_path, script):
    samples, _ = compared(tmp_path, script)
    assert samples.why == ""
    assert "the GPU makes what the model is passed" in samples.assumed


@pytest.mark.parametrize(
    "script",
    [CORPUS.format(to_gpu=""), CORPUS.format(to_gpu="columns = columns.cuda()"), LOADED_CORPUS],
    ids=["on the CPU", "on the GPU", "by a loader"],
)
def test_a_corpus_that_is_cut_by_the_batch_size_has_other_rows(tmp_path, script):
    samples, _ = compared(tmp_path, script)
    assert "other rows than the whole batch" in samples.why


def test_samples_that_are_drawn_anew_are_others(tmp_path):
    samples, _ = compared(tmp_path, DRAWN_ANEW)
    assert "other rows than the whole batch" in samples.why


@pytest.mark.parametrize(
    "script",
    [
        CARRIED,
        REMEMBERED.format(begin="self.memory = None"),
        REMEMBERED.format(begin="self.register_buffer('memory', torch.zeros(size, 16))"),
        CENTERED,
        BASELINE,
    ],
    ids=["by the script", "by the model", "by a buffer", "a mean of the model's", "a mean of the script's"],
)
def test_state_that_goes_from_step_to_step_is_seen(tmp_path, script):
    _, dependent = compared(tmp_path, script)
    assert "a step goes on from what the one before made of its samples" in dependent


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
    assert samples.assumed == ""
    assert "samples are combined with each other" in dependent


@pytest.mark.parametrize(
    "script",
    [SEQUENCE_FIRST.format(batch_first=True, transposed=False), RECURRENT.format(batch_first=True)],
    ids=["attention", "LSTM"],
)
def test_batches_before_sequences_are_independent(tmp_path, script):
    samples, dependent = compared(tmp_path, script)
    assert (samples.assumed, dependent) == ("", "")
