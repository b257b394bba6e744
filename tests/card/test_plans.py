"""benchmarks/gpu/plans.py in rehearsal, how it reads a script's output, and how it compares losses."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

GPU = Path(__file__).parents[2] / "benchmarks/gpu"
ARGUMENTS = ["--batch-size", "1", "--context", "16", "--steps", "4"]


@pytest.fixture
def load(monkeypatch):
    """Load a module of benchmarks/gpu by its path: benchmarks are not a package."""

    def module(name):
        monkeypatch.syspath_prepend(str(GPU))
        spec = importlib.util.spec_from_file_location(f"gpu_{name}", GPU / f"{name}.py")
        loaded = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, loaded)
        spec.loader.exec_module(loaded)
        return loaded

    return module


@pytest.mark.slow
def test_a_rehearsal_counts_the_peak_of_the_plan(tmp_path):
    """A case of the test's own; its plan is the script as written, which takes one run to find."""
    program = (
        "import sys, card_session, plan_cases\n"  # the first adds the folder of measuring.py
        f"case = plan_cases.PlanCase('small', 'examples/gpt.py', {tuple(ARGUMENTS)}, (1.0,))\n"
        "plan_cases.plan_cases = lambda: [case]\n"
        "import plans\n"
        "sys.exit(plans.main())\n"
    )
    runner = tmp_path / "plans_of_one_case.py"
    runner.write_text(f"import sys\nsys.path.insert(0, {str(GPU)!r})\n{program}")

    def run(*arguments):
        return subprocess.run(
            [sys.executable, runner, "--out", tmp_path / "out", *arguments],
            capture_output=True,
            text=True,
            check=False,
        )

    planned = run("--plan", "A100-80GB")
    assert planned.returncode == 0, planned.stderr
    plan = json.loads((tmp_path / "out/small@1.json").read_text())
    done = run("--rehearse", "A100-80GB", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "out").glob("rehearsal-*-plans.json")
    result = json.loads(file.read_text())
    assert result["machine"] == "rehearsal"
    case = result["cases"]["small"]
    assert case["status"] == "done"
    for kind, predicted in ("as written", plan["as_written"]["allocated"]), ("1", plan["allocated"]):
        (ran,) = case[kind]["runs"]
        assert ran["peaks"]["allocated"] == case[kind]["predicted"] == predicted
        assert (len(ran["losses"]), len(ran["steps"])) == (4, 3)
    assert file.with_suffix(".md").read_text().startswith("# REHEARSAL, nothing was measured: NVIDIA A100")


PRINTS = """
import sys, time
print("loading: losses follow")
for step in range(4):
    time.sleep(0.2 if step == 1 else 0.02)
    line = f"step {step}  loss {7 - step}.5000  1,024 B"
    print({"step": line, "trainer": {"loss": "6.5e-01"}}[sys.argv[1]])
print({"train_runtime": "1.0", "train_loss": "6.2"})
print("peak allocated 1,234,567 B")
print("memfit: applied to GPT", file=sys.stderr)
sys.exit(3)
"""


def test_steps_are_timed_by_their_lines(load, tmp_path):
    (tmp_path / "script.py").write_text(PRINTS)
    run = load("timed_run").timed_run([sys.executable, "script.py", "step"], tmp_path, 20)
    assert (run.code, run.losses) == (3, ("7.5000", "6.5000", "5.5000", "4.5000"))
    assert run.steps[0] > 0.19
    assert run.median(2) == (run.steps[1] + run.steps[2]) / 2
    assert run.median(5) is None
    assert (run.peaks, run.said) == ({"allocated": 1_234_567}, ("memfit: applied to GPT",))
    run = load("timed_run").timed_run([sys.executable, "script.py", "trainer"], tmp_path, 20)
    assert run.losses == ("6.5e-01",) * 4


def test_a_run_that_takes_too_long_is_stopped(load, tmp_path):
    command = [sys.executable, "-c", "import time\nprint('loss 1.0')\ntime.sleep(60)"]
    run = load("timed_run").timed_run(command, tmp_path, 1)
    assert run.code is None
    assert (run.losses, run.steps, run.median(0)) == (("1.0",), (), None)
    assert run.seconds < 20


def ran(*losses, median=0.1, allocated=1000, code=0):
    return {
        "code": code,
        "losses": losses,
        "median": median,
        "peaks": {"allocated": allocated, "reserved": 2048},
        "said": ["memfit: NOT APPLIED: a reason"] if code == 0 and allocated > 1000 else [],
    }


def table(load, written, under):
    kinds = {
        "as written": {"plan": "", "predicted": 1000, "time": 1.0, "runs": written},
        "0.5": {"plan": "a plan", "predicted": 1000, "time": 1.25, "runs": under},
    }
    result = {"machine": "card", "card": "H", "driver": "1", "torch": "2", "memfit": "0", "day": "d"}
    return load("plans_table").markdown(result | {"cases": {"gpt": {"status": "done", **kinds}}})


def test_the_table_compares_peaks_times_and_losses(load):
    text = table(load, [ran("2.0", "1.0")], [ran("2.0", "1.0", median=0.13)])
    assert "| gpt | 0.5 | a plan | 1,000 | 1,000 | 0 | 2,048 | 130.0 | 1.300 | 1.250 | equal |" in text
    assert "NOT APPLIED" not in text
    text = table(load, [ran("2.0", "1.0")], [ran("2.0", "1.5", allocated=1512)])
    assert "| 1,000 | 1,512 | +512 |" in text
    assert "| differ by 0.5 at most, first at step 1 |" in text
    assert "- gpt, 0.5: memfit: NOT APPLIED: a reason" in text
    text = table(load, [ran("2.0"), ran("2.5")], [ran("2.0", code=1), ran("2.0")])
    assert "| equal; other runs differ |" in text


def test_every_case_names_an_existing_script(load):
    cases = load("plan_cases").plan_cases()
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert (GPU.parents[1] / case.script).is_file()
        assert case.shares
