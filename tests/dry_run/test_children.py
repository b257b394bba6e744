"""Processes that the script starts run on the ghost too, and a run that leaves them out does not fit."""

from pathlib import Path

import pytest

from support.scripts import TRAIN

PARENT = """
    import subprocess, sys, torch
    torch.ones(1, device="cuda")
"""


@pytest.mark.slow
def test_a_failing_child_that_used_the_gpu_makes_the_run_incomplete_and_is_named(dry_run, tmp_path):
    (tmp_path / "worker.py").write_text(
        "import torch\nx = torch.ones(1 << 28, device='cuda')\nraise RuntimeError('boom')\n"
    )
    run = dry_run(PARENT + "    print(subprocess.run([sys.executable, 'worker.py']).returncode)\n")
    assert run.out.startswith("1\n")
    assert run.answer["verdict"] == "unknown"
    (child,) = run.answer["children"]
    assert child["name"].endswith(" worker.py")
    assert 1 << 30 < child["peak"]["bytes"] < 2 << 30
    assert child["exception"] == "RuntimeError: boom"
    assert "INCOMPLETE   needs 0.50 GiB of 79.25 GiB without children\n" in run.out
    assert "worker.py, which the script started, also used the GPU (at least 1.5" in run.out


@pytest.mark.slow
def test_a_child_trains_for_as_many_steps_as_the_script_and_ends_well(dry_run):
    script = (
        TRAIN.replace("\n    ", "\n        ")
        + """
        import sys
        if len(sys.argv) > 1:
            while True: step()
        import subprocess
        print(subprocess.run([sys.executable, "script.py", "worker"]).returncode)
    """
    )
    run = dry_run(script)
    assert run.out.startswith("0\n")
    assert (run.code, run.answer["verdict"]) == (3, "unknown")
    assert [child["name"].split()[1:] for child in run.answer["children"]] == [["script.py", "worker"]]


@pytest.mark.slow
def test_spawned_and_forked_processes_are_named(dry_run):
    script = """
        import multiprocessing, torch
        def use_gpu(): torch.cuda.synchronize()
        if __name__ == "__mp_main__":
            use_gpu()  # as a spawned process imports the script
        if __name__ == "__main__":
            for method in ("fork", "spawn"):
                process = multiprocessing.get_context(method).Process(target=use_gpu, name=method)
                process.start()
                process.join()
                print(process.exitcode)
            use_gpu()
    """
    run = dry_run(script)
    assert run.out.startswith("0\n0\n")
    assert [child["name"] for child in run.answer["children"]] == ["fork", "spawn"]


@pytest.mark.slow
def test_workers_of_a_loader_do_not_change_the_verdict(dry_run):
    script = """
        import torch
        if __name__ == "__main__":
            torch.ones(1, device="cuda")
            for method in ("fork", "spawn"):
                for batch in torch.utils.data.DataLoader(
                    torch.ones(4, 1), num_workers=1, multiprocessing_context=method
                ):
                    batch.to("cuda")
    """
    run = dry_run(script)
    assert (run.answer["verdict"], run.answer["children"]) == ("fits", [])


def test_a_script_whose_child_alone_uses_the_gpu_is_told_to_run_the_child(dry_run, tmp_path):
    (tmp_path / "worker.py").write_text("import torch\ntorch.ones(1, device='cuda')\n")
    run = dry_run("import subprocess, sys; subprocess.run([sys.executable, 'worker.py'])")
    assert run.code == 3
    assert "script.py did not use the GPU itself, but a process that it started did: python" in run.err


@pytest.mark.slow
def test_a_refused_script_leaves_no_process(dry_run):
    script = """
        import subprocess, torch
        print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
        torch.ones(1, device="cuda")
        torch.distributed.init_process_group("nccl", "tcp://127.0.0.1:1", rank=0, world_size=3)
    """
    run = dry_run(script, options=("--nproc", "2"))
    assert run.code == 3
    status = Path(f"/proc/{int(run.out)}/status")
    assert not status.exists() or "zombie" in status.read_text()


def children_of(run):
    """Return the GiB and the failure of each child, by its name."""
    return {
        child["name"]: (child["peak"] and child["peak"]["bytes"] >> 30, child["exception"])
        for child in run.answer["children"]
    }


@pytest.mark.slow
def test_a_child_that_memfit_cannot_follow_is_named(dry_run, tmp_path):
    (tmp_path / "worker.py").write_text("import time, torch\ntime.sleep(2)\n")
    script = """
        import subprocess, sys, torch
        subprocess.run([sys.executable, "-I", "worker.py"], check=True)
        subprocess.run([sys.executable, "worker.py"], check=True, env={})
        subprocess.run([sys.executable, "worker.py"], check=True)
        torch.ones(1, device="cuda")
    """
    run = dry_run(script, options=("--fail",))
    assert (run.code, run.answer["verdict"]) == (3, "unknown")
    names = sorted(name.partition(" ")[2] for name in children_of(run))  # process IDs may have begun anew
    assert names == ["-I worker.py", "worker.py"]
    assert set(children_of(run).values()) == {(None, "")}
    assert "which the script started, loads PyTorch where memfit cannot follow it" in run.out


