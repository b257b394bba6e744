"""A dry run of every rank of a job: a role for ranks that hold the same, and the largest in full."""

import pytest

import memfit
from memfit.errors import UsageError
from memfit.records import JobRank
from memfit.timing.step_time import step_time_of_trace
from memfit.trace.trace_file import read_trace
from support.scripts import JOIN

pytestmark = pytest.mark.warm

UNEVEN = f"""{JOIN}
    last = ranks - 1
    print(f"rank {{rank}} ran")
    mebibytes = 40 if rank == last else 20 if rank else 30
    x = torch.empty(mebibytes << 20, dtype=torch.uint8, device="cuda")
"""


def test_each_role_has_a_row_and_the_largest_is_the_answer(dry_run, tmp_path):
    trace = tmp_path / "largest.memfit"
    run = dry_run(UNEVEN, options=("--nproc", "4", "--all-ranks", "-o", str(trace)))
    assert run.code == 0, run.err
    found = [(row["rank"], row["also"], row["peak"]["allocated"]) for row in run.answer["ranks"]]
    mib = 1 << 20
    assert found == [
        (3, [], {"least": 40 * mib, "most": 40 * mib}),
        (0, [], {"least": 30 * mib, "most": 30 * mib}),
        (1, [2], {"least": 20 * mib, "most": 20 * mib}),
    ]
    assert run.answer["peak"]["allocated"] == 40 * mib
    assert all(row["line"].endswith(":11") for row in run.answer["ranks"])
    assert memfit.explain(trace).summary.peak_allocated == 40 * mib


@pytest.mark.slow
def test_of_many_machines_the_ends_run_and_what_differs_between_them(dry_run):
    run = dry_run(UNEVEN, options=("--nproc", "1", "--nnodes", "6", "--all-ranks"))
    assert run.code == 0, run.err
    found = [(row["rank"], row["also"]) for row in run.answer["ranks"]]
    assert found == [(5, []), (0, []), (1, [2, 3, 4])]


def test_the_table_lists_every_rank_and_each_keeps_a_trace_of_its_own(dry_run, tmp_path):
    files = ("-o", "rank-{rank}.memfit", "--html", "ranks.html")
    run = dry_run(UNEVEN, options=("--nproc", "3", "--all-ranks", *files), json_answer=False)
    lines = [line.split() for line in run.out.splitlines()]
    table = [line[:3] for line in lines if line[1:2] == ["fits"]]
    assert table == [["2", "fits", "40.00"], ["0", "fits", "30.00"], ["1", "fits", "20.00"]], run.out
    traces = [memfit.explain(tmp_path / f"rank-{rank}.memfit").summary for rank in range(3)]
    assert [trace.peak_allocated >> 20 for trace in traces] == [30, 20, 40]
    assert [trace.rank for trace in traces] == [JobRank(rank, 3, 3) for rank in range(3)]
    assert "Traces: rank-{rank}.memfit  (memfit diff rank-2.memfit rank-1.memfit)" in run.err
    assert "Every rank; the rest of this page is about rank 2" in (tmp_path / "ranks.html").read_text()


WORKING = f"""{JOIN}
    held = torch.empty(500 * (1 + rank) << 20, dtype=torch.uint8, device="cuda")
    layer = torch.nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(3):
        x = torch.ones(64, 64, device="cuda")
        for _ in range(1 if rank else 20):
            x = layer(x)
        x.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_the_time_of_a_step_is_that_of_the_slowest_rank(dry_run, tmp_path):
    run = dry_run(WORKING, options=("--nproc", "2", "--all-ranks", "-o", "rank-{rank}.memfit"))
    slow, large = (step_time_of_trace(read_trace(tmp_path / f"rank-{rank}.memfit")) for rank in range(2))
    assert run.answer["rank"]["rank"] == 1
    assert run.answer["step_time"]["seconds"] == pytest.approx(slow.seconds)
    assert slow.seconds > 2 * large.seconds


def test_a_rank_that_fails_is_named(dry_run):
    script = UNEVEN.replace("mebibytes =", "assert rank < 2, 'no data for me'\n    mebibytes =")
    run = dry_run(script, options=("--nproc", "3", "--all-ranks"))
    assert run.code == 3
    assert "no data for me" in run.err
    found = [(row["rank"], row["verdict"]) for row in run.answer["ranks"]]
    assert found == [(2, "unknown"), (0, "fits"), (1, "fits")]
    assert run.answer["end"]["exception"] == "AssertionError: no data for me"


def test_a_rank_that_memfit_refuses_to_run_is_named(dry_run):
    receive = (
        "if dist.get_rank() == 1:\n        dist.broadcast_object_list([None], src=0)  # which sends nothing"
    )
    script = UNEVEN.replace("mebibytes =", f"{receive}\n    mebibytes =")
    run = dry_run(script, options=("--nproc", "2", "--all-ranks"))
    assert run.code == 3
    assert "Rank 1 of 2: torch.distributed.broadcast_object_list" in run.err, run.err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--all-ranks",), "--all-ranks: the job has one rank."),
        (("--all-ranks", "--nproc", "4", "--rank", "2"), "give one of the two."),
        (("--all-ranks", "--rank", "1"), "give one of the two."),
        (("--all-ranks", "--nproc", "4", "--advise"), "--advise looks at one rank"),
    ],
)
def test_options_that_contradict_are_refused(dry_run, options, says):
    run = dry_run(UNEVEN, options=options)
    assert run.code == 2
    assert says in run.err


def test_one_rank_and_all_ranks_are_refused_in_python_too():
    with pytest.raises(UsageError, match="give one of the two"):
        memfit.dry_run("train.py", all_ranks=True, rank=1)
