"""`memfit train` under several ranks: a script for one GPU trains as one process does, and writes once."""

import itertools
import json
import re
import textwrap

import numpy as np
import pytest
import torch

from support.new_processes import run_python

pytestmark = pytest.mark.process

SCRIPT = """
    import json, os, torch
    import numpy as np
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    x = torch.randn(39, 16)
    y = (x.sum(1) > 0).long()
    loader = DataLoader(TensorDataset(x, y), 16, shuffle=True)  # 16, 16 and 7 samples
    model = nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 33), nn.Tanh(), nn.Linear(33, 2))
    model.to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    os.mkdir("out")
    for epoch in range(2):
        total = right = 0
        for a, b in loader:
            out = model(a.to("cuda"))
            similar = nn.functional.normalize(out) @ nn.functional.normalize(out).T  # of all samples
            loss = nn.functional.cross_entropy(out, b.to("cuda")) + 0.1 * similar.mean()
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            total += loss.item() * len(a)
            right += (out.argmax(1) == b).sum().item()
        with torch.no_grad():
            seen = model(x).square().mean().item()
        with open("out/log.jsonl", "a") as log:
            log.write(json.dumps([total, right, seen, norm.item()]) + "\\n")
        print("epoch", epoch, flush=True)
        np.savez("out/seen.npz", total=total, norm=norm.item())
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(state, "out/last.pt")
        saved = torch.load("out/last.pt")  # as a script that goes on from its best epoch
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.save(saved, "out/copy.tmp")
        os.replace("out/copy.tmp", "out/copy.pt")
        again = torch.optim.AdamW(model.parameters(), 1e-2)
        again.load_state_dict(optimizer.state_dict())
        optimizer = again
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return what the script writes as one process."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "script.py").write_text(textwrap.dedent(SCRIPT).replace('"cuda"', '"cpu"'))
    done = run_python("script.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    return written(folder)


def written(folder):
    """Return the log and the state that a training has written."""
    lines = (folder / "out/log.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], torch.load(folder / "out/last.pt")


def gap(one, other):
    return float((torch.as_tensor(one).double() - torch.as_tensor(other).double()).abs().max())


@pytest.mark.parametrize(
    ("mode", "ranks"),
    [
        pytest.param(mode, ranks, marks=[pytest.mark.slow] * ((mode, ranks) in [("ddp", 4), ("zero1", 4)]))
        for mode, ranks in itertools.product(["ddp", "zero1", "fsdp2"], [2, 4])
    ],
)
def test_losses_gradients_and_the_saved_state_are_those_of_one_process(
    train_on, plan_file, tmp_path, alone, mode, ranks
):
    trained = train_on(ranks, SCRIPT, plan_file({"sharding": {"mode": mode}}))
    assert [each.code for each in trained] == [0] * ranks, trained[0].err + trained[-1].err
    assert [each.out for each in trained] == ["epoch 0\nepoch 1\n"] + [""] * (ranks - 1)
    assert f"memfit: {ranks} ranks share each batch; rank 0 alone prints" in trained[0].err
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == [
        "copy.pt",
        "last.pt",
        "log.jsonl",
        "seen.npz",
    ]
    with np.load(tmp_path / "out/seen.npz") as seen:
        assert abs(seen["norm"] - written(tmp_path)[0][-1][3]) < 1e-9
    (log, state), (wanted_log, wanted) = written(tmp_path), alone
    assert len(log) == len(wanted_log) == 2
    assert gap(log, wanted_log) <= 1e-5  # sums over 39 samples
    assert state["model"].keys() == wanted["model"].keys()
    assert all(type(each) is torch.Tensor for each in state["model"].values())
    assert max(gap(each, state["model"][name]) for name, each in wanted["model"].items()) <= 1e-6
    own, theirs = state["optimizer"]["state"], wanted["optimizer"]["state"]
    assert own.keys() == theirs.keys()
    for number, entries in theirs.items():
        assert all(gap(each, own[number][name]) <= 1e-6 for name, each in entries.items())


STEP = """
    import os, torch
    from torch import nn
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.ones(4, 4)
    model(x).sum().backward()
    optimizer.step()
    print("stepped")
