"""``memfit plan`` on a script that holds little but parameters, gradients and the optimizer's state."""

import json
import textwrap

import pytest

from support import warm_process

pytestmark = [pytest.mark.process, pytest.mark.warm]

SCRIPT = """
    import sys
    import torch
    from torch import nn

    torch.manual_seed(0)
    width = 32 if "--narrow" in sys.argv else 2048
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(12))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    if "--apply" in sys.argv:
        import memfit
        memfit.apply(model, sys.argv[-1], optimizer=optimizer)
    while True:
        batch = torch.randn(512, width, device="cuda")
        optimizer.zero_grad()
        (model(batch) - batch).square().mean().backward()
        if "--clip" in sys.argv:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
"""
HELD = 4 * 12 * (2048 * 2048 + 2048) * 4
"""Bytes of parameters, gradients and the two moments of AdamW."""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    file = tmp_path_factory.mktemp("plan") / "train.py"
    file.write_text(textwrap.dedent(SCRIPT))
    return file


def planned(folder, script, *options, arguments=()):
    """Plan, and return the plan's file, its contents and what was printed."""
    file = folder / "plan.json"
    done = warm_process.memfit("plan", *options, "-o", file, script, *arguments)
    assert done.returncode == 0, done.stderr
    return file, json.loads(file.read_text()), done.stdout


def peak(*arguments):
    done = warm_process.memfit("dry-run", "--json", "-", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["peak"]


def verified(plan, script, *arguments):
    done = warm_process.verify_on_cpu("--plan", plan, "--json", "-", script, "--narrow", *arguments)
    found = json.loads(done.stdout)
    assert found["planned"] == {"parameters": 24, "equal": 24, "largest": 0.0, "parameter": ""}
    return found["verdict"], found["equality"]


@pytest.mark.slow
def test_a_budget_below_what_the_optimizer_needs_is_kept_bit_for_bit(script, tmp_path):
    file, found, printed = planned(tmp_path, script, "--bitwise", "--budget", "1.35GiB")
    assert found["plan"] == {"optimizer_state": {"step_in_backward": True}}
    assert found["equality"] == "bit for bit"
    assert 1 < found["time"] < 1.2  # small kernels for each parameter instead of one for many
    assert "recomputed" not in printed  # an update alone allocates more than the budget
    assert f'memfit.apply(model, "{file}", optimizer=optimizer)  # before its first step' in printed
    under_plan = peak("--plan", file, script)
    assert under_plan["allocated"] == found["allocated"]
    outside = under_plan["process"] - under_plan["reserved"]  # the CUDA context
    assert found["needs"]["bytes"] <= found["budget"]
    assert found["needs"]["bytes"] < HELD + outside
    assert peak(script, "--apply", file)["allocated"] == found["allocated"]
    assert verified(file, script) == ("verified", "bit for bit")


@pytest.mark.slow
def test_a_script_that_clips_gradients_gets_another_plan_and_the_reason(script, tmp_path):
    clips = ("--clip",)
    file, found, printed = planned(tmp_path, script, "--bitwise", "--budget", "1.35GiB", arguments=clips)
    line = (
        textwrap.dedent(SCRIPT)
        .splitlines()
        .index("        nn.utils.clip_grad_norm_(model.parameters(), 1.0)")
        + 1
    )
    assert f"clip_grad_norm_ (train.py:{line}) uses gradients that backward has already used" in printed
    assert found["plan"] == {"optimizer_state": {"offload": True}}
    assert found["equality"] == "bit for bit"
    assert found["bound"] == found["time"] > 1.1  # the state is copied to the host and back for each update
    assert peak("--plan", file, script, *clips)["allocated"] == found["allocated"]
    assert verified(file, script, *clips) == ("verified", "bit for bit")
    other = file.with_name("other.json")
    other.write_text(json.dumps({"plan": {"optimizer_state": {"step_in_backward": True}}}))
    refused = warm_process.memfit("dry-run", "--plan", other, script, *clips)
    assert refused.returncode == 2
    assert "The plan does not suit" in refused.stderr
    assert f"clip_grad_norm_ (train.py:{line})" in refused.stderr


@pytest.mark.slow
def test_fewer_bits_only_where_they_are_allowed(script, tmp_path):
    _, found, printed = planned(
        tmp_path, script, "--allow", "8bit", "--budget", "1.15GiB", arguments=("--clip",)
    )
    assert found["plan"] == {"optimizer_state": {"bits": 8, "backend": "bitsandbytes"}}
    assert found["equality"] == "other numerics"
    assert found["time"] < 1  # the update moves a quarter of the moments' bytes
    assert "The optimizer's state has 8 bits (bitsandbytes)." in printed
