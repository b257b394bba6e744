"""What another rank sends, or writes before a barrier: it runs beside, once the script needs that."""

import pytest

from support.scripts import JOIN

pytestmark = [pytest.mark.process, pytest.mark.warm]

MARK = """
    from pathlib import Path
    Path(f"ran-{rank}").touch()
"""


@pytest.fixture
def run(dry_run):
    """Return a function that runs a script as one rank of two, and which other rank has run for it."""

    def run(script, rank=1, *more, join=JOIN):
        options = ("--nproc", "2", "--rank", f"{rank}", "--gpu", "H100", "--to-end", *more)
        done = dry_run(f"{join}{MARK}{script}", options=options)
        return done, (done.folder / f"ran-{1 - rank}").exists()

    return run


def test_a_rank_reads_what_another_sends(run):
    done, beside = run("""
    flags = torch.tensor([0, 3, 5] if rank == 0 else [0, 0, 0], device="cuda")
    dist.broadcast(flags, 0)
    print(flags.tolist(), flags[1].item(), int(flags.max() * 2), (flags > 0).nonzero().shape[0])
    flags[1:] *= 2
    flags[flags == 10] = 7
    print(flags.tolist())
    names = torch.zeros(4, dtype=torch.uint8, device="cuda")
    dist.broadcast(torch.tensor(list(b"adam"), dtype=torch.uint8, device="cuda") if rank == 0 else names, 0)
    print(bytes(names.cpu().numpy()))
    part = torch.zeros(2, dtype=torch.int32, device="cuda")
    parts = [torch.full((2,), 10 * each, dtype=torch.int32, device="cuda") for each in range(ranks)]
    dist.scatter(part, parts if rank == 0 else None, 0)
    print(part.cpu().tolist())
    ratio = torch.zeros(1, device="cuda")
    if rank == 0:
        dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.tensor([0.25], device="cuda"), 1)])
    else:
        [work.wait() for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, ratio, 0)])]
    print(ratio.item())
    import torch.distributed._functional_collectives as funcol
    sent = torch.tensor([8 - rank], device="cuda")
    print(funcol.broadcast(sent, 0, dist.group.WORLD).item())
    gloo = dist.new_group(backend="gloo")
    on_cpu = torch.tensor([7, 9] if rank == 0 else [0, 0])
    dist.broadcast(on_cpu, 0, group=gloo)
    print(on_cpu.tolist())
    torch.empty(int(flags.sum()) << 20, dtype=torch.uint8, device="cuda")
    """)
    said = "[0, 3, 5] 3 10 2", "[0, 6, 7]", "b'adam'", "[10, 10]", "0.25", "8", "[7, 9]"
    assert tuple(done.out.splitlines()[:7]) == said, done.err
    assert done.answer["peak"]["allocated"] >= 13 << 20
    assert beside


def test_what_a_script_does_not_read_starts_no_other_rank(run):
    done, beside = run("""
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4)).cuda()
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    for buffer in (torch.ones(8, device="cuda"), torch.ones(1 << 20, device="cuda")):
        dist.broadcast(buffer, 0)
        buffer.mul_(0.5)
    tokens = torch.ones(4, 8, dtype=torch.int64, device="cuda")
    dist.broadcast(tokens, 0)
    mask = (tokens + 1 > 3).to(torch.float32).sum(1)
    tokens[tokens == 1] = 0
    tokens[:, 1:] -= 1
    received = torch.empty(4, 16, device="cuda")
    dist.recv(received, 1 - rank)
    dist.send(received * 2, 1 - rank)
    replica = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(replica.parameters(), foreach=False)
    for _ in range(3):
        replica(received).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
    """)
    assert done.answer["verdict"] == "fits", done.err
    assert not beside