"""
JOIN = 'torch.distributed.init_process_group("gloo")'


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (
            "torch.ones(4, 4)",
            "torch.full((4, 4), 1.0 + int(os.environ['RANK']))",
            "rank 1 has another value of the batch",
        ),
        (
            "model(x).sum()",
            "(model(x) * (1 + int(os.environ['RANK']))).sum()",
            "rank 1 has another value of the gradient of the",
        ),
        ("model(x)", "model[1](model[0](x))", "the script does not call Sequential itself"),
        (
            "import nn",
            f"import nn; {JOIN}",
            "joins a process group itself, and Sequential is in no",
        ),
        (
            "model(x).sum().backward()",
            "a, b = model(x).sum(), model(-x).sum(); a.backward(); b.backward()",
            "sharding: a second backward follows a forward of the model",
        ),
        (
            "model(x).sum().backward()",
            "torch.autograd.grad(model(x).sum(), list(model.parameters()))",
            "sharding: torch.autograd.grad of a parameter is that of a rank's share",
        ),
        (
            "model(x).sum().backward()",
            "model[0].weight.register_hook(lambda g: g / g.norm()); model(x).sum().backward()",
            "sharding: the script has registered a hook on a parameter",
        ),
        ("model(x)", "model(x - x.mean())[0]", ""),
        (
            "optimizer =",
            "unused = nn.Sequential(nn.Linear(4, 4)); torch.optim.SGD(unused.parameters()); optimizer =",
            "",
        ),
        ("nn.Linear(4, 4))", "nn.Softmax(0))", "sharding: the model combines samples with each other"),
        (
            "nn.Linear(4, 4))",
            "nn.Linear(4, 4)); model.forward = lambda x: model[1](x)[:, : 1 + int(os.environ['RANK'])]",
            "rank 1 has another value of output shape 1 than rank 0. The ranks' outputs cannot be joined",
        ),
        (
            "model(x).sum()",
            (
                "late, whole = [], model[1].forward; "
                "model[1].forward = lambda x: whole(x)[:, len(late) * (os.environ['RANK'] == '0') :]; "
                "model(x); late.append(1); model(x).sum()"
            ),
            "the model returns [[1, 3]] for each sample of this rank, and [[1, 4]] before",
        ),
    ],
    ids=[
        *("batch", "gradient", "submodules", "own group", "two backwards", "autograd.grad"),
        *(
            "hook on a parameter",
            "no refusal",
            "an unused model",
            "samples meet",
            "output shapes",
            "later shapes",
        ),
    ],
)
def test_ranks_that_would_not_train_as_one_process_stop_before_the_first_step(
    train_on, plan_file, before, after, says
):
    assert before in STEP
    first, second = train_on(2, STEP.replace(before, after), plan_file({"sharding": {"mode": "ddp"}}))
    if not says:
        assert (first.code, first.out, second.code) == (0, "stepped\n", 0), first.err
        return
    assert says in first.err
    assert (first.code, first.out) == (3, ""), first.err
    assert second.code


@pytest.mark.parametrize("finds", [False, True])
def test_a_step_may_leave_parameters_out_if_the_plan_says_so(train_on, plan_file, tmp_path, finds):
    script = """
        import torch
        from torch import nn
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.steps, self.layers = 0, nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
            def forward(self, x, number):
                return self.layers[number](x)
        torch.manual_seed(0)
        model = Model().to("cuda")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.randn(4, 4)
        for step in range(3):
            model(x, step % 2).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        print(model.layers[0].weight.tolist(), model.layers[1].bias.tolist())
    """
    options = {"find_unused_parameters": True} if finds else {}
    first, second = train_on(2, script, plan_file({"sharding": {"mode": "ddp", **options}}))
    if not finds:
        assert (first.code, first.out, second.code) == (3, "", 3), first.err
        assert "NOT APPLIED: sharding: a step used not all parameters of Model" in first.err
        assert "memfit: stopped during training at script.py:15.\n" in first.err  # one update has been made
        return
    (tmp_path / "alone.py").write_text(textwrap.dedent(script).replace('"cuda"', '"cpu"'))
    alone = run_python("alone.py", cwd=tmp_path)
    assert (first.code, second.code) == (0, 0), first.err
    one, other = (re.findall(r"-?\d\.\d+", each) for each in (first.out, alone.stdout))
    assert len(one) == len(other) == 20
    assert gap([*map(float, one)], [*map(float, other)]) <= 1e-6


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (
            "model(x).sum()",
            "__import__('copy').deepcopy(model)(x).sum()",
            "the script copies Sequential, which fsdp2 has sharded. Copy it before the optimizer is created",
        ),
        (
            "0.1)",
            "0.1); torch.mul(model[0].weight, 2.0, out=model[0].weight[0])",
            "mul would change a part of",
        ),
        ("0.1)", "0.1); model[0].weight.unfold(0, 2, 1)", "the script calls unfold on a sharded parameter"),
        ("optimizer =", "model.scale = nn.Parameter(torch.ones(())); optimizer =", "number, such as scale."),
        (
            "0.1)",
            "0.1); model[1] = nn.Linear(4, 2).to('cuda'); torch.optim.SGD(model.parameters(), 0.1)",
            "sharding: 1.weight came into the model after its first optimizer was created",
        ),
    ],
    ids=["copy", "out", "unfold", "scalar", "new parameters"],
)
def test_what_shards_cannot_do_is_refused_by_name(train_on, plan_file, before, after, says):
    assert before in STEP
    first, second = train_on(2, STEP.replace(before, after), plan_file({"sharding": {"mode": "fsdp2"}}))
    assert says in first.err
    assert (first.code, first.out, second.code) == (3, "", 3), first.err


def test_groups_that_stay_gathered_after_a_forward_are_refused(train_on, plan_file):
    plan = plan_file({"sharding": {"mode": "fsdp2", "reshard_after_forward": False}})
    first, second = train_on(2, STEP, plan)
    assert "what the script changes of the model between its calls would be lost" in first.err
    assert (first.code, first.out, second.code) == (3, "", 3), first.err


def test_ranks_may_have_batches_of_their_own(train_on, plan_file, tmp_path):
    """With other random numbers after the model is made: rank 0 prints its own loss."""
    script = """
        import sys, torch
        from torch import nn
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to("cuda")
        before = model[0].weight.tolist()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.randn(3, 4)
        out = model(x)
        (out.square().sum() + 0 * out.sum()).backward()
        optimizer.step()
        print(len(out), before, model[0].weight.tolist(), file=sys.stderr)
        print(x.tolist(), file=sys.stderr)
    """
    plan = plan_file({"sharding": {"mode": "ddp", "split_batch": False}})
    trained = train_on(2, script, plan)
    assert [each.code for each in trained] == [0, 0], trained[0].err
    (one, x), (other, y) = (
        [line for line in each.err.splitlines() if "[[" in line and "memfit" not in line] for each in trained
    )
    assert one == other
    assert one.startswith("3 ")
    assert x != y
    assert "memfit: 2 ranks have batches of the script's size, each its own;" in trained[0].err
    assert "normalise" not in trained[0].err


def test_a_batch_norm_is_named(train_on, plan_file):
    script = STEP.replace("nn.Linear(4, 4))", "nn.BatchNorm1d(4))")
    trained = train_on(2, script, plan_file({"sharding": {"mode": "ddp"}}))
    assert [each.code for each in trained] == [0, 0], trained[0].err
    assert "memfit: BatchNorm1d 1 normalise the samples of each rank apart." in trained[0].err
