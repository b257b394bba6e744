"""Out of memory on the ghost is a result: the place, the bytes requested, and the shortfall."""

import os

import pytest

from support.scripts import TRAIN, figures

pytestmark = pytest.mark.warm


def test_out_of_memory_is_a_result(dry_run):
    script = """
        import torch
        model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(4)]).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            loss = model(torch.randn(4096, 4096, device="cuda")).sum()
            loss.backward()
            optimizer.step()
    """
    run = dry_run(script, options=("--memory", "1200MiB"))
    failure = run.answer["out_of_memory"]
    assert run.code == 0
    assert run.answer["verdict"] == "out of memory"
    assert failure["step"] == 1
    assert failure["phase"] in ("backward", "optimizer")
    assert failure["requested"] > 0
    assert failure["shortfall"] > 0
    assert failure["shortfall"] <= failure["requested"] + (2 << 20)
    assert "OUT OF MEMORY" in run.out
    needed = run.answer["needs"]["bytes"]
    assert needed > 1200 << 20
    assert dry_run(script, options=("--memory", str(needed))).answer["out_of_memory"] is None
    assert dry_run(script, options=("--memory", str(needed - (2 << 20)))).answer["verdict"] == "out of memory"
    assert f"needs {needed / (1 << 30):.2f} GiB; this GPU has 1.17 GiB\n" in run.out
    assert "1TiB" not in run.out
    assert dry_run(script, options=("--memory", "1200MiB", "--fail")).code == 1
    assert dry_run(script, options=("--memory", "12GiB", "--fail")).code == 0


def test_out_of_memory_in_the_forward_names_module_and_line(dry_run):
    script = """
        import torch
        class Wide(torch.nn.Module):
            def forward(self, x):
                return x.repeat(1, 4096)  # too much
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.narrow, self.wide = torch.nn.Linear(1024, 1024), Wide()
            def forward(self, x):
                return self.wide(self.narrow(x))
        Net().cuda()(torch.ones(1024, 1024, device="cuda"))
    """
    failure = dry_run(script, options=("--memory", "4GiB")).answer["out_of_memory"]
    assert (failure["phase"], failure["module"], failure["step"]) == ("forward", "wide", 1)
    assert failure["line"].endswith("script.py:5")
    assert failure["requested"] == 4 * 1024 * 1024 * 4096


def test_a_script_that_survives_out_of_memory_does_not_fit(dry_run):
    script = """
        import torch
        try:
            torch.empty(1 << 40, device="cuda")
        except torch.cuda.OutOfMemoryError:
            print("smaller then")
        x = torch.empty(1 << 20, device="cuda")
    """
    run = dry_run(script)
    assert "smaller then" in run.out
    assert run.answer["verdict"] == "does not fit"
    assert run.answer["end"]["reason"] == "end"
    assert run.answer["peak"]["allocated"] == 4 << 20


def test_a_script_that_cannot_run_again_says_that_its_total_is_unknown(dry_run):
    script = """
        import pathlib, torch
        pathlib.Path("ran").touch(exist_ok=False)
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
    """
    run = dry_run(script)
    assert run.answer["verdict"] == "out of memory"
    assert run.answer["needs"] is None
    assert "FileExistsError" in run.answer["untried"]["exception"]
    text = "How much memory the script needs in total is unknown: when memfit ran the script without input, "
    assert f"{text}script.py failed before it used the GPU: FileExistsError" in run.out


