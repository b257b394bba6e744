"""`memfit dry-run --whole`: the stages of a script's life, against runs of the same script in full.

MEMFIT_TIMES=2 runs every example, in ten minutes.
"""

import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

import memfit
from support.new_processes import start_memfit

pytestmark = [pytest.mark.process, pytest.mark.warm]

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPT = (EXAMPLES / "whole_run.py").read_text()
ALL = int(os.environ.get("MEMFIT_TIMES", "1")) > 1
SHORT = ("--samples", "192", "--eval-samples", "3072")
"""Three batches in each pass."""
FIGURES = ("name", "times", "allocated", "reserved", "process", "phase", "module", "line", "leaves")


def line_of(text):
    return f"script.py:{1 + SCRIPT.splitlines().index(text)}"


EVALUATED = line_of("            losses.append(criterion(model(x.to(device)), y.to(device)))")
COPIED = line_of("        state = copy.deepcopy(state)")
UPDATED = line_of("        optimizer.step()")


def figures(run):
    return [{name: stage[name] for name in FIGURES} for stage in run.answer["stages"]]


@pytest.mark.parametrize(
    ("mistake", "worst", "line"),
    [
        pytest.param(None, "training", UPDATED, marks=pytest.mark.slow),
        ("evaluation", "evaluation", EVALUATED),
        pytest.param("saving", "saving", COPIED, marks=pytest.mark.slow),
        pytest.param("losses", "evaluation", EVALUATED, marks=pytest.mark.slow),
    ],
)
def test_a_shortened_run_has_the_stages_of_a_run_in_full(dry_run, mistake, worst, line):
    arguments = () if mistake is None else ("--mistake", mistake)
    short = dry_run(SCRIPT, *arguments, options=("--whole",))
    full = dry_run(SCRIPT, *arguments, *SHORT, options=("--to-end",))
    assert figures(short) == figures(full)
    assert (short.answer["peak"], short.answer["steps"]) == (full.answer["peak"], 9)
    assert [(each["to"], each["of"]) for each in short.answer["shortened"]] == [(3, 256), (3, 8)]
    assert full.answer["shortened"] == []
    stages = {stage["name"]: stage for stage in short.answer["stages"]}
    assert list(stages) == ["setup", "training", "evaluation", "saving"]
    highest = max(stages.values(), key=lambda stage: stage["allocated"])
    assert (highest["name"], Path(highest["line"]).name) == (worst, line)
    assert highest["allocated"] == short.answer["peak"]["allocated"]
    leaves = stages["evaluation"]["leaves"]
    assert (leaves > 0) == (mistake == "losses")
    if mistake == "losses":
        assert re.search(rf"The evaluation leaves [\d.]+ MiB behind .*{line}", short.out)


@pytest.mark.parametrize(
    ("mistake", "line", "module"),
    [("evaluation", EVALUATED, True), pytest.param("saving", COPIED, False, marks=pytest.mark.slow)],
)
def test_where_memory_runs_out_the_stage_is_named_with_module_and_line(dry_run, mistake, line, module):
    memory = ("--memory", "740MiB")
    run = dry_run(SCRIPT, "--mistake", mistake, options=("--whole", "--fail", *memory))
    assert run.code == 1
    assert run.answer["verdict"] == "out of memory"
    assert [stage["name"] for stage in run.answer["stages"] if stage["ran_out"]] == [mistake]
    assert re.search(rf"Ran out in: {mistake} · .*{line}", run.out)
    failed = run.answer["out_of_memory"]
    assert (bool(failed["module"]), failed["stage"]) == (module, mistake)
    assert ("run it under torch.no_grad()" in run.out) is (mistake == "evaluation")


def test_a_script_is_run_again_as_it_resumes(dry_run):
    options = ("--whole", "--resume-with", "--resume --epochs 4", "--html", "report.html")
    run = dry_run(SCRIPT, options=options)
    page = (run.folder / "report.html").read_text()
    assert re.search(r'<tr class=total><th scope="row">training, resumed</th><td>1</td>', page)
    assert "3 of 256 batches (script.py:" in page
    again = dry_run(SCRIPT, "--resume", "--epochs", "5", *SHORT, options=("--to-end",))
    resumed = [stage for stage in run.answer["stages"] if stage["resumed"]]
    assert [stage["name"] for stage in resumed] == ["setup", "loading", "training", "evaluation", "saving"]
    assert [stage["allocated"] for stage in resumed] == [
        stage["allocated"] for stage in again.answer["stages"]
    ]
    # The checkpoint that the script has loaded stays on the GPU: it is as large as the parameters.
    first = next(stage for stage in run.answer["stages"] if stage["name"] == "training")
    assert run.answer["peak"]["allocated"] == resumed[2]["allocated"] > first["allocated"]
    assert "Peak in: training, resumed · " in run.out
    assert run.answer["peak"]["stage"] == "training, resumed"
    assert first["process"] < 740 << 20  # the device on which mistakes run out of memory, below


