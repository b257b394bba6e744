"""What becomes of a plan under `memfit train`: the script does not train without a part of it, unasked."""

import re
import textwrap

import pytest
import torch

import memfit
from memfit.injection.injection_files import InjectionReport
from memfit.planning.plan_file import read_plan
from memfit.records import OperationCounts
from memfit.script_training.plan_application_watcher import PlanApplicationWatcher

pytestmark = pytest.mark.process

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
    assert (
        "memfit: stopped before the script started. Write that in the script, and then train it with "
        "--as-far-as-it-goes.\n"
    ) in trained.err


def test_a_sharding_takes_several_processes(train, plan_file):
    plan = plan_file({"checkpointing": {}, "sharding": {"mode": "ddp"}}, nproc=2)
    trained = train(STEPS, plan, "--lr", "3")
    assert (trained.code, trained.out) == (3, "")
    assert "NOT APPLIED: sharding takes a process for each GPU, and this is the only one" in trained.err
    again = f"torchrun --nproc-per-node 2 -m memfit train --plan {plan} script.py --lr 3"
    assert f"memfit: stopped before the script started. Write {again}.\n" in trained.err


@pytest.mark.parametrize("settings", [{"batch_slices": {"count": 2}}, {"precision": {}}])
@pytest.mark.parametrize(("forward", "code"), [("model", 0), ("model[0]", 3)], ids=["model", "its layer"])
def test_slices_and_precision_take_a_call_of_the_model_itself(train, plan_file, settings, forward, code):
    assert "model(torch" in STEPS
    script = STEPS.replace("model(torch", f"{forward}(torch")
    if settings == {"precision": {}}:  # in a closure
        script = script.replace(f"{forward}(", f"run = lambda: {forward}(").replace("step()", "step(run)")
    trained = train(script, plan_file(settings))
    assert (trained.code, "stepped" in trained.out) == (code, code == 0), trained.err
    refused = "NOT APPLIED to Sequential: the script does not call Sequential itself"
    assert (refused in trained.err) == bool(code)


def test_a_model_that_a_closure_calls_first_is_refused_before_the_first_step(train, plan_file):
    script = STEPS.replace("SGD(model.parameters())", "LBFGS(model.parameters())").replace(
        "optimizer.step()", "optimizer.step(lambda: model(torch.ones(2, 4, device='cuda')).softmax(0).sum())"
    )
    script = script.replace('model(torch.ones(2, 4, device="cuda")).sum().backward()', "", 1)
    script = script.replace("torch.nn.Linear(4, 4))", "torch.nn.Linear(4, 4), torch.nn.Softmax(0))")
    trained = train(script, plan_file({"batch_slices": {"count": 2}}))
    assert (trained.code, "stepped" in trained.out) == (3, False), trained.err
    assert "NOT APPLIED at script.py:7: batch_slices: the model combines samples" in trained.err


def test_a_script_that_catches_a_refusal_has_not_trained(train, plan_file):
    script = STEPS.replace("Linear(4, 4))", "Linear(4, 4), torch.nn.BatchNorm1d(4))")
    begin = script.index("    model(torch")
    tried = "".join(f"    {line}\n" for line in script[begin:].splitlines())
    script = f"{script[:begin]}    try:\n{tried}    except Exception:\n        print('skipped')\n"
    trained = train(script, plan_file({"batch_slices": {"count": 2}}))
    assert (trained.code, trained.out) == (3, "trains\nskipped\n"), trained.err
    assert "NOT APPLIED: no optimizer has made a step" in trained.err


CATCHES = """
    import torch
    from torch import nn
    models = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4), LAST)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in models]
    print("trains")
    for step in range(3):
        for model, optimizer in zip(models, optimizers):
            try:
                model(torch.ones(2, 4)).sum().backward()
            except ERROR:
                continue
            optimizer.step()
            print("stepped")
"""


@pytest.mark.parametrize("as_far", [False, True])
@pytest.mark.parametrize(
    ("last", "error", "before", "says"),
    [
        ("nn.Softmax(0)", "ValueError", 1, "stopped during training at script.py:10: batch_slices: the mod"),
        (
            "nn.BatchNorm1d(4)",
            "KeyError",
            0,
            "NOT APPLIED to Sequential (optimizer: script.py:5): batch_slices: 1 is",
        ),
    ],
    ids=["caught", "seen before the first step"],
)
def test_no_step_follows_a_refusal(train, plan_file, last, error, before, says, as_far):
    script = CATCHES.replace("LAST", last).replace("ERROR", error)
    trained = train(script, plan_file({"batch_slices": {"count": 2}}), as_far=as_far)
    if not as_far:
        assert (trained.code, trained.out) == (3, "trains\n" + "stepped\n" * before), trained.err
        assert f"memfit: {says}" in trained.err
    elif error == "ValueError":
        assert (trained.code, trained.out) == (0, "trains\n" + "stepped\n" * 3), trained.err
        assert "trained without a part of" in trained.err.splitlines()[-1]


def test_a_copy_of_a_model_gets_the_plan_when_an_optimizer_takes_it(train, plan_file):
    script = textwrap.dedent(STEPS)
    script += "import copy; model = copy.deepcopy(model)\n" + "\n".join(script.splitlines()[3:])
    trained = train(script, plan_file({"batch_slices": {"count": 2}, "precision": {}}))
    assert (trained.code, trained.out) == (0, "trains\nstepped\n" * 2), trained.err
    assert trained.err.count("memfit: applied to Sequential") == 2
    assert "NOT APPLIED" not in trained.err


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
            {"optimizer": 1, "command": ["script.py", "--lr", "3"]},
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
    advice = f"Leave that out of {plan}"
    if "command" in fields:  # memfit wrote the plan
        advice = f"Make a plan for this command (memfit plan -o {plan} script.py --lr 3)"
    assert (
        f"memfit: stopped before the first step. {advice}, or train with --as-far-as-it-goes, which leaves "
        "out what cannot be applied.\n"
    ) in trained.err


