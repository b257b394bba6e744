"""`memfit dry-run` as a user meets it: small scripts, run as python would run them."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

TRAIN = """
    import torch
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8))
    model.to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    def step():
        optimizer.zero_grad()
        loss = model(torch.randn(64, 256, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
"""


def figures(answer):
    return {term["name"]: term["bytes"] for term in answer["terms"]}


# -- what is measured ------------------------------------------------------------------------------


def test_the_allocator_in_one_line(dry_run):
    run = dry_run('import torch; x = torch.empty(1, device="cuda")')
    assert run.code == 0
    assert run.answer["peak"]["allocated"] == 512
    assert run.answer["peak"]["reserved"] == 2_097_152
    assert run.answer["peak"]["line"].endswith("script.py:1")


def test_parameters_gradients_and_state_are_told_apart(dry_run):
    run = dry_run(TRAIN + "    for _ in range(9): step()\n")
    held = figures(run.answer)
    blocks = sum(-(-4 * n // 512) * 512 for n in (256 * 512, 512, 512 * 8, 8))
    assert run.answer["steps"] == 3
    assert run.answer["verdict"] == "fits"
    assert held["parameters"] == blocks
    assert held["gradients"] == blocks
    assert held["optimizer state"] == 2 * blocks
    parts = ("parameters", "buffers", "gradients", "optimizer state", "the rest")
    assert sum(held[part] for part in parts) == held["allocated"] == run.answer["peak"]["allocated"]
    assert held["allocated"] + held["cached, not allocated"] == held["reserved"]
    assert held["reserved"] + held["CUDA context"] == held["process"] == run.answer["peak"]["process"]
    assert {term["provenance"] for term in run.answer["terms"]} == {"exact", "assumed"}


def test_torchs_own_figures_are_memfits(dry_run):
    script = TRAIN + "    for _ in range(3): step(); print(torch.cuda.max_memory_allocated(), end=' ')\n"
    run = dry_run(script + "    print(torch.cuda.max_memory_reserved())\n", options=("--steps", "4"))
    *_, allocated, reserved = map(int, run.out.splitlines()[0].split())
    assert (allocated, reserved) == (run.answer["peak"]["allocated"], run.answer["peak"]["reserved"])
    assert not any("counter" in note["text"] for note in run.answer["notes"])


def test_labels_do_not_change_the_figures(dry_run):
    script = TRAIN.replace("64, 256", "8192, 256") + "    for _ in range(4): step()\n"
    with_labels, without = dry_run(script).answer, dry_run(script, options=("--no-labels",)).answer
    for figure in ("allocated", "reserved", "process"):
        assert with_labels["peak"][figure] == without["peak"][figure]
    assert with_labels["peak"]["module"]


@pytest.mark.parametrize(
    "conf",
    [
        "expandable_segments:True",
        "max_split_size_mb:32",
        "roundup_power2_divisions:4",
        "garbage_collection_threshold:0.6",
        "backend:cudaMallocAsync",
        "large_segment_size_mb:40",
        "per_process_memory_fraction:0.5",
    ],
)
def test_allocator_settings_work(dry_run, conf):
    script = f"import os; os.environ['PYTORCH_ALLOC_CONF'] = {conf!r}\n" + textwrap.dedent(TRAIN)
    script += "for _ in range(2): step()\nprint(torch.cuda.max_memory_allocated())\n"
    run = dry_run(script)
    assert run.code == 0, run.err
    assert int(run.out.splitlines()[0]) == run.answer["peak"]["allocated"]
    assert run.answer["notes"] == [] or "cudaMallocAsync" in run.answer["notes"][0]["text"]


def test_no_caching_mode_works(dry_run):
    run = dry_run(
        TRAIN + "    for _ in range(4): step()\n", env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    )
    assert run.answer["steps"] == 3
    assert run.answer["peak"]["allocated"] > 3 * 4 * 256 * 512


# -- steps -------------------------------------------------------------------------------------------


def test_stops_after_the_steps_asked_for(dry_run):
    script = TRAIN + "    for n in range(100): step(); print('did', n)\n    print('never')\n"
    run = dry_run(script, options=("--steps", "2"))
    assert run.answer["steps"] == 2
    assert run.answer["end"]["reason"] == "steps"
    assert "never" not in run.out
    assert "did 0" in run.out


def test_two_optimizers_step_in_turn(dry_run):
    script = """
        import torch
        one, two = torch.nn.Linear(8, 8).cuda(), torch.nn.Linear(8, 8).cuda()
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (one, two)]
        for turn in range(50):
            optimizer = optimizers[turn % 5 == 4]
            optimizer.zero_grad()
            two(one(torch.ones(2, 8, device="cuda"))).sum().backward()
            optimizer.step()
            print("turn", turn)
    """
    run = dry_run(script)
    assert run.answer["steps"] == 3
    assert "turn 13" in run.out  # the slow one's third step is the fifteenth turn
    assert "turn 14" not in run.out


def test_an_optimizer_that_never_steps_is_not_waited_for_forever(dry_run):
    unused = "    spare = torch.optim.SGD(torch.nn.Linear(4, 4).cuda().parameters(), 0.1)\n"
    run = dry_run(TRAIN + unused + "    for n in range(10_000): step()\n    print('never')\n")
    assert run.answer["end"]["reason"] == "steps"
    assert "never" not in run.out


def test_steps_skipped_by_the_scaler_count(dry_run):
    script = """
        import torch
        model = torch.nn.Linear(8, 8).cuda()
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler()
        optimizer.step = lambda *a, **k: None  # a scaler that always finds an overflow never steps
        for n in range(50):
            scaler.scale(model(torch.ones(2, 8, device="cuda")).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        print("never")
    """
    run = dry_run(script)
    assert run.answer["steps"] == 3
    assert "never" not in run.out


def test_parameters_updated_by_hand(dry_run):
    script = """
        import torch
        w = torch.zeros(1024, device="cuda", requires_grad=True)
        for n in range(50):
            (w * 2).sum().backward()
            with torch.no_grad():
                w -= 0.1 * w.grad
            w.grad = None
            print("did", n)
    """
    run = dry_run(script)
    assert run.answer["steps"] == 3
    assert "did 2" in run.out
    assert "did 3" not in run.out


def test_accumulation_counts_optimizer_steps(dry_run):
    script = (
        TRAIN.replace("optimizer.zero_grad()", "return")
        + """
    for n in range(100):
        model(torch.randn(64, 256, device="cuda")).mean().backward()
        if n % 4 == 3:
            optimizer.step(); optimizer.zero_grad(); print("step", n)
    """
    )
    run = dry_run(script)
    assert run.answer["steps"] == 3
    assert "step 7" in run.out


def test_a_script_that_catches_everything_is_ended_all_the_same(dry_run):
    script = (
        TRAIN
        + """
    while True:
        try:
            step()
        except BaseException:
            print("caught")
    """
    )
    run = dry_run(script)
    assert run.answer["end"]["reason"] == "steps"
    assert run.out.count("caught") < 10


def test_inference_runs_to_its_end(dry_run):
    script = """
        import torch
        model = torch.nn.Linear(1024, 1024).cuda().eval()
        with torch.inference_mode():
            for _ in range(7):
                model(torch.ones(64, 1024, device="cuda"))
        print("done")
    """
    run = dry_run(script)
    assert "done" in run.out
    assert run.answer["steps"] == 0
    assert any("no training step" in note["text"] for note in run.answer["notes"])
    assert figures(run.answer)["parameters"] == 4 * 1024 * 1024 + 4096


def test_steady_and_growing(dry_run):
    steady = dry_run(TRAIN + "    for _ in range(4): step()\n").answer["growth"]
    assert steady == {"steady_from": 1, "bytes_per_step": 0, "line": "", "leak": False}
    leak = """
    kept = []
    for _ in range(4):
        kept.append(torch.empty(1 << 20, device="cuda"))  # a leak
        step()
    """
    run = dry_run(TRAIN + leak)
    assert run.answer["growth"]["leak"]
    assert run.answer["growth"]["bytes_per_step"] == 4 << 20
    line = int(run.answer["growth"]["line"].rpartition(":")[2])
    assert "a leak" in (run.folder / "script.py").read_text().splitlines()[line - 1]


# -- out of memory -----------------------------------------------------------------------------------


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


def test_out_of_memory_that_the_script_survives(dry_run):
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


def test_out_of_memory_that_the_script_raises_itself_or_turns_into_something_else(dry_run):
    raised = dry_run(TRAIN + "    step()\n    raise torch.OutOfMemoryError('mine')\n")
    assert raised.answer["verdict"] == "out of memory"
    assert raised.answer["out_of_memory"] is None
    assert "OUT OF MEMORY   torch.OutOfMemoryError: mine" in raised.out
    for turned in ("import sys; sys.exit(1)", "raise RuntimeError('gave up') from error"):
        script = f"""
            import torch
            try:
                torch.empty(1 << 40, device="cuda")
            except torch.OutOfMemoryError as error:
                {turned}
        """
        run = dry_run(script)
        assert (run.code, run.answer["verdict"]) == (0, "out of memory")
        assert run.answer["out_of_memory"]["requested"] == 4 << 40


def test_a_memory_fraction_that_is_used_up_is_named(dry_run):
    script = """
        import torch
        torch.cuda.set_per_process_memory_fraction(0.1)
        torch.empty(10 << 30, dtype=torch.uint8, device="cuda")
    """
    run = dry_run(script)
    assert run.answer["out_of_memory"]["shortfall"] == 0
    assert "a memory fraction" in run.out


def test_memory_in_use_and_the_context_count(dry_run):
    script = "import torch; torch.ones(1, device='cuda'); print(*torch.cuda.mem_get_info())"
    free, total = map(int, dry_run(script, options=("--gpu", "RTX-3060")).out.splitlines()[0].split())
    used = dry_run(script, options=("--gpu", "RTX-3060", "--in-use", "1GiB"))
    free_then, total_then = map(int, used.out.splitlines()[0].split())
    assert total == total_then == used.answer["device"]["total"]
    assert free - free_then == 1 << 30
    context = figures(used.answer)["CUDA context"]
    assert total - free == context + (2 << 20)


def test_a_run_that_reaches_a_known_gap_says_so(dry_run):
    script = """
        import torch
        try:
            torch.nn.LSTM(8, 8).cuda()(torch.ones(3, 2, 8, device="cuda"))
        except RuntimeError as refused:
            print(refused)
    """
    texts = [note["text"] for note in dry_run(script).answer["notes"]]
    assert any("cudnn" in text and "a known gap" in text for text in texts)


def test_convolutions_say_that_workspaces_count_as_nothing(dry_run):
    script = "import torch; torch.nn.Conv2d(3, 8, 3).cuda()(torch.ones(1, 3, 32, 32, device='cuda'))"
    (note,) = [note for note in dry_run(script).answer["notes"] if "cuDNN workspace" in note["text"]]
    assert note["provenance"] == "assumed"


def test_the_script_sees_the_devices_that_are_visible(dry_run):
    script = "import torch; print(torch.cuda.device_count()); torch.ones(1, device='cuda')"
    several = dry_run(script, env={**os.environ, "CUDA_VISIBLE_DEVICES": "0,1"})
    assert several.out.startswith("2\n")
    assert any("these figures are the first one's" in note["text"] for note in several.answer["notes"])
    assert dry_run(script, env={**os.environ, "CUDA_VISIBLE_DEVICES": "3"}).out.startswith("1\n")
    hidden = dry_run(script, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert hidden.code == 2
    assert "hides every GPU" in hidden.err


# -- as python runs it -------------------------------------------------------------------------------


def test_the_script_sees_what_python_would_show_it(dry_run):
    script = """
        import os, pickle, sys, torch
        class Mine: pass
        print(__name__, __file__, sys.argv, os.path.basename(sys.path[0]) == os.path.basename(os.getcwd()))
        print(sys.modules["__main__"].Mine is Mine, pickle.loads(pickle.dumps(Mine())).__class__ is Mine)
        torch.ones(1, device="cuda")
    """
    run = dry_run(script, "--steps", "9", "--json", "x")
    first, second = run.out.splitlines()[:2]
    assert first == f"__main__ {run.folder}/script.py ['script.py', '--steps', '9', '--json', 'x'] True"
    assert second == "True True"


def test_a_module_runs_as_with_python_m(dry_run, tmp_path):
    package = tmp_path / "trainer"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "main.py").write_text(
        "import sys, torch\nfrom . import __name__ as name\n"
        "print(__name__, name, sys.argv[1:])\nx = torch.ones(1, device='cuda')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "memfit", "dry-run", "-m", "trainer.main", "--lr", "1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[0] == "__main__ trainer ['--lr', '1']"


def test_looking_whether_torch_is_there_does_not_hide_it_from_memfit(dry_run):
    look = "import importlib.util\nassert importlib.util.find_spec('torch')\n"
    run = dry_run(look + textwrap.dedent(TRAIN) + "for _ in range(9): step()\n")
    assert run.answer["steps"] == 3


def test_files_in_the_working_folder_do_not_stand_in_for_the_standard_library(tmp_path, dry_run):
    (tmp_path / "platform.py").write_text("raise RuntimeError('the wrong one')\n")
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "train.py").write_text("import torch; torch.ones(1, device='cuda'); print('ran')\n")
    memfit = [sys.executable, "-P", "-m", "memfit", "dry-run", str(folder / "train.py")]
    done = subprocess.run(memfit, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("ran\n"), done.stderr


def test_training_in_a_thread_is_measured(dry_run):
    script = (
        TRAIN
        + """
    import threading
    def train():
        for _ in range(9): step()
    threading.Thread(target=train).start()
    """
    )
    run = dry_run(script)
    assert run.answer["steps"] == 3
    assert run.answer["end"]["reason"] == "steps"
    assert "EnoughStepsReached" not in run.err


def test_threads_that_never_end_do_not_hold_up_the_answer(dry_run):
    script = (
        TRAIN
        + """
    import threading
    threading.Thread(target=threading.Event().wait).start()
    for _ in range(9): step()
    """
    )
    assert dry_run(script).answer["end"]["reason"] == "steps"


def test_a_loop_that_turns_its_end_into_a_failure_was_ended_all_the_same(dry_run):
    script = (
        TRAIN
        + """
    try:
        for _ in range(9): step()
    except BaseException:
        raise SystemExit(1)
    """
    )
    run = dry_run(script)
    assert run.code == 0
    assert run.answer["end"]["reason"] == "steps"


def test_an_exception_is_the_scripts_own(dry_run):
    script = TRAIN + "    step()\n    raise KeyError('mine')\n"
    run = dry_run(script, options=("-o", "run.memfit"))
    assert run.code == 3
    assert "KeyError: 'mine'" in run.err
    assert "memfit/capture" not in run.err.split("KeyError")[0]
    assert run.answer["end"]["exception"] == "KeyError: 'mine'"
    assert run.answer["verdict"] == "unknown"
    assert "INCOMPLETE" in run.out
    assert run.answer["steps"] == 1
    assert (run.folder / "run.memfit").exists()


def test_sys_exit_keeps_its_meaning(dry_run):
    script = TRAIN + "    step()\n    import sys; sys.exit({})\n"
    assert dry_run(script.format("0")).code == 0
    failed = dry_run(script.format("'went wrong'"))
    assert failed.code == 3
    assert "went wrong" in failed.err
    assert failed.answer["end"]["exit_code"] == 1


def test_exit_handlers_run_and_output_is_flushed(dry_run):
    script = TRAIN + "    import atexit; atexit.register(print, 'goodbye')\n    for _ in range(9): step()\n"
    assert "goodbye" in dry_run(script).out


def test_json_on_stdout_stands_alone(dry_run):
    run = dry_run(TRAIN + "    print('chatter'); step()\n", options=("--json", "-"), json_answer=False)
    assert json.loads(run.out)["steps"] == 1
    assert "chatter" in run.err


def test_a_fork_of_the_script_writes_no_result(dry_run):
    script = (
        TRAIN
        + """
    import os
    step()
    if os.fork() == 0:
        raise SystemExit(0)
    os.wait()
    step()
    """
    )
    run = dry_run(script)
    assert run.code == 0
    assert run.answer["steps"] == 2


def test_ctrl_c_ends_the_script_and_keeps_what_was_seen(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(TRAIN) + "step()\nprint('ready', flush=True)\nimport time; time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "memfit", "dry-run", "-o", "run.memfit", "script.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "INCOMPLETE" in out
    assert (tmp_path / "run.memfit").exists()


# -- bad input ---------------------------------------------------------------------------------------


def test_a_card_that_torch_has_no_kernels_for_is_refused_by_name(dry_run):
    run = dry_run("import torch; torch.ones(1, device='cuda'); print('ran')", options=("--gpu", "V100"))
    assert run.code == 3
    assert "has no kernels for V100-32GB" in run.err
    assert "ran" not in run.out


def test_a_scheduler_that_ends_memfit_ends_the_script_too(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, torch\nprint(os.getpid(), flush=True)\nimport time; time.sleep(60)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "memfit", "dry-run", "script.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    child = int(process.stdout.readline())
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("nothing.py",), 2, "No such script"),
        (("--gpu", "RTX-9999", "script.py"), 2, "Nearest"),
        (("--memory", "lots", "script.py"), 2, "12GiB"),
        (("--steps", "0", "script.py"), 2, "at least 1"),
        (("--steps", "many", "script.py"), 2, "steps"),
        (("--nonsense", "script.py"), 2, "nonsense"),
        (("--values", "float=blue", "script.py"), 2, "float"),
        (("--memory", "1MiB", "script.py"), 2, "context"),
        (("-o", "no/such/folder/run.memfit", "script.py"), 2, "does not exist"),
        ((), 2, "Which script"),
        (("script.py",), 3, "never used the GPU"),
    ],
)
def test_bad_input_gets_one_clear_error(dry_run, tmp_path, options, code, words):
    (tmp_path / "script.py").write_text("import torch\nprint('ran')\n")
    done = subprocess.run(
        [sys.executable, "-m", "memfit", "dry-run", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("*.memfit*"))
