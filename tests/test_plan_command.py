"""``memfit plan`` on scripts: the plan fits when it is carried out, by memfit and by the script itself."""

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
            self.dropout = nn.Dropout(0.1)
        def forward(self, x):
            return x + self.dropout(self.down(nn.functional.gelu(self.up(x))))

    model = nn.Sequential(*(Block(256) for _ in range(8))).cuda()
    if len(sys.argv) > 1:
        import memfit
        memfit.apply(model, sys.argv[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        optimizer.zero_grad()
        model(torch.randn(32768, 256, device="cuda")).square().mean().backward()
        optimizer.step()
"""
BUDGET = "1.6GiB"


def memfit(*arguments, **environment):
    if not environment:
        return warm_process.memfit(*arguments)
    command = [sys.executable, "-m", "memfit", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=240, env=os.environ | environment
    )


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    script, plan = folder / "train.py", folder / "plan.json"
    script.write_text(textwrap.dedent(SCRIPT))
    done = memfit("plan", "--budget", BUDGET, "-o", plan, script)
    return script, plan, done


def test_the_plan_is_printed_with_what_it_needs_and_costs(planned):
    _, plan, done = planned
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("PLAN FOUND   needs ")
    assert "Recomputed in the backward:" in done.stdout
    found = json.loads(plan.read_text())
    assert found["needs"]["bytes"] <= found["budget"] < found["as_written"]["needs"]["bytes"]
    assert 1.0 < found["bound"] <= found["time"] < 1.4


@pytest.mark.slow
def test_a_limit_of_time_refuses_what_is_slower_and_the_page_shows_it(planned, tmp_path):
    script, plan, _ = planned
    page, unwritten = tmp_path / "plan.html", tmp_path / "plan.json"
    limits = ("--budget", BUDGET, "--max-slowdown", "1")
    done = memfit("plan", *limits, "--fail", "--html", page, "-o", unwritten, script)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("NO PLAN FITS   within 1 times the time; one that needs ")
    assert not unwritten.exists()
    text = page.read_text()
    time = json.loads(plan.read_text())["time"]
    assert f"{time:.3f}x" in text
    assert "checkpoint every block" in text  # as --chart


def test_a_dry_run_under_the_plan_needs_what_the_plan_says(planned):
    script, plan, _ = planned
    found = json.loads(plan.read_text())
    done = memfit("dry-run", "--memory", BUDGET, "--plan", plan, "--json", "-", script)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["verdict"] in ("fits", "tight")
    assert result["command"] == [str(script)]
    assert result["peak"]["process"] <= found["budget"]
    assert result["peak"]["allocated"] == found["allocated"]


def test_the_script_that_applies_the_plan_itself_allocates_what_the_plan_says(planned):
    script, plan, _ = planned
    found = json.loads(plan.read_text())
    own = memfit("dry-run", "--json", "-", script, plan, PYTORCH_ALLOC_CONF=found["allocator"])
    assert json.loads(own.stdout)["peak"]["allocated"] == found["allocated"]


def test_a_plan_for_another_model_is_refused_by_name(planned, tmp_path):
    script, _, _ = planned
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"plan": {"checkpointing": {"regions": [{"modules": ["layers.0"]}]}}}))
    done = memfit("dry-run", "--plan", other, script)
    assert done.returncode == 2
    assert "The plan does not suit" in done.stderr
    assert "'layers.0'" in done.stderr


@pytest.mark.slow
def test_a_compiled_function_that_is_never_called_does_not_count(tmp_path):
    """As in bitsandbytes, which transformers' Trainer imports."""
    script = tmp_path / "train.py"
    library = "@torch.compile\ndef quantize(x):\n    return x.round()\n\n\n"
    script.write_text(textwrap.dedent(SCRIPT).replace("class Block", f"{library}class Block"))
    done = memfit("plan", "--budget", BUDGET, script)
    assert done.stdout.startswith("PLAN FOUND   needs "), done.stdout
    assert "Recomputed in the backward:" in done.stdout
