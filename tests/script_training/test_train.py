"""`memfit train`: an unmodified script trains under a plan as it does without, with less memory."""

import json
import os
import re
import textwrap
from pathlib import Path

import pytest
import torch

import memfit
from memfit.cli.main import exit_code_of
from memfit.planning.plan_file import read_plan
from memfit.records import OperationCounts
from memfit.script_training.carried_out import CarriedOut
from memfit.script_training.plan_outcome import PlanOutcome
from memfit.strategies.intervention import InjectionReport

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


SLOW = {"gpt.py", "hf_trainer.py", "lstm.py", "mlp.py"}


@pytest.mark.parametrize(
    "script", [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in SCRIPTS]
)
def test_losses_and_parameters_are_those_of_the_script_alone(python, plan_file, script):
    arguments, settings = SCRIPTS[script]
    alone = python(EXAMPLES / script, *arguments)
    assert alone.code == 0, alone.err
    plan = plan_file(settings)
    trained = python("-m", "memfit", "train", "--plan", plan, EXAMPLES / script, *arguments)
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


@pytest.fixture
def train(python, tmp_path):
    """Return a function that trains a script in the test's folder."""

    def run(script, plan, *arguments, as_far=False, **options):
        (tmp_path / "script.py").write_text(textwrap.dedent(script))
        flags = ["--as-far-as-it-goes"] * as_far
        return python("-m", "memfit", "train", "--plan", plan, *flags, "script.py", *arguments, **options)

    return run


@pytest.mark.slow
def test_a_script_sees_what_it_sees_under_python_but_for_the_allocators_settings(python, train, plan_file):
    expandable = "expandable_segments:True"
    plan = plan_file({}, allocator=expandable)
    trained = train(PRINTS, plan, "--lr", "3", PYTORCH_ALLOC_CONF="backend:native")
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
    trained = train(f"{PRINTS}    {end}\n", plan_file(SUITS))
    assert trained.code == code
    assert says.format(script=tmp_path / "script.py") in trained.err


STEPS = """
    import torch
    model = torch.nn.Sequential(torch.nn.Linear(4, 4)).to("cuda")
    optimizer = torch.optim.SGD(model.parameters())
    print("trains", flush=True)
    model(torch.ones(2, 4, device="cuda")).sum().backward()
    optimizer.step()
    print("stepped")
"""
REFUSED = {"checkpointing": {"regions": [{"modules": ["no"]}]}}
SUITS = {"checkpointing": {"regions": [{"modules": ["0"]}]}}
IN_LOOP = {
    "micro_batches": {
        "count": 2,
        "size": 2,
        "how": "--batch-size 2, now 4",
        "where": "",
        "arguments": ["--batch-size", "2"],
    }
}


def test_what_takes_a_change_of_the_script_stops_it_before_it_starts(train, plan_file):
    plan = plan_file({"checkpointing": {}, "sharding": {"mode": "ddp"}}, nproc=2, **IN_LOOP)
    trained = train(STEPS, plan)
    assert (trained.code, trained.out) == (3, "")
    assert "NOT APPLIED, as it takes a change of the script: 2 micro-batches of 2" in trained.err
    assert "loss = loss / 2" in trained.err
    assert "change of the script: sharding: write model = memfit.apply(model, PLAN)" in trained.err
    assert (
        "memfit: stopped before the script started. Write that in the script, and then train it with "
        "--as-far-as-it-goes.\n"
    ) in trained.err


def test_a_script_trains_as_far_as_it_goes_and_the_last_line_says_what_was_left_out(train, plan_file):
    plan = plan_file(SUITS, **IN_LOOP)
    trained = train(STEPS, plan, as_far=True)
    assert (trained.code, trained.out) == (0, "trains\nstepped\n")
    assert "memfit: applied to Sequential (optimizer: script.py:4)" in trained.err
    last = trained.err.splitlines()[-1]
    assert last.startswith(f"memfit: trained without a part of {plan}: NOT APPLIED, as it takes a change of")
    assert "loss = loss / 2" in last


@pytest.mark.parametrize(
    ("settings", "fields", "says"),
    [
        (REFUSED, {}, r"NOT APPLIED to Sequential \(optimizer: script.py:4\): .*'no'"),
        (
            SUITS,
            {"models": ["GPT (optimizer: gpt.py:61)"]},
            r"NOT APPLIED to Sequential \(optimizer: script.py:4\): it was made for GPT \(optimizer: gpt",
        ),
        (
            REFUSED,
            {"models": ["GPT (optimizer: gpt.py:61)"]},
            r"NOT APPLIED to Sequential \(optimizer: script.py:4\): .*'no'.*\. It was made for GPT",
        ),
        (
            SUITS,
            {"optimizer": 1},
            "NOT APPLIED: no optimizer of this process has taken the parameters of a model",
        ),
        ({"optimizer_state": {"bits": 8}}, {}, "NOT APPLIED: .*SGD"),
    ],
    ids=["refused", "another class", "another class that refuses", "no model", "optimizer"],
)
def test_a_model_without_the_plan_stops_the_script_before_its_first_step(
    train, plan_file, settings, fields, says
):
    plan = plan_file(settings, **fields)
    trained = train(STEPS, plan, "--lr", "3")
    assert (trained.code, trained.out.replace("trains\n", "")) == (3, ""), trained.err
    assert re.search(says, trained.err)
    assert (
        f"memfit: stopped before the first step. Make a plan for this command (memfit plan -o {plan} "
        "script.py --lr 3), or train with --as-far-as-it-goes, which leaves out what cannot be applied.\n"
    ) in trained.err


