"""``memfit plan`` on a script that compiles its model: the plan fits when it is carried out."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from support import warm_process

pytestmark = pytest.mark.process

SCRIPT = """
    import sys
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        def forward(self, x):
            return x + self.down(nn.functional.gelu(self.up(x)))

    model = nn.Sequential(*(Block(256) for _ in range(4))).cuda()
    if len(sys.argv) > 1:
        import memfit
        memfit.apply(model, sys.argv[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model)
    while True:
        optimizer.zero_grad()
        inputs = torch.randn(32768, 256, device="cuda")
        nn.functional.mse_loss(compiled(inputs), inputs).backward()  # the loss is not compiled
        optimizer.step()
"""
BUDGET = "1.2GiB"


def memfit(*arguments, **environment):
    if not environment:
        return warm_process.memfit(*arguments)
    command = [sys.executable, "-m", "memfit", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=400, env=os.environ | environment
    )


def peak(result):
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)["peak"]


@pytest.mark.slow
def test_a_plan_of_a_compiled_script_is_carried_out_by_memfit_and_by_the_script(tmp_path):
    script, plan = tmp_path / "train.py", tmp_path / "plan.json"
    script.write_text(textwrap.dedent(SCRIPT))
    done = memfit("plan", "--budget", BUDGET, "-o", plan, script)
    assert done.returncode == 0, done.stderr
    assert "torch._functorch.config.activation_memory_budget = " in done.stdout
    found = json.loads(plan.read_text())
    assert 0 < found["plan"]["compilation"]["activation_memory_budget"] < 1
    assert found["needs"]["bytes"] <= found["budget"] < found["as_written"]["needs"]["bytes"]
    written = peak(memfit("dry-run", "--json", "-", script))["allocated"]
    assert found["as_written"]["allocated"] == written  # memfit's hooks are not compiled
    assert 1.0 < found["time"] < 1.4
    conf = {"PYTORCH_ALLOC_CONF": found["allocator"]}
    ours = peak(memfit("dry-run", "--memory", BUDGET, "--plan", plan, "--json", "-", script))
    own = peak(memfit("dry-run", "--memory", BUDGET, "--json", "-", script, plan, **conf))
    assert ours["process"] == own["process"] <= found["budget"]