@pytest.mark.parametrize(
    ("on", "kept", "missing"),
    [
        ("cpu", 1, ""),  # its attention has another kernel, and a model may run more beside it on a GPU
        pytest.param("cpu", 2, "aten.addmm.default:2", marks=pytest.mark.slow),
        ("ghost", 1, "aten._scaled_dot_product_efficient_attention.default:0, aten.relu.default:7"),
    ],
)
def test_results_to_be_kept_that_the_model_does_not_make_stop_the_script_before_its_first_step(
    train, plan_file, on, kept, missing
):
    """Another number of layers, for example: the plan's memory and time are not this model's."""
    names = [f"aten.addmm.default:{number}" for number in range(kept + 1)]
    names += ["aten._scaled_dot_product_efficient_attention.default:0", "aten.relu.default:7"]
    plan = plan_file({"checkpointing": {"regions": [{"modules": [""], "save_ops": names}]}})
    script = STEPS.replace("Sequential(", "Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), ", 1)
    trained = train(script, plan, on=on)
    says = "NOT APPLIED in full: the model does not run these operations, whose results the plan keeps: "
    assert (says in trained.err) is bool(missing)
    assert (trained.code, "stepped" in trained.out) == ((3, False) if missing else (0, True)), trained.err
    if missing:
        assert f"{says}{missing}\n" in trained.err
        far = train(script, plan, as_far=True, on=on)
        assert (far.code, "stepped" in far.out) == (0, True)
        assert "trained without a part of" in far.err.splitlines()[-1]


def test_a_single_layer_is_a_model(train, plan_file):
    script = STEPS.replace("torch.nn.Sequential(torch.nn.Linear(4, 4))", "torch.nn.Linear(4, 4)")
    trained = train(script, plan_file({"batch_slices": {"count": 2}}))
    assert (trained.code, trained.out) == (0, "trains\nstepped\n"), trained.err
    assert "memfit: applied to Linear (optimizer: script.py:4)" in trained.err


HOOK = "kept = []; model[0].register_forward_hook(lambda *each: kept.append(each[2])); print("
SECOND = (
    ".sum(); torch.autograd.grad(model(torch.ones(2, 4)).mean(), [*model.parameters()], create_graph=True)"
)


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("Linear(4, 4))", "BatchNorm1d(4))", "batch_slices: 0 is a BatchNorm1d in"),
        ("print(", "model.compile(backend='eager'); print(", "batch_slices: the script compiles the model"),
        pytest.param(
            *("model(", "torch.jit.script(model)(", "torch.jit.script of a Sequential, whose forward"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("print(", HOOK, "batch_slices: 0 has a forward hook, <lambda> at "), marks=pytest.mark.slow
        ),
        pytest.param(
            *(".sum().backward()", SECOND, "batch_slices: a second derivative"), marks=pytest.mark.slow
        ),
    ],
    ids=["batch norm", "compile", "script", "hook", "backward"],
)
def test_what_the_first_batch_shows_stops_the_script_and_says_where(train, plan_file, before, after, says):
    plan, script = plan_file({"batch_slices": {"count": 2}}), STEPS.replace(before, after, 1)
    assert script != STEPS
    trained = train(script, plan)
    assert (trained.code, trained.out) == (3, "trains\n"), trained.err
    assert f"NOT APPLIED at script.py:6: {says}" in trained.err
    assert "memfit: stopped before the first step." in trained.err
    assert "Traceback" not in trained.err
    far = train(script, plan, as_far=True)
    assert far.code == 1
    assert "Traceback" in far.err


@pytest.mark.parametrize(
    ("later", "says"),
    [
        (f"model(torch.ones(2, 4)){SECOND}", "a second derivative"),
        (
            "model[0].forward = lambda x: x - x.mean(0); model(torch.randn(2, 4))",
            "the model combines samples",
        ),
    ],
    ids=["second derivative", "samples meet"],
)
def test_what_a_later_step_does_stops_the_script_and_says_where(train, plan_file, later, says):
    script = f"{textwrap.dedent(STEPS)}{later}\n"
    trained = train(script, plan_file({"batch_slices": {"count": 2}}))
    assert (trained.code, trained.out) == (3, "trains\nstepped\n"), trained.err
    assert f"memfit: stopped during training at script.py:9: batch_slices: {says}" in trained.err
    assert "Traceback" not in trained.err


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


@pytest.mark.parametrize("as_far", [False, pytest.param(True, marks=pytest.mark.slow)])
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


def test_the_first_step_s_operations_are_counted(plan_file, capsys):
    plan = read_plan(plan_file({"checkpointing": {}}, operations={"forward": 168, "recomputed": 24}))
    lines = PlanApplicationWatcher("plan.json", plan, ("train.py",), as_far_as_it_goes=False)
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
    outcome = PlanApplicationWatcher("plan.json", plan, ("train.py",), as_far_as_it_goes=True)
    for model in ("UNet (optimizer: other.py:1)", "GPT (optimizer: gpt.py:61)"):
        outcome.report(InjectionReport(models=(model,)))
    assert capsys.readouterr().err.splitlines() == [
        "memfit: applied to UNet (optimizer: other.py:1)",
        "memfit: applied to GPT (optimizer: gpt.py:61); it was made for UNet (optimizer: unet.py:9)",
    ]
