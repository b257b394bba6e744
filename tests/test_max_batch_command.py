"""``memfit max-batch`` on scripts: a dry run agrees at the largest batch size, and at the next."""

import json
import textwrap
from pathlib import Path

import pytest

from support.warm_process import memfit

pytestmark = pytest.mark.process

NETWORK = """
    import argparse
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    parser = argparse.ArgumentParser()
    parser.add_argument({option!r}, type=int, default=2, dest="size")
    size = parser.parse_args().size
    network = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4))).cuda()
    optimizer = torch.optim.AdamW(network.parameters())
    data = TensorDataset(torch.empty({samples}, 1000, 256))
    for (rows,) in DataLoader(data, batch_size={size}):
        network(rows.cuda()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
BUDGET = "640MiB"
EXAMPLES = Path(__file__).parents[1] / "examples"


def script_in(folder, *, option="--batch-size", samples=40, size="size"):
    script = folder / "train.py"
    script.write_text(textwrap.dedent(NETWORK).format(option=option, samples=samples, size=size))
    return script


def largest(*arguments, budget=BUDGET):
    done = memfit("max-batch", "--budget", budget, "--json", "-", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_dry_run_fits_with_the_largest_batch_and_runs_out_with_the_next(tmp_path):
    script = script_in(tmp_path)
    found = largest(script)
    n = found["largest"]
    assert (found["limit"], found["as_written"], found["how"]) == ("memory", 2, f"--batch-size {n}, now 2")
    runs = {run["size"]: run for run in found["runs"]}
    assert (runs[n]["fits"], runs[n + 1]["fits"]) == (True, False)
    for size, verdicts in ((n, ("fits", "tight")), (n + 1, ("out of memory",))):
        done = memfit("dry-run", "--memory", BUDGET, "--json", "-", script, "--batch-size", size)
        result = json.loads(done.stdout)
        assert result["verdict"] in verdicts
        assert result["peak"]["allocated"] <= runs[size]["allocated"]["bytes"]
        assert result["verdict"] == "out of memory" or (
            result["peak"]["allocated"] == runs[size]["allocated"]["bytes"]
        )


@pytest.mark.slow
@pytest.mark.parametrize("example", ["gpt", "resnet50", "unet", "hf_trainer", "lstm"])
def test_dry_runs_of_examples_agree_at_half_as_much_memory_again_as_they_need(example):
    script = EXAMPLES / f"{example}.py"
    written = json.loads(memfit("dry-run", "--json", "-", script).stdout)
    budget = f"{written['peak']['process'] * 3 // 2 >> 20}MiB"
    found = largest(script, budget=budget)
    n = found["largest"]
    assert (found["limit"], n > found["as_written"]) == ("memory", True)
    option = found["how"].split()[0]
    for size, fits in ((n, True), (n + 1, False)):
        done = memfit("dry-run", "--memory", budget, "--json", "-", script, option, size)
        assert (json.loads(done.stdout)["verdict"] != "out of memory") is fits


@pytest.mark.slow
def test_the_loader_or_a_named_option_sets_it_where_no_option_is_recognised(tmp_path):
    script = script_in(tmp_path, option="--rows")
    expected = largest("--option", "--rows", script, "--rows", "2")
    assert expected["how"] == f"--rows {expected['largest']}, now 2"
    found = largest(script)
    assert found["largest"] == expected["largest"]
    assert found["how"] == f"DataLoader(batch_size={found['largest']}), now 2"
    assert found["where"] == f"{script}:13"


def test_the_data_may_end_first(tmp_path):
    found = largest(script_in(tmp_path, samples=5))
    assert (found["largest"], found["limit"]) == (5, "data")
    assert found["remarks"][0] == (
        "With batch size 5, the script completed 1 training step instead of 3: it has no more data."
    )


def test_no_batch_size_that_can_be_changed_is_an_error_that_says_what_to_do(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import torch\ntorch.ones(1000).cuda()\n")
    done = memfit("max-batch", script)
    assert done.returncode == 2
    assert "name it: --option --samples" in done.stderr


def test_fail_is_for_a_script_that_fits_with_no_batch(tmp_path):
    script = script_in(tmp_path)
    done = memfit("max-batch", "--budget", "530MiB", "--fail", script)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("NO BATCH FITS   batch size 1 needs ")


@pytest.mark.slow
def test_the_batch_of_a_rank_is_the_largest_beside_the_buckets_of_ddp(tmp_path):
    script = script_in(tmp_path)
    wrapped = "optimizer = torch.optim"
    script.write_text(
        script.read_text().replace(
            wrapped,
            "torch.distributed.init_process_group()\n"
            f"network = nn.parallel.DistributedDataParallel(network)\n{wrapped}",
        )
    )
    budget = "1216MiB"  # NCCL takes 544 MiB of it
    n = largest("--nproc", "2", script, budget=budget)["largest"]
    for size, fits in ((n, True), (n + 1, False)):
        ranks = ("--nproc", "2", "--memory", budget)
        done = memfit("dry-run", *ranks, "--json", "-", script, "--batch-size", size)
        assert (json.loads(done.stdout)["verdict"] != "out of memory") == fits
