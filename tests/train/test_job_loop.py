"""The loop that trains a ``memfit.Job`` for commands, and what it says of targets that are none."""

import sys
import textwrap

import pytest
import torch

from memfit.train import job_loop

JOB = """
    import torch
    import memfit
    from beside import WIDTH

    seen = []

    def loss(model, batch):
        seen.append(len(batch[0]))
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    def make_job():
        model = torch.nn.Linear(WIDTH, 3)
        batch = lambda size: (torch.randn(size, WIDTH), torch.zeros(size, dtype=torch.long))
        return memfit.Job(model, torch.optim.SGD, loss, batch=batch)

    def no_job():
        return torch.nn.Linear(2, 2)

    def no_batch():
        return memfit.Job(torch.nn.Linear(2, 2), torch.optim.SGD, loss)

    number = 3
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "beside.py").write_text("WIDTH = 5\n")
    file = tmp_path / "some_job.py"
    file.write_text(textwrap.dedent(JOB))
    yield file
    for name in ("some_job", "beside"):
        sys.modules.pop(name, None)


def test_each_step_takes_a_batch_which_the_engine_divides(job):
    arguments = [f"{job}:make_job", "--batch-size", "6", "--steps", "2", "--device", "cpu"]
    job_loop.main(arguments)
    assert sys.modules["some_job"].seen == [6, 6]
    job_loop.main([*arguments, "--parts-per-batch", "3"])
    assert sys.modules["some_job"].seen == [2] * 6


def test_a_job_ends_where_memory_runs_out_and_is_not_tried_again_in_smaller_parts(job, monkeypatch):
    def runs_out(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", runs_out)
    with pytest.raises(torch.OutOfMemoryError):
        job_loop.main([f"{job}:make_job", "--batch-size", "6", "--device", "cpu"])
    assert sys.modules["some_job"].seen == [6]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("missing", r"some_job.py has no function missing. Define one that returns a job: memfit.Job\("),
        ("number", "some_job.py has no function number"),
        ("no_job", r"no_job\(\) in .*some_job.py returned Linear. Have it return a job: memfit.Job\("),
        ("no_batch", r"The job of no_batch\(\) in .*some_job.py makes no batches. Add batch: memfit.Job\("),
    ],
)
def test_what_makes_no_job_is_refused_by_name(job, function, message):
    with pytest.raises(SystemExit, match=message):
        job_loop.main([f"{job}:{function}", "--device", "cpu"])


def test_a_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(SystemExit, match=r"There is no file .*nowhere.py. Write the path of one: FILE.py:"):
        job_loop.main([f"{tmp_path}/nowhere.py:make_job"])
