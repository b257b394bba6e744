"""Recording a step's operations, as a plan does, changes none of the values that the ghost knows."""

import pytest

import memfit

pytestmark = pytest.mark.process

SCALED = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).cuda()
optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda")
for _ in range(4):
    with torch.autocast("cuda", torch.float16):
        loss = model(torch.randn(8, 256, device="cuda")).float().sum()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 65536.0  # no step was skipped
"""


TOKENS = """
import argparse, torch
from torch import nn
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
batch = parser.parse_args().batch_size
model = nn.Sequential(nn.Embedding(512, 256), nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 512)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    text = torch.randint(512, (batch, 513)).to("cuda")
    logits = model(text[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_what_the_ghost_computes_of_small_integers_is_no_operation_of_the_step(tmp_path):
    """A batch of 8 has 4,104 tokens, too many to know; with half the samples, the ghost knows each."""
    script = tmp_path / "tokens.py"
    script.write_text(TOKENS)
    plan = memfit.plan(script, budget=618 << 20)
    assert plan.undivided == ""
    assert plan.in_loop.change.parts == 2


def test_no_step_of_a_grad_scaler_is_skipped_while_its_operations_are_recorded(tmp_path):
    script = tmp_path / "scaled.py"
    script.write_text(SCALED)
    plan = memfit.plan(script, budget=10 << 30)
    assert plan.as_written.allocated == memfit.dry_run(script).peak_allocated
