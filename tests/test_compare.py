"""Rows of ``memfit compare``: closed forms, and scripts that follow a row by hand, to the byte."""

import textwrap

import pytest

import memfit
from memfit.analysis import strategy_comparison
from memfit.api import compare_strategies
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
NAMES = ("as written", "DDP", "DDP + checkpointing", "ZeRO-1", "FSDP2")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Return rows of a comparison for four ranks, by name."""
    script = tmp_path_factory.mktemp("compare") / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    every = strategy_comparison.strategies_to_compare

    def some(world_size, **options):
        return (one for one in every(world_size, **options) if one.name in NAMES)

    with pytest.MonkeyPatch.context() as patch, warm_process.scripts():
        patch.setattr(compare_strategies, "strategies_to_compare", some)
        return {run.name: run for run in memfit.compare(script, nproc=RANKS, gpu="H100").runs}


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
        ("FSDP2", {"model = memfit.apply(model, PLAN)": "optimizer = torch"}),
        (
            "ZeRO-1",
            {
                "model = memfit.apply(model, PLAN)": "optimizer = torch",
                "optimizer = memfit.Sharding('zero1').optimizer(optimizer, model)": "while",
            },
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
