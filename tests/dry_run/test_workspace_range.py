"""A run whose convolutions want large workspaces: its peaks are a range, whose lower end is a run without."""

import re
import textwrap

import pytest

import memfit

pytestmark = pytest.mark.warm

MIB = 1 << 20
GROUPED = """
    import torch
    from torch import nn

    grouped = nn.Conv2d(528, 528, 3, stride=2, padding=1, groups=2)
    layers = nn.Sequential(nn.Conv2d(32, 528, 1), grouped).cuda()
    optimizer = torch.optim.SGD(layers.parameters(), 0.01)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = layers(torch.randn(16, 32, 56, 56, device="cuda")).float().mean()
        loss.backward()
        optimizer.step()
"""
TIMED = """
    import torch
    from torch import nn

    torch.backends.cudnn.benchmark = True
    grouped = nn.Conv2d(128, 128, 3, padding=1, groups=2)
    layers = nn.Sequential(nn.Conv2d(64, 128, 3, padding=1), grouped).cuda()
    for _ in range(3):
        layers(torch.randn(16, 64, 56, 56, device="cuda")).mean().backward()
"""


@pytest.mark.parametrize("script", [GROUPED, TIMED])
def test_the_lower_end_is_what_a_run_without_workspaces_reserves(dry_run, script):
    answer = dry_run(script, options=("--gpu", "H100-80GB")).answer
    bare = dry_run(script, options=("--gpu", "H100-80GB", "--workspaces", "none")).answer
    ends = answer["range"]["reserved"]
    assert answer["range"]["causes"] == ["workspaces"]
    assert ends == {"least": bare["peak"]["reserved"], "most": answer["peak"]["reserved"]}
    assert ends["most"] - ends["least"] > 50 * MIB
    assert bare["range"] is None


def test_the_terminal_names_both_ends_and_the_layers(dry_run):
    run = dry_run(GROUPED, options=("--gpu", "H100-80GB"))
    assert re.search(
        r"needs (0\.\d\d) to (?!\1)0\.\d\d GiB of 79\.18 GiB, takes (0\.\d\d) to (?!\2)0\.\d\d GiB   "
        r"leaves (78\.\d\d) to (?!\3)",
        run.out,
    )
    assert "depending on the workspaces that cuDNN uses on the card, or none." in run.out
    assert "The largest: 1 (forward): " in run.out


def test_a_run_that_does_not_fit_shows_what_is_enough_without_workspaces(dry_run):
    def under(memory):
        return dry_run(GROUPED, options=("--gpu", "H100-80GB", "--memory", f"{memory >> 20}MiB"))

    fits = dry_run(GROUPED, options=("--gpu", "H100-80GB")).answer["range"]["process"]
    short = under(fits["least"] - 100 * MIB)
    least, most = short.answer["needs_without_workspaces"]["bytes"], short.answer["needs"]["bytes"]
    assert fits["least"] - 100 * MIB < least < 0.98 * most
    options = ("--gpu", "H100-80GB", "--memory", f"{(fits['least'] >> 20) - 100}MiB", "--advise")
    assert dry_run(GROUPED, options=options).answer["needs_without_workspaces"]["bytes"] == least
    assert under(most + MIB).answer["verdict"] in ("fits", "tight")
    assert re.search(r"needs [\d.,]+ to [\d.,]+ [GM]iB; this GPU has", short.out)
    assert "How much is enough depends on the workspaces of convolutions" in short.out


@pytest.mark.slow
def test_a_plan_names_what_the_script_needs_without_workspaces(dry_run, tmp_path):
    fits = dry_run(GROUPED, options=("--gpu", "H100-80GB")).answer["range"]["process"]
    script = tmp_path / "grouped.py"
    script.write_text(textwrap.dedent(GROUPED))
    plan = memfit.plan(script, gpu="H100-80GB", budget=(fits["least"] + fits["most"]) // 2)
    assert plan.as_written.needs.bytes > plan.budget
    assert 0 < plan.without_workspaces <= fits["least"]
    assert memfit.plan(script, gpu="H100-80GB", budget=2 * fits["most"]).without_workspaces == 0


@pytest.mark.parametrize("others", [0, 2048])
def test_nvidia_smi_and_nvml_s_first_version_differ_by_the_driver_and_other_processes(dry_run, others):
    options = ("--gpu", "H100-80GB", "--in-use", f"{others}MiB")
    run = dry_run("import torch\ntorch.ones(1 << 20, device='cuda')", options=options)
    device = run.answer["device"]
    assert device["driver_reserved"] == 81_559 * MIB - device["total"]
    rows = {line.strip().split("  ")[0]: line for line in run.out.splitlines() if "MiB" in line}
    process = run.answer["peak"]["process"]
    assert f" {-(-process // MIB):,} MiB" in rows["in nvidia-smi"]
    card = process + device["driver_reserved"] + others * MIB
    assert f" {-(-card // MIB):,} MiB" in rows["in NVML's v1"]
