"""`memfit train`: an unmodified script trains under a plan as it does without, with less memory."""

import json
import os
import re
import textwrap
from pathlib import Path

import pytest

from memfit.cli.main import run_command
from memfit.planning.plan_file import read_plan
from memfit.records import Change
from memfit.script_training.plan_application_watcher import automatic_part_of_change, changes_left_to_user
from support import warm_process

pytestmark = pytest.mark.process

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = {
    "gpt.py": (["--batch-size", "1", "--context", "16", "--steps", "2"], {"checkpointing": {}}),
    "mlp.py": (  # with dropout
        ["--epochs", "1", "--hidden", "256"],
        {
            "checkpointing": {"regions": [{"modules": ["0", "1", "2"]}, {"modules": ["3", "4"]}]},
            "optimizer_state": {"step_in_backward": True},
        },
    ),
    "unet.py": (  # with batch normalization, and a loss scaler
        ["--batch-size", "2", "--size", "32", "--steps", "2"],
        {"checkpointing": {"regions": [{"modules": [""], "recompute": "tensors"}]}},
    ),
    "lstm.py": (
        ["--steps", "2", "--batch-size", "4", "--length", "8"],
        {"checkpointing": {"regions": [{"modules": ["lstm"]}]}, "optimizer_state": {"offload": True}},
    ),
    "hf_trainer.py": (
        ["--layers", "2", "--heads", "1", "--sequence-length", "16", "--steps", "3", "--samples", "64"],
        {"checkpointing": {}, "offload": {"what": "inputs", "min_bytes": 0}},
    ),
}


def losses(text):
    return [line for line in text.splitlines() if "loss" in line and "runtime" not in line]


SLOW = {"gpt.py", "hf_trainer.py", "mlp.py", "unet.py"}


@pytest.mark.parametrize(
    "script", [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in SCRIPTS]
)
def test_losses_and_parameters_are_those_of_the_script_alone(python, plan_file, script):
    arguments, settings = SCRIPTS[script]
    alone = python(EXAMPLES / script, *arguments)
    assert alone.code == 0, alone.err
    plan = plan_file(settings)
    trained = python("--plan", plan, EXAMPLES / script, *arguments, start=warm_process.train)
    assert trained.code == 0, trained.err
    assert "memfit: applied to " in trained.err
    assert "NOT APPLIED" not in trained.err
    assert (losses(trained.out), trained.digest) == (losses(alone.out), alone.digest)
    assert losses(alone.out)
    assert not alone.digest.startswith("0 ")


def test_the_peak_is_that_of_a_dry_run_under_the_plan(python, plan_file, tmp_path):
    script, arguments = EXAMPLES / "gpt.py", ["--batch-size", "2", "--steps", "3"]
    plan = plan_file({"checkpointing": {}}, allocator="expandable_segments:True")
    dry_run = python(
        *("-m", "memfit", "dry-run", "--plan", plan, "-o", "run.memfit"),
        *("--json", "run.json", "--", script, *arguments),
        on="",
    )
    assert dry_run.code == 0, dry_run.err
    predicted = json.loads((tmp_path / "run.json").read_text())["peak"]["allocated"]
    trained = python(
        *("-m", "memfit", "train", "--plan", plan, "--prediction", "run.memfit", script, *arguments),
        on="ghost",
    )
    assert trained.code == 0, trained.err
    assert f"peak allocated {predicted:,} B" in trained.out
    assert "predicted · +0.00 % (predicted: exact on the ghost)" in trained.err
    plan_file({"checkpointing": {}}, allocated=predicted - (64 << 20), command=[str(script), *arguments])
    trained = python("-m", "memfit", "train", "--plan", plan, script, *arguments, on="ghost")
    (line,) = re.findall(
        r"memfit: step 2: peak .* measured, .* predicted, (.*) % \(predicted by the plan\)", trained.err
    )
    assert float(line) > 1


WITHOUT_MASK = """
    import runpy, sys
    from transformers import masking_utils

    masking_utils._ignore_bidirectional_mask_sdpa = lambda *_, **__: True
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Scripts that read their attention mask: a rehearsal answers with zeros, which would mean padding."""


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_peak_of_a_whole_training_is_that_of_a_dry_run_under_the_plan(
    python, plan_file, tmp_path, script
):
    arguments, settings = SCRIPTS[script]
    command = ["--plan", plan_file(settings), "--", EXAMPLES / script, *arguments]
    if script == "hf_trainer.py":
        wrapper = tmp_path / "without_mask.py"
        wrapper.write_text(textwrap.dedent(WITHOUT_MASK))
        command.insert(3, wrapper)
    dry_run = python("-m", "memfit", "dry-run", "--to-end", "--json", "run.json", *command, on="")
    assert dry_run.code == 0, dry_run.err
    predicted = json.loads((tmp_path / "run.json").read_text())["peak"]["allocated"]
    trained = python("-m", "memfit", "train", *command, on="ghost")
    assert trained.code == 0, trained.err
    assert f"peak allocated {predicted:,} B" in trained.out


