"""One process as rank r of N holds what that rank of N real processes holds, each on a ghost of its own.

Each script runs three times, and the peaks (allocated, reserved) of every rank must be equal to the byte:

- as one process after the other, each of which stands for a rank (``memfit dry-run --nproc N --all-ranks``);
- as N processes that torchrun starts (``torchrun -m memfit dry-run``);
- as N processes that ``mp.spawn`` starts (rank_jobs/spawned.py), by the peaks that PyTorch reports to them.

Processes meet through PyTorch's own store and Gloo, and exchange short buffers. Where streams race, the first
two compare both bounds, and the third, which runs once, the lower one.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from rank_tables.rank_run import ROOT
from rank_tables.row import Row

from memfit.run.launchers import free_port

COLUMNS = ("script", "rank", "peak allocated", "peak reserved", "under torchrun", "under mp.spawn")
SCRIPTS = (
    *(f"examples/distributed/{name}.py" for name in ("ddp", "zero1", "fsdp2")),
    "benchmarks/rank_jobs/uneven.py",
    "benchmarks/rank_jobs/uneven_zero1.py",
)
"""In the last two, the ranks differ."""
WORLDS = (2, 4)
SIZES = ("allocated", "reserved")

Peaks = Mapping[str, Mapping[str, int]]
"""``allocated`` and ``reserved``, each ``least`` and ``most``, in bytes."""


def rows() -> Iterator[Row]:
    """Compare every rank of every script."""
    for script in SCRIPTS:
        for ranks in WORLDS:
            yield from compare(ROOT / script, ranks)


def compare(script: Path, ranks: int) -> Iterator[Row]:
    """Run a script in the three ways, and compare each rank."""
    alone = one_after_the_other(script, ranks)
    together, spawned = under_torchrun(script, ranks), under_spawn(script, ranks)
    for rank in range(ranks):
        wanted = {name: alone[rank][name] for name in SIZES}
        least = {name: wanted[name]["least"] for name in SIZES}
        same = {"torchrun": together[rank] == wanted, "mp.spawn": spawned[rank] == least}
        differing = [f"{way} differs" for way, is_same in same.items() if not is_same]
        yield Row(
            (
                script.name,
                f"{rank} of {ranks}",
                *(_in_bytes(wanted[name]) for name in SIZES),
                *("the same" if is_same else "differs" for is_same in same.values()),
            ),
            f"{', '.join(differing)}: {wanted}, {together[rank]}, {spawned[rank]}" if differing else "",
        )


def one_after_the_other(script: Path, ranks: int) -> dict[int, Peaks]:
    """Return the peaks of each rank, by one process that stands for it."""
    command = [sys.executable, "-m", "memfit", "dry-run", "--nproc", f"{ranks}", "--all-ranks"]
    return _ranks_of(command, script)


def under_torchrun(script: Path, ranks: int) -> dict[int, Peaks]:
    """Return the peaks of each rank, by as many processes that torchrun starts."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", f"{ranks}"]
    return _ranks_of([*launch, "-m", "memfit", "dry-run"], script)


def under_spawn(script: Path, ranks: int) -> dict[int, dict[str, int]]:
    """Return the peaks that PyTorch reports to each of as many processes that ``mp.spawn`` starts."""
    job = (str(ROOT / "benchmarks/rank_jobs/spawned.py"), f"{ranks}", f"{free_port()}", str(script))
    helper = [sys.executable, str(Path(__file__).with_name("spawned_ghosts.py")), f"{ranks}", *job]
    with tempfile.TemporaryDirectory() as folder:
        printed = _run(helper, folder)
    found = re.findall(r"^rank (\d+): (\d+) (\d+)$", printed, re.MULTILINE)
    if len(found) != ranks:
        raise SystemExit(f"{' '.join(helper)} printed peaks of {len(found)} ranks:\n{printed[-2000:]}")
    return {int(rank): dict(zip(SIZES, map(int, sizes), strict=True)) for rank, *sizes in found}


def _ranks_of(command: list[str], script: Path) -> dict[int, Peaks]:
    """Run memfit, and return the peaks of each rank from its JSON."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        options = ["--gpu", "H100", "--to-end", "--json", str(report)]
        _run([*command, *options, "--", str(script)], folder)
        answer = json.loads(report.read_text())
    return {
        rank: {name: row["peak"][name] for name in SIZES}
        for row in answer["ranks"]
        for rank in (row["rank"], *row["also"])
    }


def _run(command: list[str], folder: str) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def _in_bytes(size: Mapping[str, int]) -> str:
    if size["least"] == size["most"]:
        return f"{size['most']:,} B"
    return f"{size['least']:,} to {size['most']:,} B"
