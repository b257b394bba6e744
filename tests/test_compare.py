"""Rows of ``memfit compare``: closed forms, and scripts that follow a row by hand, to the byte."""

import json
import textwrap

import pytest

import memfit
from memfit.planning.strategies_to_compare import strategies_to_compare
from support import warm_process

pytestmark = [pytest.mark.process, pytest.mark.warm]

RANKS, BLOCKS, WIDTH = 2, 4, 256
SCRIPT = f"""
    import os
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear({WIDTH}, {WIDTH}, bias=False)
        def forward(self, x):
            return x + self.fc(x).relu()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range({BLOCKS}))
        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    model = Net().cuda()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    while True:
        optimizer.zero_grad()
        model(torch.randn(2048, {WIDTH}, device="cuda")).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
"""
"""Its peak is at the start of backward, when there are no gradients yet, unless buckets keep them."""
PARAMETERS = 4 * WIDTH * WIDTH * BLOCKS
STATE = 2 * PARAMETERS
"""Bytes of Adam's two averages."""
BATCH = 4 * 2048 * WIDTH
SHARED = (2 * BLOCKS * BATCH - BATCH) * (RANKS - 1) // RANKS
"""A rank computes its share of two activations of each block; beside that of the last it has the whole."""
STEP = 512
"""Bytes of the block that counts the updates of a parameter: on the GPU, where Adam is fused."""
NAMES = ("DDP", "DDP + checkpointing", "ZeRO-1", "FSDP2")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Return rows of a comparison for four ranks, by name."""
    script = tmp_path_factory.mktemp("compare") / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    with warm_process.scripts():
        found = memfit.compare(script, nproc=RANKS, gpu="H100", rows=NAMES)
    return {run.name: run for run in found.runs}


def allocated(row):
    assert row.peak.allocated.least == row.peak.allocated.most
    return row.peak.allocated.most


@pytest.mark.slow
def test_ddp_adds_its_buckets_and_computes_a_share_of_the_batch(rows):
    assert allocated(rows["DDP"]) - allocated(rows["as written"]) == PARAMETERS - SHARED


def test_zero1_keeps_a_share_of_the_optimizers_state(rows):
    gone = RANKS - 1
    saved = allocated(rows["DDP"]) - allocated(rows["ZeRO-1"])
    assert saved == STATE * gone // RANKS + STEP * BLOCKS * gone // RANKS


def test_fsdp2_keeps_a_share_of_parameters_and_state(rows):
    saved = allocated(rows["as written"]) - allocated(rows["FSDP2"])
    assert saved == (PARAMETERS + STATE) * (RANKS - 1) // RANKS + SHARED


JOIN = """
    torch.distributed.init_process_group()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = Net().cuda()
"""


@pytest.mark.parametrize(
    ("name", "by_hand"),
    [
        ("DDP + checkpointing", {"model = memfit.apply(model, PLAN)": "optimizer = torch"}),
        pytest.param(
            "FSDP2", {"model = memfit.apply(model, PLAN)": "optimizer = torch"}, marks=pytest.mark.slow
        ),
        pytest.param(
            "ZeRO-1",
            {
                "model = memfit.apply(model, PLAN)": "optimizer = torch",
                "optimizer = memfit.Sharding('zero1').optimizer(optimizer, model)": "while",
            },
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_script_that_follows_a_row_needs_what_the_row_says(rows, dry_run, name, by_hand):
    row = rows[name]
    script = SCRIPT.replace("\n    model = Net().cuda()\n", JOIN)
    for line, before in by_hand.items():
        script = script.replace(f"    {before}", f"    {line}\n    {before}")
    script = "    import memfit\n" + script.replace("PLAN", f"[{', '.join(row.plan)}]")
    run = dry_run(script, options=("--nproc", f"{RANKS}", "--rank", f"{row.rank}", "--gpu", "H100"))
    assert run.code == 0, run.err
    assert (run.answer["needs"] or {"bytes": run.answer["peak"]["process"]})["bytes"] == row.needs.bytes
    assert run.answer["peak"]["allocated"] == row.peak.allocated.most


ONE_GPU = ("precision", "slices", "optimizer state offloaded", "bf16 + 2 slices + checkpointing")


def test_rows_of_one_gpu_need_what_the_script_needs_under_their_plans_and_are_forks(tmp_path, dry_run):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    forks = {}
    with warm_process.scripts():
        found = memfit.compare(
            script,
            gpu="H100",
            rows=ONE_GPU,
            on_progress=lambda now: forks.update({now.trying: now.forked}),
        )
    names = [run.name for run in found.runs]
    assert names == ["as written", "bf16", "fp16", "2 slices", "4 slices", *ONE_GPU[2:]]
    assert {name.partition(" (")[0] for name, forked in forks.items() if not forked} == {"as written"}
    plans = {one.name: one.change.plan for one in strategies_to_compare(1)}
    for run in found.runs[1:]:
        plan = tmp_path / "plan.json"
        plan.write_text(json.dumps({"plan": plans[run.name]}))
        under = dry_run(SCRIPT, options=("--plan", str(plan), "--gpu", "H100"))
        assert under.answer["peak"]["allocated"] in (run.peak.allocated.least, run.peak.allocated.most)
        assert run.time > 0
    as_written, bf16, fp16, two, four, *_ = found.runs
    assert as_written.time == 1.0 < two.time < four.time  # at least 5 us per kernel
    assert fp16.peak.allocated.most - bf16.peak.allocated.most in range(4 * 512 + 1)  # the scale


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.toml", "batch_slices = 4"),
        pytest.param("a.py", "batch_slices = 4\n1 / 0", marks=pytest.mark.slow),
    ],
)
def test_a_row_may_be_a_file_of_settings_for_which_a_dry_run_has_the_same(tmp_path, dry_run, name, text):
    script, settings = tmp_path / "train.py", tmp_path / name
    script.write_text(textwrap.dedent(SCRIPT))
    settings.write_text(text)
    with warm_process.scripts():
        _, row = memfit.compare(script, gpu="H100", rows=[str(settings)]).runs
    assert row.name == f"as in {settings}"
    under = dry_run(SCRIPT, options=("--plan", str(settings), "--gpu", "H100"))
    assert under.code == 0, under.err
    assert under.answer["peak"]["allocated"] == row.peak.allocated.most
    assert row.plan == ("memfit.BatchSlices(count=4)",)


def test_a_script_without_an_optimizer_runs_once_more_and_has_one_reason(tmp_path):
    script, ran = tmp_path / "train.py", []
    script.write_text(
        "import torch\nmodel = torch.nn.Linear(4, 4).cuda()\n"
        "for _ in range(3):\n    model(torch.ones(2, 4, device='cuda')).sum().backward()\n"
    )
    with warm_process.scripts():
        runs = memfit.compare(
            script, rows=["offload", "slices"], on_progress=lambda now: ran.append(now.trying)
        ).runs
    assert {run.reason for run in runs[1:]} == {
        "memfit applies strategies to models whose parameters an optimizer takes, and finds none"
    }
    assert len(set(ran) - {""}) <= 3, set(ran)  # two run side by side