@pytest.mark.slow
def test_a_detached_process_that_memfit_cannot_follow_is_named(dry_run, tmp_path):
    (tmp_path / "worker.py").write_text(
        "import pathlib, time, torch\npathlib.Path('up').touch()\ntime.sleep(3)\n"
    )
    script = """
        import os, subprocess, sys, time, torch
        command = f"setsid nohup {sys.executable} -I worker.py > log 2>&1 &"
        subprocess.run(command, shell=True, check=True)
        while not os.path.exists("up"): time.sleep(0.1)
        time.sleep(1)
        torch.ones(1, device="cuda")
    """
    run = dry_run(script)
    assert run.answer["verdict"] == "unknown"
    assert [name.partition(" ")[2] for name in children_of(run)] == ["-I worker.py"]


@pytest.mark.slow
def test_children_that_leave_early_are_recorded_with_what_they_held_and_how_they_failed(dry_run):
    script = """
        import multiprocessing, os, signal, sys, torch
        def hold(gib):
            tensor = torch.empty(gib << 30, dtype=torch.uint8, device="cuda")
            torch.ones(1, device="cuda", requires_grad=True).sum().backward()
        def kill(): hold(2); os.kill(os.getpid(), signal.SIGKILL)
        def leave(): hold(3); os._exit(5)
        def exit(): hold(4); sys.exit("no configuration")
        def run_out(): hold(1000)
        def recover():
            try: hold(1000)
            except torch.OutOfMemoryError: hold(5)
        if __name__ == "__main__":
            for work in (kill, leave, exit, run_out, recover):
                process = multiprocessing.get_context("fork").Process(target=work, name=work.__name__)
                process.start()
                process.join()
            process = multiprocessing.get_context("spawn").Process(target=run_out, name="spawned")
            process.start()
            process.join()
            torch.ones(1, device="cuda")
    """
    run = dry_run(script)
    found = children_of(run)
    assert (found["kill"], found["leave"]) == ((2, ""), (3, "exit code 5"))
    assert (found["exit"], found["recover"]) == ((4, "exit code 1"), (5, ""))
    ran_out = (0, "out of memory: 1,000.0 GiB requested, 78.8 GiB free")
    assert found["run_out"] == found["spawned"] == ran_out
    assert "(at least 0.50 GiB), and failed: out of memory: 1,000.0 GiB requested" in run.out


@pytest.mark.slow
def test_a_program_that_exits_with_a_message_ends_by_itself_or_runs_out_is_recorded(dry_run, tmp_path):
    use = "import sys, torch\ntorch.ones(1, device='cuda')\n"
    (tmp_path / "stops.py").write_text(use + "sys.exit('no configuration')\n")
    (tmp_path / "goes_on.py").write_text(use + "try: sys.exit(2)\nexcept SystemExit: pass\n"
        "torch.ones(1, device='cuda', requires_grad=True).sum().backward()\n")  # fmt: skip
    (tmp_path / "runs_out.py").write_text(use + "torch.empty(1000 << 30, dtype=torch.uint8, device='cuda')\n")
    names = ("stops.py", "goes_on.py", "runs_out.py")
    run = dry_run(PARENT + f"    for name in {names}: subprocess.run([sys.executable, name])\n")
    assert sorted(failure for _, failure in children_of(run).values()) == [
        "",
        "no configuration",
        "out of memory: 1,000.0 GiB requested, 78.8 GiB free",
    ]


def test_a_child_that_outlives_the_script_and_a_fork_that_cannot_use_cuda_are_named(dry_run, tmp_path):
    later = "import os, time\nwhile not os.path.exists('end'): time.sleep(0.1)"
    (tmp_path / "later.py").write_text(f"{later}\nif False: import torch\n")
    script = f"""
        import multiprocessing, subprocess, sys, torch
        def use_gpu(): torch.ones(1, device="cuda")
        if __name__ == "__main__":
            use_gpu()
            process = multiprocessing.get_context("fork").Process(target=use_gpu, name="late fork")
            process.start()
            process.join()
            quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # memfit's end is not theirs
            subprocess.Popen([sys.executable, "later.py"], **quiet)
            subprocess.Popen([sys.executable, "-m", "timeit", "-n1", "-r1", {later!r}], **quiet)
    """
    run = dry_run(script, options=("--fail",))
    (tmp_path / "end").touch()
    assert (run.code, run.answer["verdict"]) == (3, "unknown")
    found = children_of(run)
    assert found.pop("late fork") == (None, "CUDA cannot be used in a fork of a process that has used it")
    why = "it still ran when the script ended, and may use the GPU later"
    assert list(found.values()) == [(None, why)]  # timeit is of the standard library
    assert f"later.py, which the script started: {why}." in run.out
