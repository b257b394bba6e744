"""Commands on a function that makes a job, in place of a script: what they plan is what an engine does."""

import json
import textwrap

import pytest

from support.scripts import FEED_FORWARD
from support.warm_process import memfit, verify_on_cpu

pytestmark = pytest.mark.process

JOB = f"""{FEED_FORWARD}
    import memfit


    def make_job():
        model = nn.Sequential(*(Block(256) for _ in range(8)), nn.Linear(256, 10))
        return memfit.Job(
            model,
            torch.optim.AdamW,
            lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
            batch=lambda size: (torch.randn(size, 256), torch.zeros(size, dtype=torch.long)),
        )
"""
LOOP = """
    import sys
    import memfit
    from job import make_job

    job = make_job()
    job.model.cuda()
    engine = memfit.Engine(job, sys.argv[1])
    while True:
        engine.step(tuple(tensor.cuda() for tensor in job.batch(32768)))
"""
BATCH = ("--batch-size", 32768)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    (folder / "job.py").write_text(textwrap.dedent(JOB))
    (folder / "train.py").write_text(textwrap.dedent(LOOP))
    return folder


@pytest.fixture(
    scope="module",
    params=[(), pytest.param(("--bitwise",), marks=pytest.mark.slow)],
    ids=["divided", "recomputed"],
)
def planned(request, job):
    plan = job / f"plan{len(request.param)}.json"
    done = memfit("plan", *request.param, "--budget", "1.6GiB", "-o", plan, f"{job}/job.py:make_job", *BATCH)
    assert done.returncode == 0, done.stderr
    return plan, done.stdout


def allocated(*arguments):
    done = memfit("dry-run", "--json", "-", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["peak"]["allocated"]


def test_an_engine_under_the_plan_allocates_what_the_plan_says_to_the_byte(planned, job):
    plan, text = planned
    found = json.loads(plan.read_text())
    assert f"{job}/job.py:make_job · A100-80GB" in text
    assert f'engine = memfit.Engine(make_job(), "{plan}")' in text
    assert found["allocated"] == allocated("--plan", plan, f"{job}/job.py:make_job", *BATCH)
    assert found["allocated"] == allocated(f"{job}/train.py", plan)
    assert found["allocated"] < found["as_written"]["allocated"]


def test_batches_are_divided_by_the_engine_and_nothing_is_to_be_changed_in_a_loop(job, planned):
    plan, text = planned
    divided = json.loads(plan.read_text())["micro_batches"]
    if divided is None:
        assert "Recomputed in the backward:" in text
        return
    assert json.loads(plan.read_text())["plan"]["accumulation"] == {"parts_per_batch": divided["count"]}
    assert (divided["by_engine"], divided["arguments"][0]) == (True, "--parts-per-batch")
    assert "    memfit.Engine divides the batches that it is given.\n" in text
    assert "loss = loss /" not in text


@pytest.mark.slow
def test_the_gradients_under_the_plan_are_the_same_for_a_batch_of_another_size(planned, job):
    plan, _ = planned
    done = verify_on_cpu("--plan", plan, f"{job}/job.py:make_job", "--batch-size", "64")
    assert done.stdout.startswith("VERIFIED   the gradients of all 34 parameters are equal "), done.stdout


@pytest.mark.slow
def test_the_largest_batch_of_a_job_is_found(job):
    done = memfit(
        "max-batch", "--budget", "1GiB", "--json", "-", "--multiple", 1024, f"{job}/job.py:make_job"
    )
    assert done.returncode == 0, done.stderr
    best = json.loads(done.stdout)["largest"]
    assert best > 0
    assert best % 1024 == 0


def test_what_is_no_target_is_named_with_what_to_do(job):
    done = memfit("plan", "--budget", "1GiB", f"{job}/job.py:other")
    assert done.returncode == 3
    assert "has no function other. Define one that returns a job: memfit.Job(" in done.stderr
