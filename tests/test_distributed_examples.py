"""The scripts in examples/distributed: two gloo ranks on the CPU, and one rank of eight on the ghost."""

import json
import re
from pathlib import Path

import pytest

from memfit.run.launchers import free_port
from support import warm_process
from support.new_processes import run_python

pytestmark = pytest.mark.process

EXAMPLES = Path(__file__).parents[1] / "examples" / "distributed"
FORKED_RANKS = Path(__file__).parent / "support" / "forked_ranks.py"
WITH_MEMFIT = {"digits.py"}
"""Tested in test_training_examples.py."""
SAMPLE = {"ddp.py"}
"""The script that CI runs on the ghost; `make test-slow` runs the others."""
SCRIPTS = sorted({path.name for path in EXAMPLES.glob("*.py")} - WITH_MEMFIT)
RANKS_ON_THE_GHOST = {"pipeline.py": 7}
"""Script -> the rank to run, if not 0: only the last stage of a pipeline needs no shapes from a later one."""
STEPS_ON_THE_GHOST = {"checkpoint.py": 4}
"""Script -> its optimizer steps, if not 3: to load its state, PyTorch first creates it with a step."""

STARTS_ITS_RANKS = "mp_spawn.py"

ABORTED = "terminate called without an active exception"
"""PyTorch 2.14 on gloo: about one process in twenty aborts with it while the interpreter is finalised."""


def run(folder, *command, attempts=1):
    done = run_python(*command, cwd=folder, OMP_NUM_THREADS="1")
    if attempts > 1 and ABORTED in done.stderr:
        return run(folder, *command, attempts=attempts - 1)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """Return the losses that each script prints when two ranks run it on the CPU."""
    folder = tmp_path_factory.mktemp("torchrun")
    launched = [script for script in SCRIPTS if script != STARTS_ITS_RANKS]
    run(folder, FORKED_RANKS, "2", folder, *(EXAMPLES / script for script in launched))
    printed = {
        script: "".join((folder / f"{script}.{rank}").read_text() for rank in range(2)) for script in launched
    }
    own = (EXAMPLES / STARTS_ITS_RANKS, "--port", f"{free_port()}")
    printed[STARTS_ITS_RANKS] = run(folder, *own, attempts=4)
    return {script: losses_in(text) for script, text in printed.items()}


def losses_in(text):
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", text)]


@pytest.mark.slow
def test_two_ranks_run_every_script_on_a_cpu(losses):
    assert len(losses) == 11
    assert {script: len(each) for script, each in losses.items()} == dict.fromkeys(SCRIPTS, 3)


@pytest.mark.slow
def test_torchrun_runs_a_script_alike(losses, tmp_path):
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert losses_in(run(tmp_path, *launch, EXAMPLES / "ddp.py", attempts=4)) == losses["ddp.py"]


@pytest.mark.slow
def test_shardings_of_one_model_train_alike(losses):
    assert losses["ddp.py"] == losses["zero1.py"] == losses["hsdp.py"] == losses["mp_spawn.py"]
    assert losses["fsdp2.py"] == pytest.approx(losses["ddp.py"], rel=0.01)  # it computes in bfloat16


@pytest.mark.parametrize(
    "script", [pytest.param(each, marks=[pytest.mark.slow] * (each not in SAMPLE)) for each in SCRIPTS]
)
def test_a_rank_of_eight_runs_on_the_ghost(script, tmp_path):
    rank = RANKS_ON_THE_GHOST.get(script, 0)
    nproc = "2" if script == STARTS_ITS_RANKS else "8"  # it starts as many processes
    options = ("--gpu", "H100", "--nproc", nproc, "--rank", f"{rank}", "--to-end", "--json", "answer.json")
    if script == STARTS_ITS_RANKS:
        printed = run(tmp_path, "-m", "memfit", "dry-run", *options, EXAMPLES / script)
    else:
        done = warm_process.memfit("dry-run", *options, EXAMPLES / script, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        printed = done.stdout
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert (answer["verdict"], answer["steps"]) == ("fits", STEPS_ON_THE_GHOST.get(script, 3))
    own = dict(re.findall(r"^peak (allocated|reserved) ([\d,]+) B$", printed, re.MULTILINE))
    bounds = answer["range"] or {name: {"least": answer["peak"][name]} for name in own}
    assert {name: f"{bounds[name]['least']:,}" for name in own} == own != {}  # printed by the early run
    assert {row["name"]: row["bytes"] for row in answer["terms"]}["NCCL"] > 0


@pytest.mark.slow
def test_a_rank_of_memfit_s_engine_runs_on_the_ghost(tmp_path):
    """Its ranks agree in a group of Gloo's beside NCCL's."""
    options = ("--nproc", "8", "--json", "answer.json")
    done = warm_process.memfit("dry-run", *options, EXAMPLES / "digits.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert (answer["verdict"], answer["steps"]) == ("fits", 3)
    assert answer["step_time"]["communication"]["ranks"] == 8
