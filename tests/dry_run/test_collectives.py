"""What collectives hold until a thread of PyTorch releases it does not depend on the speed of the machine."""

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


def test_the_peak_of_a_slow_loop_is_that_of_a_fast_one(dry_run):
    peaks = [dry_run(SCRIPT, pause, options=("--to-end",)).answer["peak"] for pause in ("0.3", "0", "0")]
    assert peaks[0] == peaks[1] == peaks[2]
