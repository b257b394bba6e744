"""``memfit verify`` on scripts that name a GPU, on a machine without one."""

import json
import textwrap

import pytest
import torch

from memfit.cli.main import run_command
from support.new_processes import run_python
from support.warm_process import verify_on_cpu

pytestmark = pytest.mark.process

SCRIPT = """
    import sys
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    {seed}
    size = int(sys.argv[2]) if len(sys.argv) > 1 else 8
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout({dropout})) for _ in range(3)]
    model = nn.Sequential(*blocks).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    data = TensorDataset(torch.linspace(-1, 1, 512).reshape(32, 16))
    for (rows,) in DataLoader(data, batch_size=size, shuffle=True):
        optimizer.zero_grad()
        scaler.scale(model(rows.cuda()).square().mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        scaler.step(optimizer)
        scaler.update()
        print("must not be seen")
"""


def verify_alone(*arguments):
    return run_python("-m", "memfit", "verify", *arguments)


def verified(folder, plan, *, text=SCRIPT, seed="", dropout=0.0, run=verify_on_cpu, **more):
    """Return the exit code, the JSON, and what else was printed."""
    script, file = folder / "train.py", folder / "plan.json"
    script.write_text(textwrap.dedent(text).format(seed=seed, dropout=dropout))
    file.write_text(json.dumps({"plan": plan, "command": ["train.py", "--wide"], **more}))
    done = run("--plan", file, "--json", "-", script)
    assert "must not be seen" not in done.stdout + done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.slow
def test_recomputation_is_verified_bit_for_bit(tmp_path):
    plan = {"checkpointing": {"regions": [{"modules": ["0"]}, {"modules": ["1"], "split_at": ["1"]}]}}
    code, found = verified(tmp_path, plan, dropout=0.5)
    assert (code, found["verdict"], found["equality"]) == (0, "verified", "bit for bit")
    assert found["planned"] == {"parameters": 6, "equal": 6, "largest": 0.0, "parameter": ""}
    assert (found["device"], found["peaks"], found["bound"]) == ("CPU", None, 0.0)
    assert found["repeated"] is None
    assert found["planned_for"] == ["train.py", "--wide"]
    assert verified(tmp_path, plan, dropout=0.5, run=verify_alone) == (code, found)


KEEPS = {"checkpointing": {"regions": [{"modules": ["0", "1"], "save_ops": ["aten.addmm.default:0"]}]}}


def test_operations_are_counted_and_compared_with_the_plan(tmp_path):
    """Of each block, the weight is transposed again, and nothing else: its backward needs the product."""
    counts = {"forward": 12, "recomputed": 4}
    code, found = verified(tmp_path, KEEPS, operations=counts)
    assert (code, found["verdict"]) == (0, "verified")
    operations = found["operations"]
    assert operations["planned"] == {**counts, "backward": None}
    assert operations["under_plan"]["forward"] == operations["as_written"]["forward"] == 9
    assert operations["under_plan"]["recomputed"] == 2
    assert operations["as_written"]["recomputed"] == 0
    assert operations["under_plan"]["backward"] == operations["as_written"]["backward"] > 9


def test_copies_to_the_buckets_of_ddp_are_not_expected_where_the_plan_leaves_them_out(tmp_path):
    """DDP copies each gradient, unless gradients are views of its buckets, as in plans for such scripts."""
    text = SCRIPT.replace(
        "nn.Sequential(*blocks)", "nn.parallel.DistributedDataParallel(nn.Sequential(*blocks))"
    )
    begin = (
        "import torch.distributed as group; "
        "group.init_process_group('gloo', store=group.HashStore(), rank=0, world_size=1)"
    )
    plan = {"checkpointing": {"regions": [{"modules": ["module.0"]}]}}
    views = {"DistributedDataParallel": {"gradient_as_bucket_view": True}}
    code, found = verified(tmp_path, plan, text=text, seed=begin, own_sharding=views)
    assert (code, found["verdict"]) == (0, "verified")
    operations = found["operations"]
    assert operations["as_written"]["backward"] - operations["under_plan"]["backward"] == 6


@pytest.mark.parametrize(("version", "is_compared"), [(torch.__version__, True), ("2.9.0+cu128", False)])
def test_operations_are_compared_only_with_a_plan_of_the_same_pytorch(tmp_path, version, is_compared):
    """Another version may run other operations for the same module."""
    counts = {"forward": 12, "recomputed": 4}
    code, found = verified(tmp_path, KEEPS, operations=counts, versions={"torch": str(version)})
    assert (code, found["verdict"]) == (0, "verified")
    assert found["operations"]["planned"] == ({**counts, "backward": None} if is_compared else None)


def test_a_plan_that_runs_again_what_it_keeps_is_not_verified(tmp_path):
    """As with PyTorch before 2.13, whose checkpoints asked again in the recomputation what they keep."""
    broken = (
        "import contextlib, memfit.strategies.mechanisms.selective_checkpointing as broken; "
        "broken.KeptResults.recomputation = lambda _: contextlib.nullcontext()"
    )
    code, found = verified(tmp_path, KEEPS, seed=broken)
    assert (code, found["verdict"]) == (1, "other operations")
    assert found["reason"] == (
        "The recomputation runs again what the plan keeps: aten.addmm.default (2 times)."
    )
    assert found["planned"]["equal"] == 6


def test_a_plan_that_computes_something_else_differs(tmp_path):
    plan = {"checkpointing": {"modules": ["1"], "preserve_rng_state": False}}
    code, found = verified(tmp_path, plan, dropout=0.5)
    assert (code, found["verdict"]) == (1, "differs")
    assert found["repeated"]["equal"] == 6
    assert found["planned"]["equal"] == 2  # those of the last block, after which nothing is recomputed
    assert found["planned"]["parameter"].startswith(("0.", "1."))


HALVES = {"count": 2, "size": 4, "how": "", "where": "", "arguments": ["--size", "4"], "draws": True}


@pytest.mark.parametrize(
    ("plan", "micro_batches"), [({}, HALVES), ({"batch_slices": {"count": 2}}, None)], ids=["loop", "slices"]
)
def test_parts_of_batches_are_verified_up_to_rounding(tmp_path, plan, micro_batches):
    """The loop clips and unscales after each of them, and they draw other numbers than the whole batch."""
    code, found = verified(tmp_path, plan, micro_batches=micro_batches, dropout=0.5)
    assert (code, found["verdict"], found["equality"]) == (0, "verified", "up to rounding")
    assert found["dropout"] is False
    assert found["planned"]["largest"] <= 1e-5 < found["bound"] == 1e-4


def test_a_script_that_draws_other_numbers_each_time_is_not_comparable(tmp_path):
    code, found = verified(tmp_path, {"checkpointing": {"modules": ["0"]}}, seed="torch.seed()")
    assert (code, found["verdict"]) == (1, "not comparable")
    assert "other inputs each time" in found["reason"]


@pytest.mark.slow
def test_a_script_that_makes_no_update_is_reported_with_its_error(tmp_path, capsys):
    script, plan = tmp_path / "train.py", tmp_path / "plan.json"
    script.write_text("import torch\ntorch.cuda.get_device_name()\n")
    plan.write_text('{"plan": {}}')
    assert run_command(["verify", "--plan", str(plan), str(script)]) == 3
    message = capsys.readouterr().err
    assert (
        "as written on the CPU, because this machine has no GPU that PyTorch can use: it ended with"
        in message
    )
    assert f"{script}:2" in message


def test_a_command_without_a_plan_is_refused(capsys):
    assert run_command(["verify", "train.py"]) == 2
    assert "No plan given" in capsys.readouterr().err
