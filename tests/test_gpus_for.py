"""``memfit gpus --for``: a script on several GPUs, as written and with a plan."""

import textwrap
from dataclasses import replace

import msgspec
import pytest

import memfit
from memfit.cli.main import run_command
from memfit.devices import find_device
from memfit.errors import TargetError
from memfit.records import GpusFor
from memfit.report.public_json import public_json_type, result_to_json

SCRIPT = """
    import torch
    from torch import nn
    blocks = [nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Dropout()) for _ in range(10)]
    network = nn.Sequential(*blocks).cuda()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    while True:
        network(torch.randn(152 << 10, 1024, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def on(cards, monkeypatch, script):
    monkeypatch.setattr(
        "memfit.api.gpus_for_script.all_devices", lambda: [find_device(name) for name in cards]
    )
    return memfit.gpus_for(script)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_scripts")
def test_each_gpu_gets_a_plan_if_the_script_does_not_fit_it(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    found = on(["T4", "V100-16GB", "GTX 1660", "B200"], monkeypatch, script)
    plans = {plan.device.name: plan for plan in found.plans}
    assert list(plans) == ["GTX 1660", "T4", "B200"]  # by memory
    assert plans["B200"].chosen is plans["B200"].as_written
    planned = plans["T4"].chosen
    assert planned.changes
    assert planned.needs.bytes <= find_device("T4").total_bytes < plans["T4"].as_written.needs.bytes
    assert plans["GTX 1660"].chosen.time > planned.time
    # The same run with the context of each, on GPUs whose sizes are multiples of 2 MiB.
    without_context = [plans[name].as_written.needs.bytes - find_device(name).context_bytes for name in plans]
    assert abs(without_context[0] - without_context[1]) < 2 << 20
    assert "has no kernels for V100-16GB" in found.failed["V100-16GB"]
    shown = str(found)
    assert shown.startswith("RUNS ON 1 OF 4 GPUS as written, and on 2 more with a plan")
    assert "GTX-1660" in shown
    fewer = replace(found, plans=(replace(found.plans[0], chosen=None, smallest=planned), *found.plans[1:]))
    assert str(fewer).startswith("RUNS ON 1 OF 4 GPUS as written, and on 1 more with a plan")
    assert "does not fit" in str(fewer)
    assert "may fit as written" not in str(found)
    bare = replace(found.plans[0], without_workspaces=found.plans[0].budget)
    may_fit = str(replace(found, plans=(bare, *found.plans[1:])))
    assert "GTX 1660: the script may fit as written. Where memory is short" in may_fit
    public = msgspec.json.decode(result_to_json(fewer), type=public_json_type(GpusFor))
    assert [each.plan is None for each in public.gpus] == [True, False, False]


@pytest.mark.usefixtures("warm_scripts")
def test_a_script_that_runs_on_no_gpu_is_reported_as_such(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text("import torch; torch.ones(1, device='cuda'); raise ValueError('no data')")
    with pytest.raises(TargetError, match="ValueError: no data"):
        on(["T4"], monkeypatch, script)


def test_a_script_without_for_is_pointed_out(capsys):
    assert run_command(["gpus", "train.py"]) == 2
    assert "Did you mean memfit gpus --for train.py?" in capsys.readouterr().err
    assert run_command(["gpus", "--for"]) == 2
    assert "No script given" in capsys.readouterr().err