def test_a_script_that_swallows_the_stop_does_not_train(train, plan_file):
    script = """
        import torch
        model = torch.nn.Sequential(torch.nn.Linear(4, 4)).to("cuda")
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(3):
            try:
                model(torch.ones(2, 4, device="cuda")).sum().backward()
                optimizer.step()
                print("stepped")
            except:
                print("caught")
        """
    trained = train(script, plan_file(SUITS, optimizer=1))
    assert (trained.code, trained.out) == (3, "caught\n" * 3)


def test_a_model_that_was_left_out_when_the_plan_was_made_does_not_stop_the_script(train, plan_file):
    """It was refused the plan then, too: a discriminator beside the generator that was planned for."""
    script = """
        import torch
        class Critic(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.only = torch.nn.Linear(4, 4)
        class Maker(torch.nn.Sequential): pass
        for model in (Critic(), Maker(torch.nn.Linear(4, 4))):
            optimizer = torch.optim.SGD(model.parameters())
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        """
    plan = plan_file(SUITS, models=["Maker (optimizer: script.py:9)"])
    trained = train(script, plan)
    assert trained.code == 0, trained.err
    assert "memfit: Critic (optimizer: script.py:9) trains as written: " in trained.err
    assert "memfit: applied to Maker (optimizer: script.py:9)" in trained.err
    assert "NOT APPLIED" not in trained.err


@pytest.mark.parametrize("as_far", [False, True])
def test_a_script_whose_models_no_optimizer_took_does_not_exit_with_0(train, plan_file, as_far):
    trained = train("import torch\nprint('ends')", plan_file({"checkpointing": {}}), as_far=as_far)
    assert (trained.code, trained.out) == (3, "ends\n")
    assert "NOT APPLIED: no optimizer of this process has taken" in trained.err


def test_what_else_a_plan_was_made_for_is_said_first(train, plan_file):
    fields = {"command": ["gpt.py", "--size", "a b"], "nproc": 2}
    versions = {"memfit": "0.0.1", "torch": "2.9.0+cu128", "cuda": "12.8", "python": "3.9.1"}
    plan = plan_file(SUITS, versions=versions, **fields)
    trained = train(STEPS, plan)
    assert trained.code == 0, trained.err
    assert trained.err.splitlines()[:5] == [
        f"memfit: {plan} was made for another command: gpt.py --size 'a b'",
        f"memfit: {plan} was made for 2 ranks; this job has 1",
        f"memfit: {plan} was made with memfit 0.0.1; this is {memfit.__version__}",
        f"memfit: {plan} was made with PyTorch 2.9.0+cu128; this is {torch.__version__}",
        f"memfit: training under {plan}: checkpointing",
    ]


def test_all_ranks_stop_and_one_says_why(python, plan_file, tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(STEPS))
    command = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "memfit", "train")
    trained = python(*command, "--plan", plan_file(REFUSED), "script.py")
    assert trained.code != 0
    assert "trains" not in trained.out
    assert trained.err.count("memfit: stopped before the first step") == 1
    assert "exitcode  : 3" in trained.err


def test_the_scripts_own_options_divide_its_batches(plan_file, tmp_path):
    divided = {"count": 2, "size": 2, "how": "", "where": "", "by_option": True}
    plan = read_plan(plan_file({}, micro_batches=divided | {"arguments": ["--batch-size", "2"]}))
    assert CarriedOut.of(plan) == CarriedOut({}, ("--batch-size", "2"), ())


def test_the_first_step_s_operations_are_counted(plan_file, capsys):
    plan = read_plan(plan_file({"checkpointing": {}}, operations={"forward": 168, "recomputed": 24}))
    lines = PlanOutcome("plan.json", plan, CarriedOut.of(plan), ("train.py",), as_far_as_it_goes=False)
    lines.report(InjectionReport(("Net",), operations=OperationCounts(168, 24)))
    lines.report(InjectionReport(("Net",), operations=OperationCounts(168, 60), again={"aten.mm": 36}))
    assert capsys.readouterr().err.splitlines() == [
        "memfit: applied to Net",
        "memfit: recomputed 24 of 168 operations, as planned",
        "memfit: recomputed 60 of 168 operations",
        "memfit: NOT AS PLANNED: the recomputation runs again what the plan keeps: aten.mm (36 times)",
    ]


def test_a_plan_made_for_another_model_is_applied_as_far_as_it_goes_and_named(plan_file, capsys):
    """A plan for the whole model, whatever its parts are called, can be applied to any."""
    plan = read_plan(plan_file({"checkpointing": {}}, models=["UNet (optimizer: unet.py:9)"]))
    outcome = PlanOutcome("plan.json", plan, CarriedOut.of(plan), ("train.py",), as_far_as_it_goes=True)
    for model in ("UNet (optimizer: other.py:1)", "GPT (optimizer: gpt.py:61)"):
        outcome.report(InjectionReport(models=(model,)))
    assert capsys.readouterr().err.splitlines() == [
        "memfit: applied to UNet (optimizer: other.py:1)",
        "memfit: applied to GPT (optimizer: gpt.py:61); it was made for UNet (optimizer: unet.py:9)",
    ]


def test_a_script_whose_updates_would_not_be_its_own_is_ended(python, plan_file):
    """It clips gradients that were used for updates in the backward."""
    plan = plan_file({"optimizer_state": {"step_in_backward": True}})
    script, arguments = EXAMPLES / "lstm.py", ["--steps", "2", "--batch-size", "4", "--length", "8"]
    trained = python("-m", "memfit", "train", "--plan", plan, script, *arguments)
    assert trained.code == 1
    assert "step 0" not in trained.out
    assert re.search(r"UsageError: step_in_backward: clip_grad_norm_ \(lstm.py:\d+\) uses", trained.err)


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
    assert exit_code_of(["train", *arguments]) == 2
    assert says in capsys.readouterr().err