def test_a_script_that_sizes_itself_by_its_gpu_does_so_with_unlimited_memory_too(dry_run):
    script = """
        import torch
        free, total = torch.cuda.mem_get_info()
        assert total == torch.cuda.get_device_properties(0).total_memory == 3000 << 20
        cache = torch.empty(free // 2, dtype=torch.uint8, device="cuda")
        more = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
        print(torch.cuda.mem_get_info())
    """
    run = dry_run(script, options=("--memory", "3000MiB"))
    context = 512 << 20
    needs = run.answer["needs"]["bytes"]
    assert run.answer["verdict"] == "out of memory"
    assert 0 <= needs - (context + ((3000 << 20) - context) // 2 + (2 << 30)) <= 4 << 20
    limited = script.replace("free, total", "torch.cuda.set_per_process_memory_fraction(0.5); free, total")
    assert dry_run(limited, options=("--memory", "3000MiB")).answer["needs"]["bytes"] > needs


def test_a_script_that_leaves_by_os_exit_has_a_result(dry_run):
    script = """
        import os, sys, torch
        kept = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        try:
            torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            pass
        os._exit(int(sys.argv[1]))
    """
    for code in (0, 1):
        run = dry_run(script, str(code))
        assert (run.code, run.answer["verdict"]) == (3 * code, "does not fit")
        assert run.answer["end"]["exit_code"] == code
        assert run.answer["peak"]["allocated"] == 1 << 30


def test_a_script_that_reduces_its_batch_fits(dry_run):
    """Its second attempt holds more memory when it fails than the third ever does."""
    script = """
        import torch
        model = torch.nn.Linear(1024, 1024, device="cuda")
        optimizer = torch.optim.SGD(model.parameters())
        batch = 1 << 20
        for _ in range(4):
            while True:
                try:
                    loss = model(torch.ones(batch, 1024, device="cuda")).sum()
                    loss.backward()
                    break
                except torch.cuda.OutOfMemoryError:
                    batch //= 4
            optimizer.step()
            optimizer.zero_grad()
        print("batch", batch)
    """
    run = dry_run(script, options=("--memory", "2GiB", "--fail", "--to-end"))
    assert run.code == 0
    assert (run.answer["verdict"], run.answer["caught"], run.answer["steps"]) == ("fits", 2, 4)
    assert "batch 65536" in run.out
    assert "FITS after 2 caught out-of-memory errors (script.py:9)   takes" in run.out
    alone = dry_run(script.replace("1 << 20", "1 << 16"), options=("--memory", "2GiB"))
    assert alone.answer["caught"] == 0
    assert run.answer["peak"]["allocated"] == alone.answer["peak"]["allocated"]


@pytest.mark.slow
def test_workspaces_that_pytorch_itself_does_without_are_not_errors_that_the_script_caught(dry_run):
    script = """
        import torch
        net = torch.nn.Sequential(*[torch.nn.Conv2d(64, 64, 3, padding=1) for _ in range(2)]).cuda()
        optimizer = torch.optim.SGD(net.parameters())
        for _ in range(3):
            net(torch.ones(32, 64, 224, 224, device="cuda")).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    """
    without = "of the workspaces that cuDNN suggested did not fit"
    run = dry_run(script, options=("--memory", "2.6GiB", "--notes"))
    assert (run.answer["verdict"], run.answer["caught"]) == ("fits", 0), run.out
    assert without in run.out
    assert without not in dry_run(script, options=("--notes",)).out


@pytest.mark.slow
def test_an_engine_that_divides_its_batch_fits(dry_run):
    script = """
        import torch, memfit
        model = torch.nn.Linear(1024, 1024, device="cuda")
        optimizer = torch.optim.SGD(model.parameters())
        loss = lambda model, batch: model(batch.to("cuda")).square().mean()
        engine = memfit.Engine(model, memfit.Plan(), optimizer=optimizer, loss=loss)
        for _ in range(3):
            engine.step(torch.ones(1 << 18, 1024))
    """
    run = dry_run(script, options=("--memory", "4GiB"))
    assert run.answer["verdict"] == "fits", run.out
    assert run.answer["caught"] > 0


@pytest.mark.slow
def test_out_of_memory_is_recognised_when_raised_by_the_script_or_turned_into_another_error(dry_run):
    raised = dry_run(TRAIN + "    step()\n    raise torch.OutOfMemoryError('mine')\n")
    assert raised.answer["verdict"] == "out of memory"
    assert raised.answer["out_of_memory"] is None
    assert "OUT OF MEMORY   torch.OutOfMemoryError: mine" in raised.out
    for reaction in ("import sys; sys.exit(1)", "raise RuntimeError('gave up') from error"):
        script = f"""
            import torch
            try:
                torch.empty(1 << 40, device="cuda")
            except torch.OutOfMemoryError as error:
                {reaction}
        """
        run = dry_run(script)
        assert (run.code, run.answer["verdict"]) == (0, "out of memory")
        assert run.answer["out_of_memory"]["requested"] == 4 << 40


def test_an_exhausted_memory_fraction_is_named(dry_run):
    script = """
        import torch
        torch.cuda.set_per_process_memory_fraction(0.1)
        torch.empty(10 << 30, dtype=torch.uint8, device="cuda")
    """
    run = dry_run(script)
    assert run.answer["out_of_memory"]["shortfall"] == 0
    assert "sets a memory fraction" in run.out


def test_memory_in_use_and_the_context_reduce_the_free_memory(dry_run):
    script = "import torch; torch.ones(1, device='cuda'); print(*torch.cuda.mem_get_info())"
    free, total = map(int, dry_run(script, options=("--gpu", "RTX-3060")).out.splitlines()[0].split())
    used = dry_run(script, options=("--gpu", "RTX-3060", "--in-use", "1GiB"))
    free_then, total_then = map(int, used.out.splitlines()[0].split())
    assert total == total_then == used.answer["device"]["total"]
    assert free - free_then == 1 << 30
    context = figures(used.answer)["CUDA context"]
    assert total - free == context + (2 << 20)


def test_a_run_that_reaches_a_known_gap_has_a_note(dry_run):
    script = """
        import torch
        event = torch.cuda.Event(interprocess=True)
        event.record()
        try:
            event.ipc_handle()
        except RuntimeError as error:
            print(error)
    """
    texts = [note["text"] for note in dry_run(script).answer["notes"]]
    assert any("cudaIpcGetEventHandle, which the ghost does not implement" in text for text in texts)


@pytest.mark.parametrize(("source", "provenance"), [("cudnn", "simulated"), ("none", "assumed")])
def test_assumed_workspaces_leave_the_other_terms_exact(dry_run, source, provenance):
    script = "import torch; torch.nn.Conv2d(64, 64, 3).cuda()(torch.ones(1, 64, 99, 99, device='cuda'))"
    answer = dry_run(script, options=("--workspaces", source)).answer
    notes = [note for note in answer["notes"] if "convolutions" in note["text"]]
    if source == "cudnn" and len(notes) > 1:
        pytest.skip(f"the installed cuDNN cannot be queried: {notes}")
    assert [note["provenance"] for note in notes] == [provenance]
    assert (figures(answer)["workspaces"] > 0) == (source == "cudnn")
    provenances = {term["name"]: term["provenance"] for term in answer["terms"]}
    assert {provenances[name] for name in ("parameters", "gradients", "activations")} == {"exact"}
    assert {provenances[name] for name in ("workspaces", "allocated", "reserved")} == {provenance}


@pytest.mark.slow
def test_the_script_sees_the_visible_devices_only(dry_run):
    script = "import torch; print(torch.cuda.device_count()); torch.ones(1, device='cuda')"
    several = dry_run(script, env={**os.environ, "CUDA_VISIBLE_DEVICES": "0,1"})
    assert several.out.startswith("2\n")
    assert any("these figures are for the first" in note["text"] for note in several.answer["notes"])
    assert dry_run(script, env={**os.environ, "CUDA_VISIBLE_DEVICES": "3"}).out.startswith("1\n")
    hidden = dry_run(script, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert hidden.code == 2
    assert "hides every GPU" in hidden.err
