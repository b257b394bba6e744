"""No plan needs less than the floor, and below the floor nothing but the script as written runs."""

import pytest

from memfit import api
from memfit.planning import search
from memfit.planning.changes import PlanChange

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


@pytest.fixture
def searches(monkeypatch):
    """Return the searches that have answered."""
    found = []
    answer = search._PlanSearch._answer

    def noted(self, *arguments, **more):
        found.append(self)
        return answer(self, *arguments, **more)

    monkeypatch.setattr(search._PlanSearch, "_answer", noted)
    return found


@pytest.mark.parametrize("text", [CLIPPED, NORMALIZED, ATTENTION], ids=["clipped", "normalized", "attention"])
def test_no_plan_needs_less_than_its_floor(tmp_path, searches, text):
    script = tmp_path / "train.py"
    script.write_text(text)
    hopeless = api.plan(script, budget=514 << 20)
    assert (searches[-1]._runs.count, hopeless.chosen) == (0, None)
    assert "every plan needs at least" in str(hopeless)
    floor, needs = hopeless.floor.bytes, hopeless.as_written.needs.bytes
    found = api.plan(script, budget=int(floor + 0.3 * (needs - floor)))
    assert found.tried
    assert floor <= found.budget
    floors = searches[-1]._bases.floors
    for run in (found.as_written, *found.tried):
        assert floor <= floors.under(PlanChange(settings=run.settings)).needs.bytes <= run.needs.bytes


def test_a_change_that_the_script_refuses_raises_the_floor(tmp_path, searches):
    script = tmp_path / "train.py"
    script.write_text(CLIPPED)
    gradients = 6 * (4 << 20)
    floor = api.plan(script, budget=514 << 20).floor.bytes
    found = api.plan(script, budget=floor + gradients // 4)
    assert (found.chosen, searches[-1]._runs.count) == (None, 1)
    assert found.floor.bytes > floor + (7 << 20)  # the state of one of the largest parameters
    assert "clip_grad_norm_" in found.dropped[0]
