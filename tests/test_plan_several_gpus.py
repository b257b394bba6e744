"""``memfit plan --nproc``: a script for one GPU is sharded, one for several planned for its ranks."""

import json
import textwrap

import pytest

from support.scripts import FEED_FORWARD
from support.warm_process import memfit

pytestmark = pytest.mark.process

MIB = 1 << 20
TRAIN = """
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        optimizer.zero_grad()
        model(torch.randn(SAMPLES, WIDTH, device="cuda")).square().mean().backward()
        optimizer.step()
"""
ON_ONE_GPU = """
    model = Net(1024, 6).cuda()
"""
JOINED = """
    import os
    torch.distributed.init_process_group()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
"""
SHARDS_ITSELF = {
    "gradient_as_bucket_view=True": (
        2230,
        """
    model = nn.parallel.DistributedDataParallel(Net(1024, 6).cuda(), )
""",
    ),
    "offload_policy=CPUOffloadPolicy()": (
        1800,
        """
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
    model = Net(1024, 6).cuda()
    fully_shard(model, )
""",
    ),
}
"""By option that makes it fit: the budget in MiB, and how a script shards itself."""
ON_SEVERAL = """
    import os
    torch.distributed.init_process_group()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = nn.parallel.DistributedDataParallel(Net(256, 8).cuda(), gradient_as_bucket_view=True)
"""


def written(folder, model, samples, width):
    script = folder / "train.py"
    text = FEED_FORWARD + model + TRAIN.replace("SAMPLES", str(samples)).replace("WIDTH", str(width))
    script.write_text(textwrap.dedent(text))
    return script


def planned(script, budget, plan, *options):
    done = memfit("plan", "--nproc", "2", "--budget", f"{budget}MiB", "-o", plan, *options, script)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(plan.read_text())


def dry_run(script, plan, found, *options):
    """Run ranks under a plan, each with the memory that the plan says it needs."""
    memory = f"{found['needs']['bytes']}B"
    done = memfit("dry-run", *options, "--memory", memory, "--plan", plan, "--json", "-", script)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def most_of(ranks):
    """Return the most that a rank allocates, and that its process takes."""
    return tuple(max(rank["peak"][name]["most"] for rank in ranks) for name in ("allocated", "process"))


@pytest.mark.slow
def test_a_script_for_one_gpu_is_sharded_as_far_as_it_must_be_and_needs_what_the_plan_says(tmp_path):
    script, plan = written(tmp_path, ON_ONE_GPU, 64, 1024), tmp_path / "plan.json"
    text, found = planned(script, 1860, plan)  # MiB: 108 stay free, because the context may be larger
    assert "on each of 2 GPUs instead of" in text.partition("\n")[0]
    assert [run["plan"] for run in found["tried"]][-2:] == [
        {"sharding": {"mode": "zero1", "split_batch": True}},
        {"sharding": {"mode": "fsdp2", "split_batch": True}},
    ]
    assert (found["plan"], found["equality"]) == (
        {"sharding": {"mode": "fsdp2", "split_batch": True}},
        "up to rounding",
    )
    assert (found["nproc"], found["distributed"], found["rank"]) == (2, False, 0)
    parameters = 4 * 6 * (2 * 4 * 1024 * 1024 + 5 * 1024)
    assert found["sent"] == [parameters, 3 * parameters // 2]
    result = dry_run(script, plan, found, "--nproc", "2", "--rank", "1")
    assert result["verdict"] == "tight"
    assert result["peak"]["allocated"] == found["allocated"]
    assert result["peak"]["process"] == found["needs"]["bytes"] <= 1750 * MIB
    alone = memfit("dry-run", "--plan", plan, script)
    assert alone.returncode == 2
    assert "Say how many there are, as in memfit dry-run --nproc 2" in alone.stderr
    gradients = memfit("verify", "--plan", plan, script)
    assert gradients.returncode == 2
    assert "shards the model over several GPUs" in gradients.stderr


@pytest.mark.slow
def test_a_script_for_several_gpus_is_planned_for_every_rank(tmp_path):
    script, plan = written(tmp_path, ON_SEVERAL, 32768, 256), tmp_path / "plan.json"
    text, found = planned(script, 2200, plan)
    assert "Recomputed in the backward:" in text
    assert (found["nproc"], found["distributed"], found["equality"]) == (2, True, "bit for bit")
    ranks = dry_run(script, plan, found, "--nproc", "2", "--all-ranks")["ranks"]
    assert [rank["verdict"] for rank in ranks] == ["tight"]
    assert most_of(ranks) == (found["allocated"], found["needs"]["bytes"])
    assert found["needs"]["bytes"] <= 2200 * MIB < found["as_written"]["needs"]["bytes"]
    gradients = memfit("verify", "--plan", plan, script)
    assert gradients.returncode == 2
    assert "was made for 2 ranks; memfit verify runs one process" in gradients.stderr


@pytest.mark.parametrize(
    "option",
    [pytest.param(each, marks=[pytest.mark.slow] * ("offload" in each)) for each in SHARDS_ITSELF],
)
def test_an_option_of_the_scripts_own_sharding_is_planned_and_needs_what_it_needs_by_hand(tmp_path, option):
    budget, shards = SHARDS_ITSELF[option]
    script, plan = written(tmp_path, JOINED + shards, 64, 1024), tmp_path / "plan.json"
    text, found = planned(script, budget, plan)
    call = "fully_shard" if "fully_shard" in shards else "DistributedDataParallel"
    name, _, value = option.partition("=")
    assert found["own_sharding"] == {call: {name: True if value == "True" else value}}
    assert (found["plan"], found["allocator"]) == ({}, "")
    assert f"pass {option} in each call of {call}: train.py:" in text
    rank = ("--nproc", "2", "--rank", f"{found['rank']}")
    under = dry_run(script, plan, found, *rank)
    script.write_text(script.read_text().replace(", )", f", {option})"))
    nothing = tmp_path / "nothing.json"
    nothing.write_text('{"plan": {}}')
    by_hand = dry_run(script, nothing, found, *rank)
    assert under["peak"] == by_hand["peak"] | {"line": under["peak"]["line"]}
    assert under["peak"]["allocated"] == found["allocated"]
    assert found["needs"]["bytes"] < found["as_written"]["needs"]["bytes"]


def test_a_plan_for_a_sharding_that_the_script_does_not_have_is_refused(tmp_path):
    script, plan = written(tmp_path, ON_ONE_GPU, 64, 1024), tmp_path / "plan.json"
    plan.write_text('{"plan": {}, "own_sharding": {"fully_shard": {"reshard_after_forward": true}}}')
    done = memfit("dry-run", "--plan", plan, script)
    assert done.returncode == 2
    assert "the script does not call fully_shard" in done.stderr


def test_a_job_is_refused_by_name(tmp_path):
    job = tmp_path / "job.py"
    job.write_text("def make_job():\n    raise AssertionError\n")
    done = memfit("plan", "--nproc", "2", "--budget", "2GiB", f"{job}:make_job")
    assert done.returncode == 2
    assert "job.py:make_job: memfit plans jobs for one GPU." in done.stderr
