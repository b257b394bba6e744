"""Plan scripts of others at 70 % and 45 % of their need, carry the plans out, and compare the losses.

    python benchmarks/foreign_plans.py CHECKOUTS [SCRIPT ...] [--shares 0.7,0.45] [--rounds N]
        [--markdown FILE] [--json FILE]

CHECKOUTS is a folder of clones: foreign_scripts.py has the repositories and commits. Each script is copied,
its data are made, and it runs unmodified:

    memfit dry-run SCRIPT                              what it needs
    memfit plan --budget 0.7 of it -o plan.json SCRIPT
    memfit dry-run --memory ... --plan plan.json SCRIPT     fits, and allocates what was planned, to the byte
    memfit verify --plan plan.json SCRIPT              the same gradients
    memfit train --plan plan.json SCRIPT, and python SCRIPT, on the CPU, in turns

The measured time is the processor time between the first and the last number that the script reads from its
tensors, relative to plain Python; the predicted one is the assumed card's. The losses are those numbers.
Where a plan divides batches by the script's own option, the loop reads one for each part: their mean counts,
or their sum where the loop has divided them.
Results of other scripts that the file of --json has are kept. Exits with 1 if a cell neither succeeds nor has
a plan refused for the reason that foreign_scripts.py states.
"""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foreign_scripts import SCRIPTS as OWN_LOOPS
from foreign_scripts import ForeignScript
from foreign_trainers import TRAINERS
from measuring import (
    GIB,
    MEMFIT,
    command_line,
    in_turns,
    memfit_json,
    parts,
    table,
    write_json,
    write_or_print,
)

SCRIPTS = (*OWN_LOOPS, *TRAINERS)
TOLERANCE = 1e-5
"""Greatest difference of a loss, relative to it."""
OFFLINE = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "offline"}
READS = Path(__file__).parent / "foreign_plans"
LIMIT = 1800
"""Seconds that one run may take."""
_Read = tuple[float, float]
"""A number that a script read, and the processor time by then."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A script under one budget."""

    script: str
    share: float
    need: int
    """Bytes of the process, as written."""
    budget: int
    plan: str = ""
    needs: int | None = None
    """Bytes of the process under the plan."""
    predicted: float | None = None
    """Time of a step, relative to the script as written."""
    measured: float | None = None
    difference: float | None = None
    """Greatest difference of a loss, relative to it."""
    losses: int = 0
    """Numbers that were compared."""
    refused: str = ""
    """Why no plan fits, as an expert says it."""
    fault: str = ""

    @property
    def outcome(self) -> str:
        """What the table says."""
        return self.fault or (f"refused: {self.refused}" if self.refused else "VERIFIED, trained")


class FailedJourneyError(Exception):
    """A step of the journey did not do what it must: the cell says which."""


def cells(script: ForeignScript, checkouts: Path, shares: Sequence[float], rounds: int) -> Iterator[Cell]:
    """Yield a script's cells."""
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work, "checkout")
        shutil.copytree(checkouts / script.folder, folder, ignore=shutil.ignore_patterns(".git"))
        script.prepare(folder)
        needs = _memfit(script, folder, "dry-run")["needs"]["bytes"]
        for share in shares:
            cell = Cell(script.name, share, needs, int(share * needs))
            print(f"{script.name} at {share:.0%} of {needs / GIB:.2f} GiB", file=sys.stderr)
            try:
                yield _journey(script, folder, cell, rounds)
            except FailedJourneyError as fault:
                yield _with(cell, fault=str(fault))


def _with(cell: Cell, **values: Any) -> Cell:
    return Cell(**(asdict(cell) | values))


