"""Recording a step's operations, as a plan does, changes none of the values that the ghost knows."""

import pytest

from memfit import api

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


def test_no_step_of_a_grad_scaler_is_skipped_while_its_operations_are_recorded(tmp_path):
    script = tmp_path / "scaled.py"
    script.write_text(SCALED)
    plan = api.plan(script, budget=10 << 30)
    assert plan.as_written.allocated == api.dry_run(script).peak_allocated
