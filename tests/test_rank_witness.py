"""One process as rank r of N holds what that rank of N real processes holds, each on a ghost of its own.

Each script runs three times, and the peaks (allocated, reserved) of every rank must be equal to the byte:

- as one process after the other, each of which stands for a rank (``memfit dry-run --nproc N --all-ranks``);
- as N processes that torchrun starts (``torchrun -m memfit dry-run``);
- as N processes that ``mp.spawn`` starts (rank_scripts/spawned.py), by the peaks that PyTorch reports.

Processes meet through PyTorch's own store and Gloo, and exchange short buffers. Where streams race, the first
two compare both bounds, and the third, which runs once, the lower one. MEMFIT_TIMES=2 runs six scripts as
two and as four ranks, and one as eight: there, the three ways take 39, 27 and 26 s of processor time.

The trainers of libraries (benchmarks/parallel_modes/libraries.py) run in the first two ways, where
``accelerate launch`` starts the processes of those that it configures; MEMFIT_TIMES=2 runs nine of them as
two and as eight ranks.
"""

import json
import os
import re
from pathlib import Path

import pytest
from parallel_modes import LAUNCHED
from parallel_modes import SCRIPTS as MODES

from memfit.run.launchers import free_port
from support.new_processes import run_python

pytestmark = [pytest.mark.process, pytest.mark.slow]

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "tests/support/rank_scripts"
JOBS = [(SCRIPTS / "uneven_zero1.py", 2), (SCRIPTS / "sent_values.py", 2)]  # their ranks differ
if int(os.environ.get("MEMFIT_TIMES", "1")) > 1:
    examples = (ROOT / f"examples/distributed/{name}.py" for name in ("ddp", "zero1", "fsdp2"))
    scripts = (*examples, SCRIPTS / "uneven.py", SCRIPTS / "uneven_zero1.py", SCRIPTS / "sent_values.py")
    JOBS = [*((script, ranks) for script in scripts for ranks in (2, 4)), (SCRIPTS / "sent_values.py", 8)]
SIZES = ("allocated", "reserved")
LIBRARIES = [("launched_fsdp1", 2)]
if int(os.environ.get("MEMFIT_TIMES", "1")) > 1:
    trainers = ("trainer_ddp", "trainer_fsdp1", "trainer_fsdp2", "lightning", "lightning_fsdp")
    launched = (name.partition(":")[2] for name in LAUNCHED)
    LIBRARIES = [(name, ranks) for name in (*launched, *trainers) for ranks in (2, 8)]


def run(command, folder):
    done = run_python(*command, cwd=folder, timeout=900, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def one_after_the_other(command, ranks, folder):
    options = ("-m", "memfit", "dry-run", "--nproc", f"{ranks}", "--all-ranks", "--gpu", "H100", "--to-end")
    run([*options, "--json", "report.json", "--", *command], folder)
    answer = json.loads((folder / "report.json").read_text())
    return peaks_of(answer)


def under_torchrun(
    command, ranks, folder, launch=("torch.distributed.run", "--standalone", "--nproc-per-node")
):
    options = ("-m", "memfit", "dry-run", "--gpu", "H100", "--to-end", "--json", "report.json")
    run(["-m", *launch, f"{ranks}", *options, "--", *command], folder)
    return peaks_of(json.loads((folder / "report.json").read_text()))


def under_spawn(script, ranks, folder):
    """Return the peaks that PyTorch reports to each of as many processes that ``mp.spawn`` starts."""
    job = (SCRIPTS / "spawned.py", f"{ranks}", f"{free_port()}", script)
    printed = run([SCRIPTS / "spawned_ghosts.py", f"{ranks}", *job], folder)
    found = re.findall(r"^rank (\d+): (\d+) (\d+)$", printed, re.MULTILINE)
    assert len(found) == ranks, printed[-2000:]
    return {int(rank): dict(zip(SIZES, map(int, sizes), strict=True)) for rank, *sizes in found}


def peaks_of(answer):
    """Return the peaks of each rank: least and most allocated and reserved."""
    return {
        rank: {name: row["peak"][name] for name in SIZES}
        for row in answer["ranks"]
        for rank in (row["rank"], *row["also"])
    }


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("script", "ranks"), JOBS, ids=lambda value: getattr(value, "stem", value))
def test_each_rank_holds_what_it_holds_beside_real_ones(script, ranks, tmp_path):
    alone = one_after_the_other([script], ranks, tmp_path)
    assert under_torchrun([script], ranks, tmp_path) == alone
    least = {rank: {name: peak["least"] for name, peak in each.items()} for rank, each in alone.items()}
    assert under_spawn(script, ranks, tmp_path) == least
    if script.stem == "uneven_zero1":
        assert least[0] != least[1]  # else a mistaken rank would not show


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "ranks"), LIBRARIES)
def test_each_rank_of_a_trainer_holds_what_it_holds_beside_real_ones(name, ranks, tmp_path):
    command = [MODES / "libraries.py", name]
    options = LAUNCHED.get(f"libraries:{name}")
    if options is None:
        assert under_torchrun(command, ranks, tmp_path) == one_after_the_other(command, ranks, tmp_path)
        return
    alone = one_after_the_other(["accelerate", "launch", *options.split(), *command], ranks, tmp_path)
    launch = ("accelerate.commands.launch", *options.split(), "--num_processes")
    assert under_torchrun(command, ranks, tmp_path, launch) == alone
    assert sorted(alone) == list(range(ranks))