def _journey(script: ForeignScript, folder: Path, cell: Cell, rounds: int) -> Cell:
    """Plan, check the plan on the ghost and by arithmetic, and train with it."""
    file, budget = folder / "plan.json", str(cell.budget)
    file.unlink(missing_ok=True)
    plan = _memfit(script, folder, "plan", "--budget", budget, "-o", str(file))
    if plan["needs"] is None:
        why = script.refused.get(cell.share, "")
        return _with(cell, refused=why, fault="" if why else f"no plan: {plan['reason']}")
    cell = _with(
        cell,
        plan=plan["words"],
        needs=plan["needs"]["bytes"],
        predicted=plan["time"],
        fault="TIGHT" * plan["is_tight"],
    )
    dry = _memfit(script, folder, "dry-run", "--memory", budget, "--plan", str(file))
    verdict, allocated = dry["verdict"], dry["peak"]["allocated"]
    if allocated != plan["allocated"]:  # where memory is short, cuDNN has other workspaces than in its runs
        allocated = _memfit(script, folder, "dry-run", "--plan", str(file))["peak"]["allocated"]
    if verdict != "fits" or allocated != plan["allocated"]:
        raise FailedJourneyError(f"dry run: {verdict}, {allocated}, planned {plan['allocated']}")
    verified = _memfit(script, folder, "verify", "--plan", str(file), more=script.on_cpu)
    if verified["verdict"] != "verified":
        raise FailedJourneyError(f"verify: {verified['verdict']} {verified['reason']}")
    ways = {
        "plain": lambda: _train(script, folder, (sys.executable,)),
        "planned": lambda: _train(
            script, folder, (*MEMFIT, "train", "--plan", str(file), *_separate(script))
        ),
    }
    ratios, differences, losses = [], [], 0
    for found in in_turns(ways, rounds):
        plain, read = found["plain"], found["planned"]
        planned = _of_batches(read, plain, (plan["micro_batches"] or {"count": 1})["count"])
        if not plain or len(plain) != len(planned):
            raise FailedJourneyError(f"plain Python read {len(plain)} numbers, memfit train {len(read)}")
        ratios.append((planned[-1][1] - planned[0][1]) / (plain[-1][1] - plain[0][1]))
        differences += [
            _difference(ours, theirs) for (ours, _), (theirs, _) in zip(planned, plain, strict=True)
        ]
        losses = len(plain)
    cell = _with(cell, measured=statistics.median(ratios), difference=max(differences), losses=losses)
    return cell if max(differences) <= TOLERANCE else _with(cell, fault="losses differ")


def _of_batches(read: list[_Read], plain: list[_Read], parts: int) -> list[_Read]:
    """Return numbers that a script read, with the mean or the sum of those of a batch's parts."""
    found, left = [], list(read)
    for value, _ in plain:
        count = 1 if left and _difference(left[0][0], value) <= TOLERANCE else parts
        if len(left) < count:
            break
        total = sum(number for number, _ in left[:count])
        nearest = min((total, total / count), key=lambda each: _difference(each, value))
        found.append((nearest, left[count - 1][1]))
        del left[:count]
    return found + left


def _difference(ours: float, theirs: float) -> float:
    return abs(ours - theirs) / max(abs(theirs), 1e-30)


def _separate(script: ForeignScript) -> tuple[str, ...]:
    """Return what comes before a script that may have options of memfit's names."""
    return () if script.command[0] == "-m" else ("--",)


