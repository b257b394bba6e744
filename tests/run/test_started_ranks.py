"""Scripts that start their ranks themselves: memfit measures the process that joins as the rank to run."""

import os
import re
import signal
import textwrap

import pytest

from support.new_processes import start_memfit

RANK = """
    import os, sys, time, torch
    from torch import distributed as dist, multiprocessing as mp, nn

    def train(rank, size, queue=None, steps=2):
        address = f"file://{os.path.abspath('meeting')}"
        dist.init_process_group("nccl", init_method=address, rank=rank, world_size=size)
        torch.cuda.set_device(rank)
        model = nn.parallel.DistributedDataParallel(nn.Linear(256, 256).cuda(), device_ids=[rank])
        optimizer = torch.optim.AdamW(model.parameters())
        for images in torch.utils.data.DataLoader(torch.ones(steps, 256), num_workers=1):
            optimizer.zero_grad()
            model(images.cuda()).mean().backward()
            optimizer.step()
        print("rank", rank, torch.cuda.max_memory_allocated(), flush=True)
        if queue is not None:
            queue.put(rank)
"""
FORKS = f"""{RANK}
    def start(ranks, size, *args, target=train):
        context = mp.get_context("fork")
        processes = [context.Process(target=target, args=(rank, size, *args)) for rank in ranks]
        for process in processes:
            process.start()
        return processes

    def join(processes):
        for process in processes:
            process.join()
        print("exit codes", [process.exitcode for process in processes])
"""


def run_as(dry_run, script, rank, nproc, *options):
    ranks = ("--nproc", f"{nproc}", "--rank", f"{rank}")
    return dry_run(script, options=(*ranks, *options))


def notes(run):
    return " ".join(note["text"] for note in run.answer["notes"])


@pytest.mark.slow
def test_a_rank_of_mp_spawn_is_measured_and_ends_the_script_after_its_steps(dry_run):
    script = f"""{RANK}
    if __name__ == "__main__":
        mp.spawn(train, args=(2,), nprocs=2)
        print("spawn has returned")
    """
    whole = run_as(dry_run, script, 1, 2, "--to-end")
    assert whole.code == 0, whole.err
    assert "The script ran as rank 1 of 2." in notes(whole)
    assert (whole.answer["verdict"], whole.answer["steps"], whole.answer["children"]) == ("fits", 2, [])
    (printed,) = re.findall(r"^rank 1 (\d+)$", whole.out, re.MULTILINE)
    assert int(printed) == whole.answer["peak"]["allocated"]
    assert "spawn has returned" in whole.out
    stopped = run_as(dry_run, script, 0, 2, "--steps", "1")
    assert (stopped.answer["steps"], stopped.answer["end"]["reason"]) == (1, "steps")
    assert not re.search("^rank|^spawn", stopped.out, re.MULTILINE)


@pytest.mark.warm
def test_a_rank_delivers_what_it_puts_in_a_queue_and_the_others_end_well(dry_run):
    script = f"""{FORKS}
    queue = mp.get_context("fork").Queue()
    processes = start(range(3), 3, queue)
    print("got", queue.get())
    join(processes)
    """
    run = run_as(dry_run, script, 1, 3, "--to-end")
    assert run.code == 0, run.err
    assert run.out.splitlines()[1:3] == ["got 1", "exit codes [0, 0, 0]"]


@pytest.mark.slow
@pytest.mark.warm
def test_the_scripts_own_process_may_be_a_rank_and_need_not_be_the_one_that_runs(dry_run):
    script = f"""{FORKS}
    processes = start(range(1, 3), 3)
    train(0, 3)
    join(processes)
    """
    for rank in (0, 2):
        run = run_as(dry_run, script, rank, 3, "--to-end")
        assert f"The script ran as rank {rank} of 3." in notes(run), run.err
        assert re.findall(r"^rank (\d)", run.out, re.MULTILINE) == [f"{rank}"]
        assert (run.answer["verdict"], run.answer["steps"]) == ("fits", 2)


@pytest.mark.slow
def test_ranks_that_are_commands_of_their_own_are_found(dry_run):
    script = f"""{RANK}
    import subprocess
    if len(sys.argv) == 1:
        ranks = [subprocess.Popen([sys.executable, "script.py", rank]) for rank in "01"]
        print("exit codes", [rank.wait() for rank in ranks])
    else:
        train(int(sys.argv[1]), 2)
        raise ValueError("no more data")
    """
    run = run_as(dry_run, script, 1, 2, "--to-end")
    assert run.answer["end"]["exception"] == "ValueError: no more data", run.err
    assert run.err.count("ValueError: no more data") == 1
    assert "exit codes [0, 1]" in run.out


@pytest.mark.warm
def test_a_rank_that_raises_is_reported_and_so_is_what_it_held(dry_run):
    script = f"""{FORKS}
    def fail(*args):
        train(*args)
        raise RuntimeError("boom")
    join(start(range(2), 2, target=fail))
    """
    run = run_as(dry_run, script, 1, 2, "--to-end")
    assert run.answer["end"]["exception"] == "RuntimeError: boom"
    assert (run.answer["verdict"], run.answer["steps"]) == ("unknown", 2)
    assert run.err.count("RuntimeError: boom") == 1
    assert "exit codes [0, 1]" in run.out


@pytest.mark.slow
def test_what_the_starting_process_holds_is_said_to_be_left_out(dry_run):
    script = f"""{RANK}
    def hold(rank, size):
        address = f"file://{{os.path.abspath('meeting')}}"
        dist.init_process_group("nccl", init_method=address, rank=rank, world_size=size)
        torch.ones(1, device=f"cuda:{{rank}}")

    if __name__ == "__main__":
        torch.ones(1, device="cuda")
        mp.spawn(hold, args=(1,), nprocs=1)
    """
    one = dry_run(script)  # a group of one needs no others: it is an ordinary child
    assert [child["name"] for child in one.answer["children"]] == ["SpawnProcess-1"], one.err
    two = run_as(dry_run, script.replace("(1,), nprocs=1", "(2,), nprocs=2"), 0, 2)
    assert "The script's own process, which started the ranks, used a GPU, too." in notes(two)


@pytest.mark.warm
def test_without_its_number_or_with_a_wrong_one_the_ranks_are_refused(dry_run):
    script = f"{FORKS}\n    join(start(range(2), int(sys.argv[1])))"
    alone = dry_run(script, "2")
    assert alone.code == 3
    assert "The script joins a process group of 2, but memfit runs only one process" in alone.err
    assert "Write --nproc 2" in alone.err
    of_eight = dry_run(script, "2", options=("--nproc", "8"))
    assert "The script joins a process group of 2, but memfit runs it as rank 0 of 8." in of_eight.err
    absent = dry_run(script, "4", options=("--nproc", "2", "--nnodes", "2", "--rank", "3"))
    assert (absent.code, absent.answer) == (3, None)
    assert "No process of the script joined its process group as rank 3 of 4" in absent.err
    assert "they joined as 0, 1." in absent.err


@pytest.mark.slow
@pytest.mark.process
def test_ctrl_c_ends_the_rank_and_shows_what_it_held(tmp_path):
    script = f"""{FORKS}
    join(start(range(2), 2, None, 100_000))
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    process = start_memfit("dry-run", "--nproc", "2", "--to-end", "script.py", cwd=tmp_path)
    for line in process.stderr:
        if "step" in line:
            break
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, out
    assert "The script ended with KeyboardInterrupt" in out
