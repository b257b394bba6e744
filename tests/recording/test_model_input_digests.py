"""What scripts feed their models, whole and in micro-batches, as two runs on the ghost show it."""

import pytest

from memfit.planning.carry_out_in_slices import dimension_of_samples
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


def steps(path):
    """Run a script with whole batches and with halves; return what steps of both record."""

    def run(*arguments, parts=1):
        options = RunOptions()
        divided = DividedBatches(parts, 1, "", "") if parts > 1 else None
        change = Change(operations=True, arguments=arguments, micro_batches=divided)
        run = ScriptRun((str(path),), options, resolve_ghost_settings(options), change)
        result = run_trial(run, lambda _: None)
        return result.operations

    return run(), run("4", parts=2)


def compared(folder, script):
    """Return what the samples and the operations of a script show."""
    path = folder / "train.py"
    write(path, script)
    whole, parts = steps(path)
    return compare_steps_of_parts(whole, parts, 2, independent=True), why_samples_depend(whole, parts)


STATEFUL = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.rnn = token, nn.LSTM(64, 64)
        def forward(self, x, state):
            result, state = self.rnn(self.token(x), state)
            return result.flatten(0, 1), state
    model, criterion = Model().cuda(), nn.MSELoss()
    state = [torch.zeros(1, size, 64, device="cuda") for _ in range(2)]
    optimizer = torch.optim.AdamW(model.parameters())
    for x in torch.arange(640).remainder(100).reshape(size, -1).t().split(5):
        result, state = model(x.cuda(), [each.detach() for each in state])
        criterion(result, torch.zeros_like(result)).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_state_that_the_script_passes_is_divided_with_the_batch_in_the_model_s_call(tmp_path):
    """As in word_language_model: the loop must not divide such batches, and slices along dimension 1 may."""
    path = tmp_path / "train.py"
    write(path, STATEFUL)
    whole, parts = steps(path)
    assert "a step goes on from what the one before made" in why_samples_depend(whole, parts)
    assert why_samples_depend(whole, parts, in_model=True) == ""
    assert dimension_of_samples(whole.samples, parts.samples, 2) == 1


@pytest.mark.parametrize(
    "begin",
    [
        pytest.param("self.memory = None", marks=pytest.mark.slow),
        "self.memory = torch.zeros(size, 16).cuda()",
    ],
)
def test_state_that_the_model_keeps_is_not(tmp_path, begin):
    path = tmp_path / "train.py"
    write(path, REMEMBERED.format(begin=begin))
    assert "a step goes on from" in why_samples_depend(*steps(path), in_model=True)


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(LOADER, marks=pytest.mark.slow),
        ON_GPU,
        SEQUENCE_FIRST.format(batch_first=False, transposed=True),
    ],
)
def test_parts_of_the_same_batches_are_seen(tmp_path, script):
    """A script that seeds nothing draws the same in both runs; sequences may come first."""
    samples, dependent = compared(tmp_path, script)
    assert (samples.why, samples.assumed, dependent) == ("", "", "")


@pytest.mark.parametrize(
    "script", [*(pytest.param(each, marks=pytest.mark.slow) for each in (AUGMENTED, PADDED)), MIXED]
)
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
    ("script", "random"),
    [
        (MADE_ON_GPU, True),
        (LOADER.replace("nn.MSELoss()", "lambda y, z: (y - z + torch.randn_like(y)).square().mean()"), True),
        (LOADER.replace("nn.GELU()", "nn.Dropout(0.5)"), False),
        pytest.param(AUGMENTED, False, marks=pytest.mark.slow),
    ],
    ids=["a loop's noise", "a loss's noise", "dropout", "on the CPU"],
)
def test_numbers_that_the_gpu_draws_outside_of_the_model_are_seen(tmp_path, script, random):
    path = tmp_path / "train.py"
    write(path, script)
    assert [each.samples.random for each in steps(path)] == [random, random]


@pytest.mark.parametrize(
    "script",
    [
        CORPUS.format(to_gpu=""),
        pytest.param(CORPUS.format(to_gpu="columns = columns.cuda()"), marks=pytest.mark.slow),
        pytest.param(LOADED_CORPUS, marks=pytest.mark.slow),
    ],
    ids=["on the CPU", "on the GPU", "by a loader"],
)
def test_a_corpus_that_is_cut_by_the_batch_size_has_other_rows(tmp_path, script):
    samples, _ = compared(tmp_path, script)
    assert "the script makes other rows" in samples.why


def test_samples_that_are_drawn_anew_are_others(tmp_path):
    samples, _ = compared(tmp_path, DRAWN_ANEW)
    assert "the script makes other rows" in samples.why


@pytest.mark.parametrize(
    "script",
    [
        CARRIED,
        pytest.param(REMEMBERED.format(begin="self.memory = None"), marks=pytest.mark.slow),
        pytest.param(
            REMEMBERED.format(begin="self.register_buffer('memory', torch.zeros(size, 16))"),
            marks=pytest.mark.slow,
        ),
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
    [
        pytest.param(SEQUENCE_FIRST.format(batch_first=True, transposed=False), marks=pytest.mark.slow),
        RECURRENT.format(batch_first=True),
    ],
    ids=["attention", "LSTM"],
)
def test_batches_before_sequences_are_independent(tmp_path, script):
    samples, dependent = compared(tmp_path, script)
    assert (samples.assumed, dependent) == ("", "")