@pytest.mark.slow
def test_ranks_that_wait_for_each_others_tensors_are_named(run):
    done, _ = run("""
    size = torch.zeros(1, dtype=torch.int64, device="cuda")
    dist.recv(size, 1 - rank)
    torch.empty(size.item(), device="cuda")
    dist.send(size, 1 - rank)
    """)
    assert done.code == 3
    assert "script.py:13: Rank 1 reads a tensor that rank 0 sends, but the ranks 0, 1 wait" in done.err


def test_a_sender_that_fails_is_named(run):
    done, _ = run("""
    assert rank
    size = torch.zeros(1, dtype=torch.int64, device="cuda")
    dist.broadcast(size, 0)
    torch.empty(size.item(), device="cuda")
    """)
    assert done.code == 3
    said = "Rank 1 reads a tensor that rank 0 sends, but rank 0, which memfit ran beside it, ended without"
    assert said in done.err
    assert "run memfit with --rank 0" in done.err


def test_a_float_that_does_not_come_is_a_stand_in(run):
    done, _ = run("""
    assert rank
    loss = torch.zeros(1, device="cuda")
    dist.broadcast(loss, 0)
    print(loss.item())
    """)
    assert done.code == 0, done.err
    notes = [note["text"] for note in done.answer["notes"]]
    assert any(text.startswith("Rank 1 reads a tensor that rank 0 sends, but rank 0") for text in notes)


def test_a_file_that_no_rank_writes_is_named_with_the_barrier(run):
    done, beside = run("""
    dist.barrier()
    torch.ones(1, device="cuda")
    open("index.npy")
    """)
    assert beside
    said = "index.npy, which does not exist. Another rank may write it before the barrier at"
    assert said in done.err
    assert "but rank 0, which memfit ran up to there, has not written it." in done.err


@pytest.mark.slow
def test_barriers_wait_for_a_rank_that_runs_beside(run):
    done, beside = run("""
    import time
    size = torch.tensor([3 - 3 * rank], device="cuda")
    dist.broadcast(size, 0)
    torch.empty(size.item() << 20, dtype=torch.uint8, device="cuda")  # rank 0 runs from here on
    if rank == 0:
        with open("index", "w") as file:
            file.write("half of it,")
            file.flush()
            time.sleep(2)
            file.write(" and the rest")
    dist.barrier()
    print(open("index").read())
    dist.barrier()
    if rank == 0:
        os.remove("index")
    dist.barrier()
    print(os.path.exists("index"))
    """)
    assert done.out.splitlines()[:2] == ["half of it, and the rest", "False"], done.err
    assert beside


def test_a_loop_that_waits_for_a_file_ends_when_another_rank_has_written_it(run):
    done, beside = run("""
    import time
    if rank == 0:
        Path("ready").touch()
    while not Path("ready").exists():
        time.sleep(0.3)
    torch.ones(1 << 20, device="cuda")
    """)
    assert done.answer["peak"]["allocated"] == 4 << 20, done.err
    assert beside


@pytest.mark.slow
def test_a_loop_that_waits_for_a_file_of_nobody_is_refused(run):
    done, _ = run("""
    import time
    torch.ones(1, device="cuda")
    while rank and not os.path.exists("ready"):
        time.sleep(0.3)
    """)
    assert done.code == 3
    assert "waits in a loop for ready, which another rank must write, but rank 0" in done.err


@pytest.mark.slow
def test_a_spawned_rank_receives_from_one_that_is_spawned_beside(dry_run):
    script = """
    import os, torch
    import torch.distributed as dist, torch.multiprocessing as mp
    def main(rank, ranks):
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", rank=rank, world_size=ranks)
        size = torch.tensor([5 if rank == 0 else 0], device="cuda")
        dist.broadcast(size, 0)
        torch.empty(size.item() << 20, dtype=torch.uint8, device="cuda")
    if __name__ == "__main__":
        mp.spawn(main, args=(2,), nprocs=2)
    """
    options = ("--nproc", "2", "--rank", "1", "--gpu", "H100", "--to-end")
    done = dry_run(script, options=options)
    assert done.answer["peak"]["allocated"] == (5 << 20) + 512, done.err