@pytest.mark.slow
@pytest.mark.usefixtures("warm_scripts")
def test_the_python_function_resumes_whole_runs_and_runs_them_under_plans(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    (tmp_path / "script.py").write_text(f"""{SCRIPT}
open("conf", "a").write(f"{{__import__('os').environ['PYTORCH_ALLOC_CONF']}} ")
""")
    (tmp_path / "plan.json").write_text('{"plan": {}, "allocator": "garbage_collection_threshold:0.9"}')
    again = ("--resume", "--epochs", "4")
    run = memfit.dry_run("script.py", whole=True, resume_with=again, plan="plan.json")
    resumed = [stage.name.removesuffix(", resumed") for stage in run.stages if stage.resumed]
    assert resumed == ["setup", "loading", "training", "evaluation", "saving"]
    assert (tmp_path / "conf").read_text() == "garbage_collection_threshold:0.9 " * 2
    assert "PYTORCH_ALLOC_CONF" not in os.environ


def test_a_script_that_fails_is_not_resumed(dry_run):
    options = ("--whole", "--resume-with", "--resume")
    run = dry_run(f"{SCRIPT}\nraise SystemExit('too bad')\n", options=options)
    assert run.code == 3
    assert "Cannot resume script.py: its first run did not come to its end. too bad" in run.err


def test_a_resumed_run_that_does_not_train_is_named(dry_run):
    run = dry_run(SCRIPT, options=("--whole", "--resume-with", "--resume"))
    assert [stage["name"] for stage in run.answer["stages"] if stage["resumed"]] == ["setup", "loading"]
    assert "The resumed run trained nothing, so its training is unknown" in run.out


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(each.name for each in EXAMPLES.glob("*.py")) if ALL else ["lstm.py"])
def test_an_example_ends_by_itself_and_its_training_allocates_what_it_does_in_a_plain_run(
    dry_run, name, tmp_path
):
    script, room = (EXAMPLES / name).read_text(), ("--memory", "256GiB")
    shutil.copy(EXAMPLES / "gpt.py", tmp_path)  # gpt_chunked_head.py imports it
    whole = dry_run(script, options=("--whole", *room)).answer
    plain = dry_run(script, options=("--steps", max(3, whole["steps"]), *room)).answer
    stages = {stage["name"]: stage["allocated"] for stage in whole["stages"]}
    allocated = plain["peak"]["allocated"]
    assert whole["end"]["reason"] == "end"
    assert stages.get("training", whole["peak"]["allocated"]) == allocated


LEAKS = """
    import torch
    from torch.utils.data import DataLoader
    model = torch.nn.Linear(1 << 10, 1 << 10).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    losses = []
    for x in DataLoader(torch.ones(256, 1 << 10), 1):
        loss = model(x.cuda().repeat(256, 1)).square().mean()
        loss.backward(retain_graph=True)
        optimizer.step()
        losses.append(loss)
"""


@pytest.mark.slow
def test_where_each_step_leaves_more_behind_the_run_does_not_count_as_whole(dry_run):
    run = dry_run(LEAKS, options=("--whole", "--memory", "1GiB"))
    assert "FITS SO FAR" in run.out
    step = run.answer["growth"]["bytes_per_step"]
    left = ((1 << 30) - run.answer["peak"]["process"]) // step
    assert f"memory runs out about {left:,} steps later." in run.out
    full = dry_run(LEAKS, options=("--to-end", "--memory", "1GiB"))
    assert abs(full.answer["out_of_memory"]["step"] - (run.answer["steps"] + left)) <= 2
    early = dry_run(LEAKS, options=("--whole", "--memory", "550MiB"))
    assert early.answer["verdict"] == "out of memory"
    assert "INCOMPLETE" not in early.out


SAVES_BESIDE = """
    import threading
    import torch
    from torch.utils.data import DataLoader
    model = torch.nn.Linear(1 << 10, 1 << 10).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    for epoch in range(2):
        for x in DataLoader(torch.ones(64, 1 << 10), 8):
            loss = model(x.cuda()).sum()
            if epoch:
                writer = threading.Thread(target=torch.save, args=(state, "state.pt"))
                writer.start()
                writer.join()
            loss.backward()
            optimizer.step()
        state = {name: value.cpu() for name, value in model.state_dict().items()}
        if SAVES:
            torch.save(state, "state.pt")
"""


@pytest.mark.parametrize(("saves", "stages"), [(False, []), (True, ["saving"])])
def test_what_a_thread_writes_while_training_goes_on_is_part_of_training(dry_run, saves, stages):
    run = dry_run(SAVES_BESIDE.replace("SAVES", str(saves)), options=("--whole",))
    assert [stage["name"] for stage in run.answer["stages"]] == ["setup", "training", *stages]