PRINTS = """
    import os, sys, torch
    model = torch.nn.Sequential(torch.nn.Linear(4, 4)).to("cuda")
    optimizer = torch.optim.SGD(model.parameters())
    print(sys.argv, __name__, __file__, os.environ.get("PYTORCH_ALLOC_CONF"))
"""


SUITS = {"checkpointing": {"regions": [{"modules": ["0"]}]}}


@pytest.mark.slow
def test_a_script_sees_what_it_sees_under_python_but_for_the_allocators_settings(python, train, plan_file):
    expandable = "expandable_segments:True"
    plan = plan_file({}, allocator=expandable)
    trained = train(PRINTS, plan, "--lr", "3", warm=False, PYTORCH_ALLOC_CONF="backend:native")
    assert trained.code == 0, trained.err
    assert trained.out == python("script.py", "--lr", "3", PYTORCH_ALLOC_CONF=expandable).out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code", "says"),
    [
        ("sys.exit(7)", 7, ""),
        ("raise ValueError('here')", 1, 'Traceback (most recent call last):\n  File "{script}", line 6'),
        (
            "import signal; signal.raise_signal(signal.SIGINT)",
            130,
            'Traceback (most recent call last):\n  File "{script}", line 6',
        ),
    ],
)
def test_a_script_ends_as_under_python(train, plan_file, tmp_path, end, code, says):
    trained = train(f"{PRINTS}    {end}\n", plan_file(SUITS), warm=False)
    assert trained.code == code
    assert says.format(script=tmp_path / "script.py") in trained.err


def test_the_scripts_own_options_divide_its_batches(plan_file, tmp_path):
    divided = {"count": 2, "size": 2, "how": "", "where": "", "by_option": True}
    plan = read_plan(plan_file({}, micro_batches=divided | {"arguments": ["--batch-size", "2"]}))
    assert automatic_part_of_change(plan.change) == Change(arguments=("--batch-size", "2"))
    assert changes_left_to_user(plan.change) == ()


def test_a_script_whose_updates_would_not_be_its_own_is_ended(python, plan_file):
    """It clips gradients that were used for updates in the backward."""
    plan = plan_file({"optimizer_state": {"step_in_backward": True}})
    script, arguments = EXAMPLES / "lstm.py", ["--steps", "2", "--batch-size", "4", "--length", "8"]
    trained = python("--plan", plan, script, *arguments, start=warm_process.train)
    assert trained.code == 3
    assert "step 0" not in trained.out
    assert re.search(
        r"NOT APPLIED at lstm.py:\d+: .*step_in_backward: clip_grad_norm_ \(lstm.py:\d+\) uses", trained.err
    )


@pytest.mark.parametrize(("optimizer", "code"), [("SGD", 0), ("LBFGS", 3)])
def test_fp16_leaves_out_the_first_update_of_a_closure_or_refuses_it(train, plan_file, optimizer, code):
    script = f"""
        import torch
        model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        optimizer = torch.optim.{optimizer}(model.parameters(), 0.1)
        def closure():
            optimizer.zero_grad()
            loss = (model(torch.ones(8, 4)) * 8).float().mean()
            loss.backward()
            return loss
        for _ in range(4):
            optimizer.step(closure)
            print(model[0].weight.isfinite().all().item())
        """
    trained = train(script, plan_file({"precision": {"dtype": "fp16"}}))
    assert (trained.code, trained.out) == (code, "True\n" * 4 * (not code)), trained.err
    assert "recomputed 0 of" not in trained.err
    refused = "NOT APPLIED at script.py:11: precision: torch's LBFGS evaluates the model several times"
    assert (refused in trained.err) == bool(code)


def test_out_of_memory_leaves_a_post_mortem(train, plan_file, tmp_path):
    trained = train(
        """
        import torch
        model = torch.nn.Sequential(torch.nn.Linear(1 << 12, 1 << 12)).to("cuda")
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(3):
            x = torch.randn(1 << (12 + 8 * step), 1 << 12, device="cuda")
            model(x).sum().backward()
            optimizer.step()
        """,
        plan_file(SUITS),
        on="ghost",
    )
    assert trained.code == 1
    assert "OutOfMemoryError" in trained.err
    assert (tmp_path / "memfit-oom-1.memfit").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["script.py"], "No plan given"),
        (["--plan", "none.json", "script.py"], "none.json"),
        (["--plan", "plan.json", "job.py:make_job"], "memfit.Engine(make_job()"),
        (["--plan", "plan.json", "none.py"], "none.py"),
        (["--plan", "plan.json", "--prediction", "plan.json", "script.py"], "plan.json"),
    ],
)
def test_wrong_usage_is_refused_before_the_script_starts(
    plan_file, tmp_path, arguments, says, monkeypatch, capsys
):
    plan_file({})
    (tmp_path / "script.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execv", None)
    assert run_command(["train", *arguments]) == 2
    assert says in capsys.readouterr().err
