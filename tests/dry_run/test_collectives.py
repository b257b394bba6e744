"""What collectives hold until a thread of PyTorch releases it does not depend on the speed of the machine."""

import pytest

pytestmark = pytest.mark.warm

SCRIPT = """
    import pathlib, sys, time, torch
    from torch import distributed, nn
    store = pathlib.Path("store").absolute()
    store.unlink(missing_ok=True)
    distributed.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(40)]).cuda()
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    for step in range(4):
        model(torch.ones(8, 512, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(float(sys.argv[1]))
"""


@pytest.mark.slow
def test_the_peak_of_a_slow_loop_is_that_of_a_fast_one(dry_run):
    peaks = [dry_run(SCRIPT, pause, options=("--to-end",)).answer["peak"] for pause in ("0.3", "0", "0")]
    assert peaks[0] == peaks[1] == peaks[2]


CONNECTS = """
    import os, torch
    from torch import distributed
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl")
    def taken():
        return (start - torch.cuda.mem_get_info()[0]) >> 20
    one = torch.ones(1, device="cuda")
    out = torch.empty(8, device="cuda")
    start = torch.cuda.mem_get_info()[0]
    distributed.all_gather_into_tensor(out, one)
    ring = taken()
    distributed.all_reduce(one)
    reduced = taken()
    distributed.all_to_all_single(torch.empty_like(out), out)
    print("MiB", ring, reduced, taken())
    distributed.destroy_process_group()
    torch.ones(1, device="cuda")
"""


def test_nccls_memory_is_taken_as_ranks_connect_and_reported_as_a_row(dry_run):
    done = dry_run(CONNECTS, options=("--gpu", "H100", "--nproc", "8", "--to-end"))
    bookkeeping, kernels, ring, tree, multicast, peers = 196, 96, 24 * 12, 24 * 10, 256 + 34, 7 * 32 * 12
    ring += bookkeeping + kernels
    reduced = ring + tree + multicast
    assert f"MiB {ring} {reduced} {reduced + peers}" in done.out + done.err
    rows = {row["name"]: row for row in done.answer["terms"]}
    assert (
        rows["NCCL"]["bytes"] == (reduced + peers) << 20
    )  # the most held, although they are destroyed at the end
    assert rows["NCCL"]["provenance"] == "assumed"
    assert rows["process"]["bytes"] == sum(
        rows[name]["bytes"] for name in ("reserved", "CUDA context", "NCCL")
    )


def test_a_card_that_nccl_fills_is_too_small(dry_run):
    options = ("--gpu", "H100", "--nproc", "8", "--to-end", "--memory", "2GiB")
    assert dry_run(CONNECTS, options=options).answer["verdict"] == "does not fit"
