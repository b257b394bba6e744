"""What scripts feed their models, whole and in micro-batches, as two runs on the ghost show it."""

import textwrap

import pytest

from memfit.analysis.script_change import ScriptChange
from memfit.planning.same_samples import samples_of_parts
from memfit.planning.sample_independence import why_dependent
from memfit.run.options import RunOptions
from memfit.run.resolve_options import ghost_settings
from memfit.strategies.trial_run import run_trial

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("warm_scripts")]

BEGIN = """
    import sys
    import numpy as np
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, IterableDataset, TensorDataset

    size = int(sys.argv[-1]) if len(sys.argv) > 1 else 8
    token = nn.Embedding(100, 64)

    def train(model, batches):
        model.cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for x, y in batches:
            optimizer.zero_grad()
            model(x.cuda()).flatten(0, -2).sub(y.cuda().flatten()[:, None]).square().mean().backward()
            optimizer.step()
"""
LOADER = """
    data = TensorDataset(torch.randn(64, 16), torch.randn(64, 1))
    order = np.random.permutation(64)
    train(nn.Sequential(nn.Linear(16, 64), nn.GELU()), DataLoader(data, size, sampler=order))
"""
AUGMENTED = """
    class Noisy(TensorDataset):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x + torch.randn(16, generator=torch.Generator().manual_seed(size)), y
    data = Noisy(torch.randn(64, 16), torch.randn(64, 1))
    train(nn.Sequential(nn.Linear(16, 64), nn.GELU()), DataLoader(data, batch_size=size))
"""
DRAWN_ANEW = """
    x, y = torch.randn(64, 16), torch.randn(64, 1)
    chosen = (np.random.permutation(64)[:size] for _ in range(12))
    train(nn.Sequential(nn.Linear(16, 64), nn.GELU()), ((x[some], y[some]) for some in chosen))
"""
ON_GPU = """
    x, y = torch.randn(256, 16).cuda(), torch.randn(256, 1).cuda()
    train(nn.Sequential(nn.Linear(16, 64), nn.GELU()), zip(x.split(size), y.split(size)))
"""
MADE_ON_GPU = """
    draw = lambda *shape: torch.randn(*shape, device="cuda")
    train(nn.Sequential(nn.Linear(16, 64), nn.GELU()), ((draw(size, 16), draw(size, 1)) for _ in range(12)))
"""
CORPUS = """
    corpus = torch.arange(2048).remainder(100)
    columns = corpus.reshape(size, -1).t().contiguous()
    {to_gpu}
    parts = ((columns[i:i + 4], columns[i + 1:i + 5]) for i in range(0, 32, 4))
    train(nn.Sequential(token, nn.Linear(64, 64)), ((x, y.float()) for x, y in parts))
"""
SEQUENCE_FIRST = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.token = token
            self.layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first={batch_first})
        def forward(self, x):
            return self.layer(self.token(x))
    data = torch.randint(100, (12, 8, 5))
    batches = (part for whole in data for part in whole.split(size))
    batches = ((x.t().contiguous() if {transposed} else x, x.float()) for x in batches)
    train(Model(), batches)
"""
RECURRENT = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.rnn = token, nn.LSTM(64, 64, batch_first={batch_first})
        def forward(self, x):
            return self.rnn(self.token(x))[0]
    data = torch.randint(100, (12, 8, 5))
    train(Model(), ((x, x.float()) for whole in data for x in whole.split(size)))
"""
CARRIED = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.rnn = token, nn.LSTM(64, 64, batch_first=True)
        def forward(self, x, state=None):
            return self.rnn(self.token(x), state)
    model, state = Model().cuda(), None
    optimizer = torch.optim.AdamW(model.parameters())
    for x in torch.randint(100, (12, 8, 5)).split(size, 1):
        for part in x:
            result, state = model(part.cuda(), state)
            state = tuple(each.detach() for each in state)
            result.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
"""
REMEMBERED = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)
            {begin}
        def forward(self, x):
            memory = self.memory
            y = self.linear(x if memory is None else x + memory)
            self.memory = y.detach()
            return y
    data = TensorDataset(torch.randn(64, 16), torch.randn(64, 1))
    train(Model(), DataLoader(data, batch_size=size))
"""


def compared(folder, script):
    """Run a script with whole batches and with halves; return what their samples and operations show."""
    path = folder / "train.py"
    path.write_text(textwrap.dedent(BEGIN) + textwrap.dedent(script))

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
