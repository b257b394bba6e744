"""Losses of an unmodified script are scaled as a loop with ``torch.amp.GradScaler`` scales them."""

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.process

SCRIPT = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17, growth_interval=4, enabled=OWN)
    for step in range(12):
        optimizer.zero_grad()
        for _ in range(2):  # micro-batches
            x = torch.randn(16, 32) * (1000 if step == 5 else 1)  # float16 overflows in the forward
            with torch.autocast("cpu", torch.float16, enabled=OWN):
                out = model(x)
            loss = out.float().square().mean() * (1e5 if step == 7 else 1)  # and in the backward
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        print(step, loss.item().hex(), norm.item().hex())
"""
PLAN = '{"plan": {"precision": {"dtype": "fp16", "loss_scale": SCALE}}}'
GROWING = PLAN.replace("SCALE", '{"init_scale": 131072.0, "growth_interval": 4}')
STATIC = PLAN.replace("SCALE", '{"mode": "static", "init_scale": 1024.0}')


@pytest.fixture
def lines(tmp_path):
    """Return a function that returns what the script prints, as written or trained under a plan."""

    def run(own, plan=None):
        file = tmp_path / "train.py"
        file.write_text(textwrap.dedent(SCRIPT).replace("OWN", str(own)))
        (tmp_path / "plan.json").write_text(plan or "")
        under = ["-m", "memfit", "train", "--plan", str(tmp_path / "plan.json")] if plan else []
        done = subprocess.run(
            [sys.executable, *under, file], capture_output=True, text=True, check=True, cwd=tmp_path
        )
        return done.stdout.splitlines()

    return run


def test_training_is_that_of_a_loop_with_a_grad_scaler_bit_for_bit(lines):
    by_hand = lines(own=True)
    assert len(by_hand) == 12
    assert [line.split()[2] for line in by_hand].count("nan") == 2  # updates that are left out
    assert lines(own=False, plan=GROWING) == by_hand


@pytest.mark.slow
def test_a_script_with_its_own_scaler_scales_losses_once(lines):
    assert lines(own=True, plan=GROWING) == lines(own=True)


@pytest.mark.slow
def test_a_static_scale_stays_and_leaves_out_what_is_not_finite(lines):
    norms = [float.fromhex(line.split()[2]) for line in lines(own=False, plan=STATIC)]
    scaled = [float.fromhex(line.split()[2]) for line in lines(own=True)]
    assert norms[:5] == pytest.approx(scaled[:5], rel=0.05)
    assert norms[5] != norms[5]  # not finite: no update
    assert all(0 < norm < 100 for norm in norms[8:])
