"""A dry run of one rank of many: the script takes part in a process group whose other ranks do not exist."""

import pytest

import memfit
from memfit.records import GroupBy
from support.scripts import JOIN

pytestmark = pytest.mark.warm

SHARDED = f"""{JOIN}
    from torch.distributed.fsdp import fully_shard
    rows, layers = 4096, 3
    model = nn.Sequential(*[nn.Linear(4096, rows, bias=False) for _ in range(layers)]).cuda()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(2, 4096, device="cuda")).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
LAYERS = 3 * 4096 * 4096 * 4


def run_as(dry_run, script, nproc, rank=0, nnodes=1, more=()):
    ranks = ("--nproc", f"{nproc}", "--nnodes", f"{nnodes}", "--rank", f"{rank}")
    return dry_run(script, options=("--gpu", "H100", "--to-end", *ranks, *more))


def terms(answer):
    return {row["name"]: row["bytes"] for row in answer["terms"]}


def test_the_other_ranks_send_what_this_one_sends(dry_run):
    script = f"""{JOIN}
    assert (dist.get_rank(), dist.get_world_size(), torch.cuda.device_count()) == (6, 8, 4)
    assert os.environ["GROUP_RANK"] == "1" and torch.cuda.current_device() == 2
    found = [None] * 8
    dist.all_gather_object(found, {{"rank": dist.get_rank()}})
    assert found == [{{"rank": 6}}] * 8, found
    dist.barrier()
    half = dist.new_group(range(4, 8))
    assert dist.get_rank(half) == 2
    sizes = torch.zeros(4, dtype=torch.int64, device="cuda")
    dist.all_gather_into_tensor(sizes, torch.tensor([70], device="cuda"), group=half)
    assert sizes.tolist() == [70] * 4, sizes
    total = torch.full((1,), 2.0, device="cuda")
    dist.all_reduce(total)
    assert total.item() == 16
    part = torch.zeros(4, device="cuda")
    part[1] = 5
    dist.all_reduce(part[1:3])
    assert part.tolist() == [0, 40, 0, 0]
    share = torch.zeros(1, device="cuda")
    dist.reduce_scatter_tensor(share, torch.full((8,), 4.0, device="cuda"))
    assert share.item() == 32
    dist.reduce_scatter(share, [torch.full((1,), 3.0, device="cuda")] * 8)
    assert share.item() == 24
    dist.reduce(share, dst=6)
    assert share.item() == 192
    on_cpu = dist.new_group(backend="gloo")
    gathered = [torch.zeros(1) for _ in range(8)]
    dist.all_gather(gathered, torch.ones(1), group=on_cpu)
    assert sum(gathered).item() == 8
    mesh = dist.init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))
    assert list(mesh.get_coordinate()) == [1, 2]
    own = ["the same on every rank"]
    dist.broadcast_object_list(own, src=0)
    assert own == ["the same on every rank"]
    x = torch.ones(1, device="cuda")
    """
    run = run_as(dry_run, script, 4, rank=6, nnodes=2)
    assert run.code == 0, run.err
    notes = " ".join(note["text"] for note in run.answer["notes"])
    assert "The script ran as rank 6 of 8 (GPU 2 of machine 1)." in notes


@pytest.mark.slow
def test_what_fsdp_gathers_of_parameters_is_communication(dry_run, tmp_path):
    trace = tmp_path / "rank.memfit"
    script = SHARDED.replace("fully_shard(layer)", "fully_shard(layer, reshard_after_forward=False)")
    run_as(dry_run, script, 4, more=("-o", str(trace)))
    held = {row.name: row.bytes for row in memfit.explain(trace, at="backward").held.rows[GroupBy.CATEGORY]}
    assert held["parameters"] == LAYERS // 4
    assert held["communication"] >= LAYERS


@pytest.mark.slow
def test_a_script_that_does_not_wait_for_its_last_collective_ends(dry_run):
    script = f"""{SHARDED}
    dist.all_reduce(torch.ones(1 << 20, device="cuda"), async_op=True)
    dist.destroy_process_group()
    print("ended")
    """
    run = run_as(dry_run, script.replace("4096", "64"), 2)
    assert (run.code, run.out.splitlines()[0]) == (0, "ended")


@pytest.mark.slow
def test_ranks_without_rows_hold_the_padding(dry_run):
    script = SHARDED.replace("rows, layers = 4096, 3", "rows, layers = 10, 1")
    found = [terms(run_as(dry_run, script, 8, rank=rank).answer)["parameters"] for rank in (0, 7)]
    # Ten rows are two for each of five ranks and none for the others; FSDP pads each share to two.
    assert found == [2 * 4096 * 4] * 2


@pytest.mark.slow
def test_ranks_agree_with_this_one_that_inputs_are_used_up(dry_run):
    script = f"""{JOIN}
    from torch.distributed.algorithms.join import Join
    from torch.distributed.optim import ZeroRedundancyOptimizer
    model = nn.parallel.DistributedDataParallel(nn.Linear(1024, 1024, bias=False).cuda())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    with Join([model, optimizer]):  # the ranks that have joined first wait for the others
        for _ in range(2):
            model(torch.ones(2, 1024, device="cuda")).sum().backward()
            optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    held = optimizer.state_dict()["state"]
    print(len(held), held[0]["exp_avg"].shape, held[0]["exp_avg"].device)
    """
    done = run_as(dry_run, script, 2)
    assert done.out.splitlines()[0] == "1 torch.Size([1024, 1024]) cpu", done.err


@pytest.mark.parametrize(
    ("rank", "nproc", "state"),
    [pytest.param(1, 2, 2 * 1024 * 1024 * 4, marks=pytest.mark.slow), (2, 4, 0)],
)
def test_updates_that_overlap_with_the_backward_are_steps_also_of_ranks_that_own_nothing(
    dry_run, rank, nproc, state
):
    script = f"""{JOIN}
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook, default_hooks
    from torch.distributed.optim import ZeroRedundancyOptimizer
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(2)]).cuda()  # a bucket each
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, overlap_with_ddp=True)
    hook = ddp_zero_hook.hook_with_zero_step(default_hooks.allreduce_hook, model, optimizer)
    model.register_comm_hook(None, hook)
    for _ in range(5):  # the first two learn the buckets
        model(torch.ones(2, 1024, device="cuda")).sum().backward()
        model.zero_grad()
    """
    found = run_as(dry_run, script, nproc, rank=rank).answer
    assert (found["verdict"], found["steps"]) == ("fits", 3)
    assert terms(found).get("optimizer state", 0) == state


@pytest.mark.slow
def test_a_rank_saves_and_loads_its_shards_alone(dry_run):
    script = f"""{SHARDED}
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict
    parts = get_state_dict(model, optimizer)
    state = {{"model": parts[0], "optimizer": parts[1]}}
    checkpoint.save(state, checkpoint_id="saved")
    checkpoint.load(state, checkpoint_id="saved")
    print("loaded")
    """
    run = run_as(dry_run, script.replace("4096", "64"), 4, rank=2)
    assert (run.code, run.out.splitlines()[0]) == (0, "loaded"), run.err


def test_a_check_of_all_ranks_shards_accepts_those_of_one(dry_run, tmp_path):
    """As Megatron-LM checks what ranks will save."""
    package = tmp_path / "megatron/core/dist_checkpointing"
    package.mkdir(parents=True)
    check = (
        "def validate_sharding_integrity(shards, common=None):\n    assert len({*shards}) == len(shards)\n"
    )
    (package / "validation.py").write_text(check)
    script = f"""{JOIN}
    from megatron.core.dist_checkpointing.validation import validate_sharding_integrity
    shards = [None] * 2
    torch.distributed.all_gather_object(shards, "the shard of one rank")
    torch.ones(1, device="cuda")
    validate_sharding_integrity(shards, common=None)
    print("valid")
    """
    done = run_as(dry_run, script, 2)
    assert (done.code, done.out.splitlines()[0]) == (0, "valid"), done.err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--nproc", "0"), "--nproc must be at least 1, not 0."),
        (("--nproc", "17"), "the ghost has at most 16 GPUs in a machine"),
        (("--nproc", "8", "--rank", "8"), "have the ranks 0 to 7."),
    ],
)
def test_ranks_that_cannot_be_are_refused(dry_run, options, says):
    run = dry_run("import torch", options=options)
    assert run.code == 2
    assert says in run.err


def test_a_store_of_the_script_answers_but_a_wait_for_another_ranks_value_is_refused(dry_run):
    script = """
    import os, time, torch
    from torch import distributed as dist
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", 29500, ranks, is_master=rank == 0)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=ranks)
    store.set(f"ready/{rank}", "yes")
    while not store.check([f"ready/{other}" for other in range(ranks)]):
        time.sleep(0.05)
    print("ready", store.add("arrived", 1), store.get("ready/1"), flush=True)
    while store.get("phase/0") != b"saved":
        time.sleep(0.05)
    """
    run = run_as(dry_run, script, 4, rank=1)
    assert (run.code, run.out.splitlines()) == (3, ["ready 4 b'yes'"]), run.err
    assert "script.py:11 waits in a loop for another rank to change 'phase/0' in a store." in run.err
