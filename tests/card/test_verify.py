"""`memfit verify` in rehearsal: with the ghost in place of a card, peaks are compared, and no gradients."""

import json
import os
import textwrap
from dataclasses import replace
from types import SimpleNamespace

import pytest

from memfit.errors import TargetError
from memfit.planning.plan_file import PlanFile
from memfit.records import Change, Equality, ScriptEnd
from memfit.verification import runs_under_plan
from support.advised_runs import trace
from support.scripts import TRAIN

PLAN = {"checkpointing": {"modules": ["0"]}}


@pytest.mark.slow
def test_the_peak_on_a_card_is_compared_with_that_of_the_plan(memfit, dry_run, tmp_path):
    script = textwrap.dedent(TRAIN) + "for _ in range(5): step()\n"
    plan = {"plan": PLAN, "command": ["script.py"]}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    peak = dry_run(script, options=("--plan", "plan.json")).answer["peak"]
    (tmp_path / "plan.json").write_text(json.dumps({**plan, "allocated": peak["allocated"] - 512}))
    run = memfit("verify", "--plan", "plan.json", "--json", "answer.json", "script.py")
    assert run.code == 1, run.err
    assert run.answer["verdict"] == "not comparable"
    assert "the ghost computes no gradients" in run.answer["reason"]
    measured = run.answer["measured"]
    assert (measured["allocated"], measured["reserved"]) == (peak["allocated"], peak["reserved"])
    assert measured["predicted"] == peak["allocated"] - 512
    assert measured["process"]["provenance"] == "assumed"
    assert (
        f"The plan predicts {measured['predicted']:,} bytes allocated (exact on the ghost): +512" in run.out
    )


def test_a_run_that_fails_has_no_peak_and_gets_the_plan_s_allocator_settings(monkeypatch):
    failed = replace(trace(1000), end=ScriptEnd("exception", 1, "ValueError: no data", "train.py:9"))
    settings = []

    def run(_command, options, *_):
        settings.append(options.allocator)
        return SimpleNamespace(trace=failed)

    monkeypatch.setattr(runs_under_plan, "run_script", run)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    plan = PlanFile(Change(PLAN, "expandable_segments:True"), Equality.BITWISE)
    with pytest.raises(TargetError, match=r"under the plan, but .*ValueError: no data \(train.py:9\)"):
        runs_under_plan.measure_peak_under_plan(("train.py",), plan, module=False, on_progress=lambda _: None)
    assert settings == ["expandable_segments:True"]
    assert "PYTORCH_ALLOC_CONF" not in os.environ
