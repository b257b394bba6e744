"""No plan needs less than the floor, and below the floor nothing but the script as written runs."""

from pathlib import Path

import pytest

import memfit
from memfit.planning.plan_search_base import PlanSearch
from memfit.trials import trial_run

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("warm_scripts")]

CLIPPED = """
import argparse, torch
from torch import nn
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64)
batch = parser.parse_args().batch_size
model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(6))).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    loss = model(torch.randn(16 * batch, 1024, device="cuda")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
"""
NORMALIZED = """
import torch
from torch import nn
blocks = [nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()) for _ in range(4)]
model = nn.Sequential(nn.Conv2d(3, 64, 1), *blocks, nn.Flatten(), nn.Linear(64 * 32 * 32, 100)).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
for _ in range(4):
    loss = model(torch.randn(64, 3, 32, 32, device="cuda")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
ATTENTION = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
model = nn.Sequential(nn.Embedding(8192, 256), nn.TransformerEncoder(layer, 3), nn.Linear(256, 8192)).cuda()
optimizer = torch.optim.Adam(model.parameters())
for (tokens,) in DataLoader(TensorDataset(torch.randint(8192, (64, 128))), 16):
    loss = nn.functional.cross_entropy(model(tokens.cuda()).flatten(0, 1), tokens.flatten().cuda())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
PERCEPTRON = """
import torch
from torch import nn
blocks = [nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)) for _ in range(6)]
model = nn.Sequential(*blocks).cuda()
optimizer = torch.optim.AdamW(model.parameters())
while True:
    model(torch.randn(4096, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
TRAINER = """
import tempfile, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
tokens = [{"input_ids": each, "labels": each} for each in torch.randint(500, (256, 64))]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(folder, per_device_train_batch_size=32, max_steps=8, report_to="none")
    model = GPT2LMHeadModel(GPT2Config(vocab_size=500, n_layer=2, n_head=4, n_embd=256))
    Trainer(model=model, args=arguments, train_dataset=tokens).train()
"""
MLP = (Path(__file__).parents[1] / "examples" / "mlp.py").read_text()


@pytest.fixture
def runs(monkeypatch):
    """Return the changes under which scripts were run, whole or from a fork."""
    made = []
    run_once = trial_run._run_once

    def noted(run, *arguments):
        made.append(run.change)
        return run_once(run, *arguments)

    monkeypatch.setattr(trial_run, "_run_once", noted)
    return made


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(MLP, marks=pytest.mark.slow),
        PERCEPTRON,
        pytest.param(TRAINER, marks=pytest.mark.slow),
    ],
    ids=["mlp", "perceptron", "trainer"],
)
def test_just_below_the_floor_the_script_runs_once(tmp_path, runs, text):
    script = tmp_path / "train.py"
    script.write_text(text)
    floor = memfit.plan(script, budget=514 << 20).floor.bytes
    found = memfit.plan(script, budget=floor - (1 << 20))
    assert (found.chosen, found.floor.bytes) == (None, floor)
    assert len(runs) == 2
    assert str(found).startswith("NO PLAN FITS   every plan needs at least")


@pytest.fixture
def searches(monkeypatch):
    """Return the searches that have answered."""
    found = []
    answer = PlanSearch._answer

    def noted(self, *arguments, **more):
        found.append(self)
        return answer(self, *arguments, **more)

    monkeypatch.setattr(PlanSearch, "_answer", noted)
    return found


@pytest.mark.parametrize(
    "text",
    [CLIPPED, *(pytest.param(each, marks=pytest.mark.slow) for each in (NORMALIZED, ATTENTION))],
    ids=["clipped", "normalized", "attention"],
)
def test_no_plan_needs_less_than_its_floor(tmp_path, searches, text):
    script = tmp_path / "train.py"
    script.write_text(text)
    hopeless = memfit.plan(script, budget=514 << 20)
    assert (searches[-1]._runs.count, hopeless.chosen) == (0, None)
    assert "every plan needs at least" in str(hopeless)
    floor, needs = hopeless.floor.bytes, hopeless.as_written.needs.bytes
    found = memfit.plan(script, budget=int(floor + 0.3 * (needs - floor)))
    assert found.tried
    assert floor <= found.budget
    floors = searches[-1]._bases.floors
    for run in (found.as_written, *found.tried):
        assert floor <= floors.under(run.change).needs.bytes <= run.needs.bytes


def test_a_change_that_the_script_refuses_raises_the_floor(tmp_path, searches):
    script = tmp_path / "train.py"
    script.write_text(CLIPPED)
    gradients = 6 * (4 << 20)
    floor = memfit.plan(script, budget=514 << 20).floor.bytes
    found = memfit.plan(script, budget=floor + gradients // 4)
    assert (found.chosen, searches[-1]._runs.count) == (None, 1)
    assert found.floor.bytes > floor + (7 << 20)  # the state of one of the largest parameters
    assert "clip_grad_norm_" in found.dropped[0]
