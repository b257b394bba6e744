"""Processes that the script starts run on the ghost too, and a run that leaves them out does not fit."""

from support.scripts import TRAIN

PARENT = """
    import subprocess, sys, torch
    torch.ones(1, device="cuda")
"""


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
    assert [child["name"].split()[1:] for child in run.answer["children"]] == [["script.py", "worker"]]


def test_spawned_and_forked_processes_are_named(dry_run):
    script = """
        import multiprocessing, torch
        def use_gpu(): torch.ones(1, device="cuda")
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