ENDLESS = """
    import torch
    from torch.utils.data import DataLoader, IterableDataset
    class Endless(IterableDataset):
        def __iter__(self):
            while True:
                yield torch.ones(8)
    model = torch.nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    print("training", flush=True)
    while True:
        for x in DataLoader(Endless(), 4):
            model(x.cuda()).sum().backward()
            optimizer.step()
        print("pass", flush=True)
"""


def test_a_script_without_an_end_is_ended_in_time_and_says_so(dry_run):
    run = dry_run(ENDLESS, options=("--whole", "--seconds", "2"))
    assert run.code == 0, run.err
    assert run.answer["end"]["reason"] == "time"
    assert "FITS SO FAR" in run.out
    assert "memfit stopped the script when its time was up" in run.out
    assert "3 of an unknown number of batches (script.py:12)" in run.out
    assert run.answer["steps"] >= 3


@pytest.mark.slow
def test_ctrl_c_ends_a_whole_run_and_leaves_nothing_behind(tmp_path):
    (tmp_path / "script.py").write_text(re.sub("^    ", "", ENDLESS, flags=re.MULTILINE))
    folder = tmp_path / "temporary"
    folder.mkdir()
    with start_memfit("dry-run", "--whole", "script.py", cwd=tmp_path, TMPDIR=str(folder)) as started:
        assert "training" in started.stdout.readline()
        time.sleep(0.5)
        started.send_signal(signal.SIGINT)
        started.communicate(timeout=30)
    assert started.returncode == 130
    assert list(folder.iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["script.py", "temporary"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--whole", "--to-end"), "leave out --steps and --to-end"),
        (("--whole", "--steps", "5"), "leave out --steps and --to-end"),
        (("--whole", "--advise"), "names the stage"),
        (("--batches", "5"), "add --whole"),
        (("--whole", "--batches", "0"), "at least 1"),
        (("--resume-with", "--resume"), "add --whole"),
        (("--whole", "--resume-with", "'--resume"), "No closing quotation"),
    ],
)
def test_options_that_contradict_each_other_are_refused(dry_run, options, why):
    run = dry_run("", options=options)
    assert run.code == 2
    assert why in run.err.replace("\n", " ")


CAUGHT = """
    import torch
    from torch.utils.data import DataLoader
    model = torch.nn.Linear(1 << 10, 1 << 10).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    for x in DataLoader(torch.ones(64, 1 << 10), 8):
        try:
            torch.empty(1 << 40, device="cuda")
        except torch.cuda.OutOfMemoryError:
            pass
        model(x.cuda()).sum().backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        for x in DataLoader(torch.ones(64, 1 << 10), 8):
            model(x.cuda())
            torch.empty(1 << 41, device="cuda")
"""


def test_a_failure_that_a_script_catches_is_not_the_one_that_ends_it(dry_run):
    run = dry_run(CAUGHT, options=("--whole",))
    assert [stage["name"] for stage in run.answer["stages"] if stage["ran_out"]] == ["evaluation"]
    assert "Ran out in: evaluation · script.py:17" in run.out
    assert run.answer["peak"]["stage"] == "training"


@pytest.mark.slow
def test_where_passes_become_too_short_for_an_update_the_run_is_incomplete(dry_run):
    script = """
        import torch
        from torch.utils.data import DataLoader
        model = torch.nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for number, x in enumerate(DataLoader(torch.ones(64, 8), 4)):
            model(x.cuda()).sum().backward()
            if number % 4 == 3:
                optimizer.step()
    """
    run = dry_run(script, options=("--whole",))
    assert run.out.startswith("INCOMPLETE")
    assert "if the optimizer steps after more batches, pass more --batches." in run.out
    assert dry_run(script, options=("--whole", "--batches", "4")).out.startswith("FITS  ")


def test_pinned_host_memory_has_a_row_of_its_own(dry_run):
    script = """
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        loader = DataLoader(TensorDataset(torch.ones(64, 1 << 18)), 16, pin_memory=True)
        model = torch.nn.Linear(1 << 18, 1).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for (x,) in loader:
            model(x.cuda(non_blocking=True)).sum().backward()
            optimizer.step()
        print(torch.cuda.host_memory_stats()["allocated_bytes.peak"])
    """
    run = dry_run(script, options=("--to-end",))
    pinned = run.answer["pinned"]
    assert run.out.splitlines()[0] == str(pinned["bytes"])
    assert pinned["bytes"] >= 16 * (1 << 18) * 4
    assert f"Pinned host memory: {pinned['bytes'] / 2**20:.1f} MiB (assumed" in run.out
