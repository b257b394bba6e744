"""memfit started by torchrun: a ghost per rank, and the ranks really meet."""

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest

import memfit
from memfit.api.run_as_torchrun_rank import SharedTraces
from memfit.run.job_rank import Rank
from memfit.run.launchers import rank_started_by_torchrun
from support.new_processes import run_python
from support.scripts import JOIN

VARIABLES = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job",
}


@pytest.fixture
def torchrun(tmp_path):
    """Return a function that runs a script on two ghosts, as two ranks of torchrun."""

    def run(script, *options):
        (tmp_path / "script.py").write_text(textwrap.dedent(script))
        launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        command = (*launch, "-m", "memfit", "dry-run", "--to-end", *options, "script.py")
        return run_python(*command, cwd=tmp_path, timeout=120, TMPDIR=str(tmp_path), OMP_NUM_THREADS="1")

    return run


@pytest.mark.slow
@pytest.mark.process
def test_ranks_exchange_what_is_short_and_the_first_reports_on_all(torchrun, tmp_path):
    script = f"""{JOIN}
    import pathlib
    if rank == 1:
        pathlib.Path("prepared").touch()
    dist.barrier()
    assert pathlib.Path("prepared").exists()  # the barrier waits
    sizes = torch.zeros(2, dtype=torch.int64, device="cuda")
    dist.all_gather_single(sizes, torch.tensor([70 + rank], device="cuda"))
    assert sizes.tolist() == [70, 71]
    chosen = torch.tensor([rank + 5], device="cuda")
    dist.broadcast(chosen, 1)
    assert chosen.item() == 6
    parts = torch.tensor([10 * rank, 10 * rank + 1], device="cuda")
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts)
    assert received.tolist() == [rank, 10 + rank]
    objects = [None, None]
    dist.all_gather_object(objects, {{"rank": rank}})
    assert objects == [{{"rank": 0}}, {{"rank": 1}}]
    shape = torch.tensor([3, 70 + rank], device="cuda")
    received = torch.empty_like(shape)
    receipt = dist.irecv(received, 1 - rank)
    dist.isend(shape, 1 - rank)
    receipt.wait()
    assert received.tolist() == [3, 71 - rank]  # reading it waits for it; receiving does not
    own = ["only the first has this"] if rank == 0 else [None]
    dist.broadcast_object_list(own, src=0)
    assert own == ["only the first has this"]
    total = torch.ones(1, device="cuda") * 3
    dist.all_reduce(total)
    assert total.item() == 6
    layer = nn.parallel.DistributedDataParallel(nn.Linear(64, 64).cuda())
    layer(torch.ones(1, 64, device="cuda")).sum().backward()
    x = torch.empty((1 + rank) << 24, dtype=torch.uint8, device="cuda")
    """
    done = torchrun(script, "--json", "answer.json", "-o", "largest.memfit")
    assert done.returncode == 0, done.stderr
    answer = memfit.explain(tmp_path / "largest.memfit").summary
    assert done.stdout.count("FITS") == 1
    rows = [line.split()[:2] for line in done.stdout.splitlines()]
    assert [row[0] for row in rows if row[1:] == ["fits"]] == ["1", "0"], done.stdout
    assert answer.peak_allocated > 1 << 25
    assert not list(tmp_path.glob("memfit-ranks-*"))


@pytest.mark.slow
@pytest.mark.process
def test_stages_of_a_pipeline_infer_their_shapes_from_each_other(torchrun):
    script = f"""{JOIN}
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    device = torch.device("cuda", rank)
    widths = [64, 512, 128]  # each stage passes on another shape
    part = nn.Linear(widths[rank], widths[rank + 1], bias=False).to(device)
    # The last knows its shapes; it infers them because the first must.
    shapes = {{"input_args": torch.ones(32, 512), "output_args": torch.ones(32, 128)}} if rank else {{}}
    stage = PipelineStage(part, rank, ranks, device, **shapes)
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    schedule.step(*[torch.ones(128, 64, device=device)][: rank == 0],
                  target=torch.ones(128, 128, device=device) if rank else None)
    print(*[tuple(each.buffer.shape) for each in stage.args_recv_info[0] if rank], *part.weight.grad.shape)
    """
    done = torchrun(script)
    assert done.returncode == 0, done.stderr
    assert {"512 64", "(32, 512) 128 512"} <= set(done.stdout.splitlines()), done.stdout


@pytest.mark.slow
@pytest.mark.process
def test_a_rank_that_fails_is_reported_and_ends_the_others(torchrun):
    script = f"""{JOIN}
    if rank == 1:
        raise ValueError("no data for me")
    dist.barrier()
    """
    done = torchrun(script)
    assert done.returncode == 1
    assert "The script ended with ValueError: no data for me" in done.stdout
    assert done.stdout.count("INCOMPLETE") == 1


@pytest.mark.process
def test_options_that_name_other_ranks_are_refused_under_torchrun(tmp_path):
    (tmp_path / "script.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "memfit", "dry-run", "--nproc", "2", "script.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | VARIABLES,
    )
    assert done.returncode == 2
    assert "torchrun has started memfit as rank 5 of 8 (GPU 1 of machine 1)" in done.stderr


def test_torchruns_variables_name_the_rank():
    assert rank_started_by_torchrun(VARIABLES) == Rank(rank=5, nproc=4, nnodes=2)
    assert rank_started_by_torchrun(VARIABLES | {"WORLD_SIZE": "1"}) is None
    assert rank_started_by_torchrun({"RANK": "5", "WORLD_SIZE": "8"}) is None  # of another launcher


def test_the_ranks_of_a_machine_meet_in_a_folder_without_what_an_earlier_job_left(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def job(**more):
        ranks = [Rank(rank=4 + local, nproc=2, nnodes=4) for local in (0, 1)]
        return [SharedTraces(rank, VARIABLES | more, "early") for rank in ranks]

    def exchange(ranks, remarks):
        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(SharedTraces.exchange, ranks, remarks))

    ranks = job()
    assert ranks[0].prepare().parent == ranks[1].prepare().parent
    assert ranks[0].prepare().parent != job(MASTER_PORT="29501")[0].prepare().parent
    assert exchange(ranks, ["", "streams race"]) == [{4: "", 5: "streams race"}] * 2
    again = job()
    for rank in again:
        rank.prepare()
    assert exchange(again, ["one", "two"]) == [{4: "one", 5: "two"}] * 2
    again[0].remove()
    assert not again[0].trace(4).parent.exists()
