"""``memfit plan`` divides batches: the script that accumulates in its own loop needs what the plan says."""

import json
import textwrap

import pytest

from support.warm_process import memfit

pytestmark = pytest.mark.process

SCRIPT = """
    import argparse
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--loader", type=int, default=32)
    parser.add_argument("--norm", default="LayerNorm")
    args = parser.parse_args()
    norm = getattr(nn, args.norm)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), norm(1024), nn.GELU()) for _ in range(6)))
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    criterion = nn.CrossEntropyLoss()
    data = TensorDataset(torch.empty(160, 512, 1024), torch.randint(1024, (160, 512)))
    for number, (x, y) in enumerate(DataLoader(data, args.loader)):
        logits = model(x.cuda().flatten(0, 1))
        loss = criterion(logits, y.cuda().flatten()) / args.accumulate
        loss.backward()
        if (number + 1) % args.accumulate == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
"""
BUDGET = "1.1GiB"


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("divided") / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def planned(script, plan, *options, budget=BUDGET):
    done = memfit("plan", "--budget", budget, "-o", plan, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(plan.read_text())


@pytest.mark.slow
def test_a_loop_that_accumulates_needs_what_the_plan_for_the_plain_loop_says(script, tmp_path):
    plan = tmp_path / "plan.json"
    printed, found = planned(script, plan, script)
    loop = found["in_loop"]
    divided = loop["micro_batches"]
    parts = divided["count"]
    assert (found["micro_batches"], found["time"] > loop["time"]) == (None, True)
    assert parts >= 2
    assert (divided["size"], divided["loader"]["size"]) == (32 // parts, 32 // parts)
    assert loop["plan"] == {"accumulation": {"parts_per_batch": parts}}
    assert found["equality"] == "up to rounding"
    assert f"DataLoader(batch_size={32 // parts}), now 32" in printed
    assert f"loss = loss / {parts}" in printed
    assert "Random numbers" not in printed
    assert json.loads(memfit("dry-run", "--plan", plan, "--json", "-", script).stdout)["verdict"] == "fits"
    plan.write_text(json.dumps({"plan": loop["plan"], "micro_batches": divided}))
    ours = json.loads(memfit("dry-run", "--plan", plan, "--json", "-", script).stdout)
    small = json.loads(memfit("dry-run", "--memory", BUDGET, "--plan", plan, "--json", "-", script).stdout)
    assert small["peak"]["process"] <= found["budget"]
    own = json.loads(
        memfit("dry-run", "--json", "-", script, "--accumulate", parts, "--loader", 32 // parts).stdout
    )
    assert ours["command"] == [str(script)]
    for figure in ("allocated", "reserved"):
        assert own["peak"][figure] == ours["peak"][figure]


@pytest.mark.slow
def test_bitwise_recomputes_instead(script, tmp_path):
    printed, found = planned(script, tmp_path / "plan.json", "--bitwise", script)
    assert found["micro_batches"] is None
    assert found["equality"] == "bit for bit"
    assert "checkpointing" in found["plan"]
    assert "The same results, bit for bit." in printed


@pytest.mark.slow
def test_batches_whose_statistics_count_are_not_divided_and_the_reason_is_named(script, tmp_path):
    printed, found = planned(script, tmp_path / "plan.json", script, "--norm", "BatchNorm1d", budget="1.2GiB")
    assert found["micro_batches"] is None
    assert "batch_norm" in found["undivided"]
    assert "Batches are not divided into micro-batches: in aten." in printed


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["LayerNorm", "BatchNorm1d"])
def test_advice_divides_batches_where_a_plan_does_and_refuses_with_its_reason(script, tmp_path, norm):
    arguments = [script, "--norm", norm]
    _, found = planned(script, tmp_path / "plan.json", *arguments, budget="1.2GiB")
    advised = memfit("dry-run", "--advise", "--memory", "1.2GiB", "--json", "-", *arguments)
    assert advised.returncode == 0, advised.stderr
    answer = json.loads(advised.stdout)
    pieces = {" + ".join(piece["changes"]): piece["costs"] for piece in answer["advice"]}
    divided = [name for name in pieces if "micro-batches" in name]
    remarks = [each for each in answer["advice_remarks"] if each.startswith("Batches are not divided")]
    assert bool(divided) == (found["in_loop"] is not None) == (norm == "LayerNorm")
    if divided:
        assert "two recorded steps show no samples that depend on each other" in pieces[divided[0]]
        assert remarks == []
    else:
        assert any("batch size" in name for name in pieces)
        assert remarks == [f"Batches are not divided into micro-batches: {found['undivided']}."]


CUT_OR_DRAWN = """
    import argparse
    import torch
    from torch import nn

    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    size = parser.parse_args().batch_size
    layers = (nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8))
    model = nn.Sequential(nn.Embedding(100, 512), *layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    columns = torch.arange(1 << 16).remainder(100).reshape(size, -1).t().contiguous()
    for at in range(0, 640, 128):
        x, y = {fed}
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
"""


def advised(tmp_path, fed):
    """Return the answer about a language model that is fed so."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(CUT_OR_DRAWN).format(fed=fed))
    done = memfit("dry-run", "--advise", "--memory", "900MiB", "--json", "-", script)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_advice_does_not_divide_batches_whose_size_cuts_a_corpus(tmp_path):
    answer = advised(tmp_path, "columns[at : at + 128].cuda(), columns[at + 1 : at + 129].cuda()")
    assert [piece["changes"] for piece in answer["advice"] if "micro" in str(piece["changes"])] == []
    assert "batch size 32 instead of 64" in str(answer["advice"])
    (why,) = (each for each in answer["advice_remarks"] if each.startswith("Batches are not divided"))
    assert "with a smaller batch size, the script makes other rows" in why


def test_advice_assumes_that_batches_made_on_the_gpu_can_be_divided(tmp_path):
    """Two recorded steps do not show which samples the parts have."""
    answer = advised(tmp_path, "torch.randint(100, (2, 128, size), device='cuda')")
    (costs,) = (piece["costs"] for piece in answer["advice"] if "micro" in str(piece["changes"]))
    assert "(assumed: the loss is a mean over samples that do not depend on each other)" in costs


CUT_BY_A_WORD = """
    import sys
    import torch
    from torch import nn

    config = {"batch_size": 64, "accumulation_steps": 1}
    config |= {name: int(value) for name, value in (word.split("=") for word in sys.argv[1:])}
    size, steps = config["batch_size"], config["accumulation_steps"]
    torch.manual_seed(0)

    class Model(nn.Sequential):
        def forward(self, x, y):
            logits = super().forward(x)
            return logits, nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    layers = (nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8))
    model = Model(nn.Embedding(100, 512), *layers, nn.Linear(512, 100)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    columns = torch.arange(1 << 18).remainder(100).reshape(size, -1)
    for at in range(0, 3840, 128):
        x, y = columns[:, at : at + 128].cuda(), columns[:, at + 1 : at + 129].cuda()
        optimizer.zero_grad()
        (model(x, y)[1] / steps).backward()
        optimizer.step()
"""


def test_the_models_call_divides_batches_whose_size_decides_their_rows(tmp_path):
    """Neither the loop nor the script's option could: smaller batches would have other rows."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(CUT_BY_A_WORD))
    plan, words = tmp_path / "plan.json", ("batch_size=64", "accumulation_steps=1")
    _, found = planned(script, plan, script, *words, budget="760MiB")
    assert found["plan"].keys() == {"batch_slices"}
    assert "Model" in str(found["models"])
    assert (found["in_loop"], found["micro_batches"]) == (None, None)
    assert [run["micro_batches"] for run in found["tried"] if run["micro_batches"]] == []
    assert "with a smaller batch size, the script makes other rows" in found["undivided"]
    under = memfit("dry-run", "--memory", "760MiB", "--plan", plan, "--json", "-", script, *words)
    figures = json.loads(under.stdout)
    assert (figures["verdict"], figures["peak"]["allocated"]) == ("fits", found["allocated"])


BY_HAND = """
    import torch
    from torch import nn

    block = lambda: nn.Sequential(nn.Linear(64, 2048), nn.GELU(), nn.Linear(2048, 64))
    model = nn.Sequential(block(), block())
    model.cuda()
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        loss = model(torch.randn(65536, 64, device="cuda")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.slow
def test_batches_made_by_hand_are_divided_inside_the_models_call(tmp_path):
    """Nothing sets their size, and every block recomputed is not enough."""
    script, plan = tmp_path / "by_hand.py", tmp_path / "plan.json"
    script.write_text(textwrap.dedent(BY_HAND))
    printed, found = planned(script, plan, script)
    assert found["plan"]["batch_slices"]["count"] >= 2
    assert "Batches are not divided" not in printed
    assert json.loads(memfit("dry-run", "--plan", plan, "--json", "-", script).stdout)["verdict"] == "fits"
