"""A launcher in front of a script: one of its processes runs in place."""

import subprocess
import sys

import pytest

from memfit.errors import UsageError
from memfit.run.launchers import check_world_size_is_one, launched_script

ELASTIC = "torch.distributed.run"


@pytest.mark.parametrize(
    ("typed", "module", "command"),
    [
        ("torchrun x.py --lr 1", False, "x.py --lr 1"),
        ("torchrun --nproc_per_node=1 -- x.py --lr 1", False, "x.py --lr 1"),
        ("/env/bin/torchrun --standalone --nproc-per-node=gpu x.py", False, "x.py"),
        (f"{ELASTIC} --nnodes 1:1 --nproc_per_node 1 x.py -m", True, "x.py -m"),
        ("accelerate config", False, "accelerate config"),
        ("train.py torchrun", False, "train.py torchrun"),
    ],
)
def test_a_launcher_of_one_process_names_the_script_and_its_arguments(typed, module, command):
    found = launched_script(typed.split(), module=module)
    assert (" ".join(found.command), found.module) == (command, False)


def test_launchers_set_their_environment():
    torchrun = launched_script(["torchrun", "-m", "pkg.train"], module=False)
    assert torchrun.module
    assert {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items() <= torchrun.environment.items()


@pytest.mark.parametrize(
    ("typed", "nproc", "nnodes", "machine"),
    [
        ("torchrun --nproc-per-node 2 x.py", 2, 1, 0),
        ("torchrun --nnodes=1:4 --nproc_per_node=8 --node-rank 3 -m pkg.train", 8, 4, 3),
        ("torchrun --nproc-per-node gpu x.py", 1, 1, 0),
        ("deepspeed x.py --deepspeed zero3.json", 1, 1, 0),
        ("deepspeed --num_gpus=4 --master_port 29501 x.py", 4, 1, 0),
        ("deepspeed -i localhost:0,2,3 --bind_cores_to_rank x.py", 3, 1, 0),
        ("deepspeed --hostfile hosts --no_ssh --node_rank 1 x.py", 8, 3, 1),
        ("deepspeed -H hosts -e a@b:0,1,2,3@c:4,5,6,7 --module pkg.train", 4, 2, 0),
        ("deepspeed -H hosts --num_nodes 2 --num_gpus 2 x.py", 2, 2, 0),
    ],
)
def test_a_launcher_of_several_says_how_many_and_which_machine_this_is(
    typed, nproc, nnodes, machine, tmp_path, monkeypatch
):
    (tmp_path / "hosts").write_text("# machines\na slots=8\nb slots=8\nc slots=8\n")
    monkeypatch.chdir(tmp_path)
    found = launched_script(typed.split(), module=False)
    assert (found.nproc, found.nnodes, found.machine) == (nproc, nnodes, machine)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("torchrun --no_python x.sh", "torchrun --no_python: memfit runs Python scripts only"),
        ("torchrun --standalone", "the script is missing"),
        ("deepspeed --num_gpus 2", "the script is missing"),
        ("deepspeed --num_gpus two x.py", "deepspeed --num_gpus two: this is no number"),
        ("deepspeed --no_python x.sh", "deepspeed --no_python starts a program that is no Python script"),
        ("deepspeed --autotuning run x.py", "deepspeed --autotuning starts many jobs"),
        ("deepspeed -i a:0@b:0,1 x.py", "different numbers of processes (a: 1, b: 2). Give --num_gpus"),
    ],
)
def test_what_memfit_cannot_run_is_refused_with_what_to_type(typed, words):
    with pytest.raises(UsageError) as error:
        launched_script(typed.split(), module=False)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_world_size_without_its_peers_is_refused():
    check_world_size_is_one({"WORLD_SIZE": "1"})
    with pytest.raises(UsageError, match=r"WORLD_SIZE=2 is set.*write --nproc 2"):
        check_world_size_is_one({"WORLD_SIZE": "2"})


@pytest.mark.slow
@pytest.mark.process
def test_a_script_behind_torchrun_trains_in_place(tmp_path):
    (tmp_path / "x.py").write_text(
        "import sys, torch\ntorch.distributed.init_process_group('gloo')\n"
        "print(torch.distributed.get_world_size(), sys.argv)\nx = torch.ones(1, device='cuda')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "memfit", "dry-run", "torchrun", "--standalone", "x.py", "--lr", "1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("1 ['x.py', '--lr', '1']\nFITS"), done.stderr


@pytest.mark.process
def test_a_script_behind_torchrun_runs_as_the_rank_that_is_named(tmp_path):
    (tmp_path / "x.py").write_text(
        "import torch\nfrom torch import distributed as dist\ndist.init_process_group('nccl')\n"
        "print(dist.get_rank(), dist.get_world_size())\nx = torch.ones(1, device='cuda')\n"
    )

    def run(*options):
        command = [sys.executable, "-m", "memfit", "dry-run", *options, "torchrun", "--nproc-per-node=4"]
        return subprocess.run([*command, "x.py"], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert run("--rank", "3").stdout.startswith("3 4\nFITS")
    twice = run("--nproc", "2")
    assert (twice.returncode, "Two numbers of processes" in twice.stderr) == (2, True)


@pytest.mark.process
@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ((), ["--local_rank=2", "--lr", "1"]),
        pytest.param(("--no_local_rank",), ["--lr", "1"], marks=pytest.mark.slow),
    ],
)
def test_a_script_behind_deepspeed_gets_its_rank_as_an_argument(tmp_path, options, arguments):
    (tmp_path / "x.py").write_text(
        "import sys, torch\ntorch.distributed.init_process_group('nccl')\n"
        "print(torch.distributed.get_rank(), sys.argv[1:])\nx = torch.ones(1, device='cuda')\n"
    )
    launcher = ["deepspeed", "--num_gpus", "3", *options, "x.py", "--lr", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "memfit", "dry-run", "--rank", "2", *launcher],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith(f"2 {arguments}\nFITS"), done.stderr


@pytest.mark.slow
def test_a_script_that_joins_a_group_of_two_is_refused_and_does_not_wait(dry_run):
    script = """
        import os, torch
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512", "WORLD_SIZE": "2", "RANK": "0"}
        torch.distributed.init_process_group("gloo")
    """
    stored = """
        import torch
        from torch import distributed
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=2)
    """
    for joins in (script, stored):
        run = dry_run(joins)
        assert run.code == 3
        assert "The script joins a process group of 2, but memfit runs only one process" in run.err
