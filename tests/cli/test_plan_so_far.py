"""``memfit plan`` before its end: progress, the file of ``-o``, Ctrl-C, and ``--max-time``."""

import json
import types
from dataclasses import replace

import pytest

import memfit
from memfit.api import plan_and_auto_checkpoint as planning
from memfit.cli import command_output
from memfit.cli.command_output import PlanSoFar
from memfit.errors import TargetError, UsageError
from memfit.run.parent import ScriptProgress
from memfit.units import parse_seconds
from support.planned_script import Script, planned

SCRIPT = """
import torch
from torch import nn
model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(8))).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
while True:
    model(torch.randn(32768, 512, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def found():
    return planned(Script(), 0.7)


def test_the_file_has_each_plan_at_once(found, tmp_path):
    file = tmp_path / "plan.json"
    plans = PlanSoFar(file)
    plans.keep(replace(found, chosen=None))
    assert not file.exists()
    for time_of_step in (1.3, 1.2):
        plans.keep(replace(found, chosen=replace(found.chosen, time=time_of_step)))
        assert json.loads(file.read_bytes())["time"] == time_of_step


def test_a_file_that_cannot_be_written_does_not_end_the_search(found, tmp_path):
    PlanSoFar(tmp_path / "missing" / "plan.json").keep(found)


@pytest.mark.parametrize(("named", "where"), [(True, "in .*plan.json$"), (False, "not written, without -o")])
def test_ctrl_c_says_what_has_been_found(found, tmp_path, named, where):
    plans = PlanSoFar(tmp_path / "plan.json" if named else None)
    plans.keep(found)
    what = f"the fastest plan so far takes {found.chosen.time:.2f} times the time: {where}"
    with pytest.raises(KeyboardInterrupt, match=what), plans.named_on_ctrl_c():
        raise KeyboardInterrupt


def test_ctrl_c_before_anything_fits_says_nothing_of_plans():
    with pytest.raises(KeyboardInterrupt) as stopped, PlanSoFar(None).named_on_ctrl_c():
        raise KeyboardInterrupt
    assert not stopped.value.args


def test_progress_says_the_time_of_the_fastest_plan_so_far():
    tried = ScriptProgress(trying="2 in part (plan 2)", peak=1 << 30, fits=1.043)
    assert "trying: 2 in part (plan 2) · fits: 1.04 times the time · step 1" in command_output._progress_text(
        tried, 3, 1.0
    )
    assert "fits" not in command_output._progress_text(replace(tried, fits=None), 3, 1.0)


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return file


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.usefixtures("warm_scripts")
def test_runs_after_a_plan_has_been_found_report_its_time(script):
    seen, found = [], []
    memfit.plan(script, budget=1300 << 20, policies=True, on_progress=seen.append, on_found=found.append)
    fits, time = [each.fits for each in seen], found[-1].chosen.time
    first = fits.index(time)
    assert (set(fits[:first]), set(fits[first:])) == ({None}, {time})
    assert any("every" in each.trying for each in seen[first:])  # policies that people use


@pytest.mark.process
@pytest.mark.usefixtures("warm_scripts")
def test_a_search_ends_when_its_time_is_over(script, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(planning, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))

    def on_progress(progress):
        assert clock[0] < 120
        clock[0] = 120.0 if "(plan " in progress.trying else 119.0

    found = memfit.plan(script, budget=1100 << 20, max_time=120, on_progress=on_progress)
    assert (found.out_of_time, found.chosen) == (True, None)
    assert found.smallest.needs.bytes < found.as_written.needs.bytes  # with expandable segments
    assert str(found).startswith("NO PLAN FOUND IN TIME")
    clock[0] = 0.0

    def too_late(_progress):
        clock[0] = 120.0

    with pytest.raises(TargetError, match="before the script had run once"):
        memfit.plan(script, budget=1100 << 20, max_time=120, on_progress=too_late)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("2min", 120), ("1.5h", 5400), ("0.5", 0.5)])
def test_times_are_written_with_their_unit(text, seconds):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["2 weeks", "0", "-1min", "soon", "1e3"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(UsageError, match=f"'{text}' is not a duration"):
        parse_seconds(text)
