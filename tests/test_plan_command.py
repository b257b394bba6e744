"""``memfit plan`` on scripts: the plan fits when it is carried out, by memfit and by the script itself."""

import json
import textwrap

import pytest

from memfit import plan
from support import warm_process
from support.new_processes import run_python
from support.scripts import FEED_FORWARD

pytestmark = pytest.mark.process

MODEL = f"""{FEED_FORWARD}
    import sys
    model = nn.Sequential(*(Block(256, DROPOUT) for _ in range(BLOCKS))).cuda()
    if len(sys.argv) > 1:
        import memfit
        memfit.apply(model, sys.argv[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
SCRIPT = (
    MODEL.replace("DROPOUT", "0.1").replace("BLOCKS", "8")
    + """
    while True:
        optimizer.zero_grad()
        model(torch.randn(32768, 256, device="cuda")).square().mean().backward()
        optimizer.step()
"""
)
COMPILED = (
    MODEL.replace("DROPOUT", "0.0").replace("BLOCKS", "4")
    + """
    compiled = torch.compile(model)
    while True:
        optimizer.zero_grad()
        inputs = torch.randn(32768, 256, device="cuda")
        nn.functional.mse_loss(compiled(inputs), inputs).backward()  # the loss is not compiled
        optimizer.step()
"""
)
BUDGET = "1.6GiB"


def memfit(*arguments, **environment):
    if not environment:
        return warm_process.memfit(*arguments)
    return run_python("-m", "memfit", *arguments, timeout=400, **environment)


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


def test_a_setting_that_does_not_exist_is_named(tmp_path):
    script, wrong = tmp_path / "train.py", tmp_path / "wrong.json"
    script.write_text(textwrap.dedent(SCRIPT))
    wrong.write_text('{"plan": {"batch_slices": {"cnt": 2}}}')
    done = run_python("-m", "memfit", "dry-run", "--plan", wrong, script)  # before PyTorch is imported
    assert done.returncode == 3
    assert "'cnt' is not a field of batch_slices. Nearest: count" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_compiled_function_that_is_never_called_does_not_count(tmp_path):
    """As in bitsandbytes, which transformers' Trainer imports."""
    script = tmp_path / "train.py"
    library = "@torch.compile\ndef quantize(x):\n    return x.round()\n\n\n"
    script.write_text(textwrap.dedent(SCRIPT).replace("class Block", f"{library}class Block"))
    done = memfit("plan", "--budget", BUDGET, script)
    assert done.stdout.startswith("PLAN FOUND   needs "), done.stdout
    assert "Recomputed in the backward:" in done.stdout


SMALL = """
    import torch
    from torch import nn
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.RMSNorm(64), nn.Linear(64, 64), nn.Linear(64, 64)
        def forward(self, x):
            return x + self.down(nn.functional.silu(self.up(self.norm(x))))
    model = nn.Sequential(nn.Embedding(1000, 64), *(Block() for _ in range(40)), nn.Linear(64, 1000)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        text = torch.randint(1000, (64, 128), device="cuda")
        nn.functional.cross_entropy(model(text).flatten(0, 1), text.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.slow
def test_where_the_host_limits_a_step_freer_plans_are_no_slower_than_bit_for_bit_ones(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SMALL))
    free, bitwise = (
        plan(script, gpu="H100", budget=int(1.1 * 2**30), bitwise=each) for each in (False, True)
    )
    assert free.chosen.time <= bitwise.chosen.time + 0.005
    assert not free.is_tight


def peak(result):
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)["peak"]


@pytest.mark.slow
def test_a_plan_of_a_compiled_script_is_carried_out_by_memfit_and_by_the_script(tmp_path):
    budget, script, plan = "1.2GiB", tmp_path / "train.py", tmp_path / "plan.json"
    script.write_text(textwrap.dedent(COMPILED))
    done = memfit("plan", "--budget", budget, "-o", plan, script)
    assert done.returncode == 0, done.stderr
    assert "torch._functorch.config.activation_memory_budget = " in done.stdout
    found = json.loads(plan.read_text())
    assert 0 < found["plan"]["compilation"]["activation_memory_budget"] < 1
    assert found["needs"]["bytes"] <= found["budget"] < found["as_written"]["needs"]["bytes"]
    written = peak(memfit("dry-run", "--json", "-", script))["allocated"]
    assert found["as_written"]["allocated"] == written  # memfit's hooks are not compiled
    assert 1.0 < found["time"] < 1.4
    conf = {"PYTORCH_ALLOC_CONF": found["allocator"]}
    ours = peak(memfit("dry-run", "--memory", budget, "--plan", plan, "--json", "-", script))
    own = peak(memfit("dry-run", "--memory", budget, "--json", "-", script, plan, **conf))
    assert ours["process"] == own["process"] <= found["budget"]