def _stand_in(script: ForeignScript) -> dict[str, str]:
    """Return the environment in which sitecustomize.py is imported, and where the CPU may be the GPU."""
    path = os.pathsep.join([str(READS), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path} | ({"FOREIGN_GPU": "1"} if script.asserts_gpu else {})


def _memfit(
    script: ForeignScript, folder: Path, command: str, *options: str, more: Sequence[str] = ()
) -> dict[str, Any]:
    """Run a command of memfit on the script; return its JSON, with the words of the chosen plan."""
    on_cpu = command == "verify"
    card = () if on_cpu else ("--gpu", script.gpu)
    found, done = memfit_json(
        command,
        *card,
        *options,
        *_separate(script),
        *script.command,
        *more,
        environment=OFFLINE | script.environment | (_stand_in(script) if on_cpu else {}),
        folder=folder,
        seconds=LIMIT,
    )
    if found is None:
        raise FailedJourneyError(f"memfit {command}: {done.stderr.strip()[-300:]}")
    chosen = re.search(r"^(.*?) +<- chosen", done.stdout, re.MULTILINE)
    return {**found, "words": chosen[1] if chosen else ""}


def _train(script: ForeignScript, folder: Path, launcher: Sequence[str]) -> list[_Read]:
    """Train on the CPU; return each number that the script read, and the processor time by then."""
    reads = folder / "reads.txt"
    reads.unlink(missing_ok=True)
    environment = {**OFFLINE, **script.environment, **_stand_in(script), "FOREIGN_READS": str(reads)}
    done = subprocess.run(
        [*launcher, *script.command, *script.on_cpu],
        env={**os.environ, **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
    )
    if done.returncode:
        raise FailedJourneyError(
            f"{' '.join(launcher[1:4])} ended with {done.returncode}: {done.stderr.strip()[-300:]}"
        )
    lines = reads.read_text().splitlines() if reads.exists() else []
    return [(float(value), float(at)) for value, at in map(str.split, lines)]


def markdown(found: Sequence[Cell]) -> str:
    """Return the page of results."""
    head = (
        "script",
        "need",
        "budget",
        "plan",
        "needs",
        "predicted",
        "measured",
        "losses differ by",
        "outcome",
    )

    def ratio(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    rows = [
        (
            cell.script,
            f"{cell.need / GIB:.2f} GiB",
            f"{cell.budget / GIB:.2f} GiB ({cell.share:.0%})",
            cell.plan or "-",
            "-" if cell.needs is None else f"{cell.needs / GIB:.2f} GiB",
            ratio(cell.predicted),
            ratio(cell.measured),
            "-" if cell.difference is None else f"{cell.difference:.1e} ({cell.losses})",
            cell.outcome,
        )
        for cell in found
    ]
    sources = "".join(
        f"- {each.name}: {each.repository}, `{' '.join(each.command)}`"
        f"{' (the CPU stands in for the GPU that it asserts)' * each.asserts_gpu}\n"
        for each in SCRIPTS
        if any(cell.script == each.name for cell in found)
    )
    good = sum(not cell.fault for cell in found)
    return (
        f"# Scripts of others under plans\n\n`python benchmarks/foreign_plans.py CHECKOUTS`: {good} of "
        f"{len(found)} cells as they must be. Needs are assumed (the CUDA context), predicted times too "
        "(the card's), measured ones are processor time on a CPU; losses as the script reads them, relative "
        f"to plain Python's.\n\n{table(head, 'lrrlrrrll', rows)}\n\n{sources}"
    )


def main() -> int:
    """Plan the scripts, and write the table."""
    parser = command_line(__doc__, results=True)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help=", ".join(each.name for each in SCRIPTS))
    parser.add_argument(
        "--shares", type=parts, default=["0.7", "0.45"], help="of the need; default: 0.7,0.45"
    )
    parser.add_argument("--rounds", type=int, default=1, help="of training in turns; default: 1")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table to this file")
    options = parser.parse_args()
    known = {each.name: each for each in SCRIPTS}
    if unknown := set(options.scripts) - known.keys():
        parser.error(f"no script is named {', '.join(sorted(unknown))}")
    chosen = [known[name] for name in options.scripts] or SCRIPTS
    shares = list(map(float, options.shares))
    kept = {}
    if options.json is not None and options.json.exists():
        kept = {
            (cell["script"], cell["share"]): Cell(**cell) for cell in json.loads(options.json.read_text())
        }
    for cell in (cell for each in chosen for cell in cells(each, options.checkouts, shares, options.rounds)):
        kept[cell.script, cell.share] = cell
        write_json(options.json, [asdict(each) for each in kept.values()])
    names = list(known)
    found = sorted(kept.values(), key=lambda cell: (names.index(cell.script), -cell.share))
    write_or_print(options.markdown, markdown(found))
    return int(any(cell.fault for cell in found))


if __name__ == "__main__":
    sys.exit(main())
