"""``memfit compare`` of scripts that shard themselves: rows need what the script needs with the option."""

import textwrap
from dataclasses import asdict

import pytest

import memfit
from support import warm_process

pytestmark = [pytest.mark.process, pytest.mark.warm]

RANKS = 2
SCRIPT = """
    import os
    import torch
    from torch import nn
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel
    HEAD

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(256, 256, bias=False)
        def forward(self, x):
            return x + self.fc(x).relu()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))
            self.head = nn.Linear(256, 512)
        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    torch.distributed.init_process_group()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = Net().cuda()
    SHARD
    PLAN
    optimizer = torch.optim.Adam(model.parameters())
    while True:
        optimizer.zero_grad()
        model(torch.randn(64, 256, device="cuda")).square().mean().backward()
        optimizer.step()
"""
FSDP2 = """for part in [*model.blocks, model]:
        fully_shard(part, OWN)"""
DDP = "model = DistributedDataParallel(model, OWN)"
GROUPS = ("checkpointing", "offload", "sharding")
CHECKPOINTING = ("checkpointing", "checkpointing (every 2nd)", "checkpointing (products kept)")
ROWS = {
    FSDP2: (
        "as written",
        *CHECKPOINTING,
        "checkpointing + offload",
        "reshard_after_forward=True",
        "reshard_after_forward=True + checkpointing",
        "offload_policy=CPUOffloadPolicy()",
        "offload_policy=CPUOffloadPolicy() + checkpointing",
        "reshard_after_forward=False",
        "reshard_after_forward=False + checkpointing",
    ),
    DDP: (
        "as written",
        *CHECKPOINTING,
        "offload",
        "checkpointing + offload",
        "ZeRO-1",
        "ZeRO-1 + checkpointing",
        "ZeRO-1 + offload",
        "ZeRO-1 + checkpointing + offload",
        "gradient_as_bucket_view=True",
        "gradient_as_bucket_view=True + checkpointing",
        "static_graph=True",
        "static_graph=True + checkpointing",
    ),
}
OF_SHARDING = tuple(
    row for row in ROWS[DDP] if row not in {*CHECKPOINTING, "offload", "checkpointing + offload"}
)
OPTIONS = [(shard, row) for shard, rows in ROWS.items() for row in rows if "=" in row and "+" not in row]


def script(shard, own="", *, head="", plan=""):
    text = SCRIPT.replace("SHARD", shard).replace("OWN", own).replace("HEAD", head).replace("PLAN", plan)
    return textwrap.dedent(text)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Return a function that compares the script with a sharding of its own; each is compared once."""
    found = {}

    def compare(shard, rows=("sharding",)):
        if (shard, rows) not in found:
            file = tmp_path_factory.mktemp("compare") / "train.py"
            file.write_text(script(shard))
            with warm_process.scripts():
                found[shard, rows] = memfit.compare(file, nproc=RANKS, gpu="H100", rows=rows)
        return found[shard, rows]

    return compare


@pytest.mark.parametrize(
    ("shard", "groups", "rows"),
    [
        pytest.param(FSDP2, GROUPS, ROWS[FSDP2], marks=pytest.mark.slow),
        pytest.param(DDP, GROUPS, ROWS[DDP], marks=pytest.mark.slow),
        (DDP, ("sharding",), OF_SHARDING),
    ],
    ids=["FSDP2", "DDP", "DDP, sharding alone"],
)
def test_only_what_suits_the_scripts_own_sharding_is_compared(compared, shard, groups, rows):
    found = compared(shard, groups)
    assert tuple(run.name for run in found.runs) == rows
    assert not any(run.reason for run in found.runs)
    (own,) = found.sharding_calls
    (line,) = own.lines
    assert line.startswith("train.py:")
    assert own.call in script(shard).splitlines()[int(line.partition(":")[2]) - 1]
    text = str(found)
    assert f"To train with an option of {own.name}, pass it in each call of {own.call}: {line}\n" in text
    assert "[]" not in text


@pytest.mark.parametrize(
    ("shard", "option"),
    [pytest.param(*each, marks=[pytest.mark.slow] * (each[0] == FSDP2), id=each[1]) for each in OPTIONS],
)
@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_row_needs_what_the_script_needs_with_the_option_written_in_it(
    compared, dry_run, shard, option, checkpointing
):
    name = option + " + checkpointing" * checkpointing
    row = next(run for run in compared(shard).runs if run.name == name)
    more = {"head": "import memfit", "plan": "memfit.apply(model, memfit.Checkpointing())"}
    text = script(shard, option, **more if checkpointing else {})
    run = dry_run(text, options=("--nproc", f"{RANKS}", "--rank", f"{row.rank}", "--gpu", "H100"))
    assert run.code == 0, run.err
    for name in ("allocated", "reserved"):
        peak = run.answer["peak"][name]
        once = {"least": peak, "most": peak}
        assert (run.answer["range"] or {}).get(name, once) == asdict(getattr(row.peak, name))
    assert run.answer["needs"]["bytes"] == row.needs.bytes


@pytest.mark.slow
def test_an_option_that_the_script_has_is_no_row(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(script(FSDP2, "reshard_after_forward=False, offload_policy=CPUOffloadPolicy()"))
    with warm_process.scripts():
        found = memfit.compare(file, nproc=RANKS, gpu="H100", rows=["sharding"])
    assert [run.name for run in found.runs if run.own_sharding] == [
        "reshard_after_forward=True",
        "reshard_after_forward=True + checkpointing",
    ]
