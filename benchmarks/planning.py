"""Plan for scripts under one budget after another, and check what plans promise.

    python benchmarks/planning.py [--budgets 0.9,0.8,0.7] ["SCRIPT ARGUMENTS" ...]

Budgets are shares of what each script needs as written, the CUDA context apart. Checked: no plan needs
more than its budget; no other plan that ran fits as well, leaves the loop as it is and is faster; a smaller
budget never needs more memory or costs less time (with the loop changed, where that is faster); no plan is
below the bound of its program; and nothing that ran needs less than the floor of another budget's answer. By
default, the scripts are examples and those of planned_networks.py.

    python benchmarks/planning.py --checkout FOLDER [--budgets 0.7,0.45] "SCRIPT ARGUMENTS" ...

Times memfit plan on scripts of another repository, each in its own folder, beside memfit dry-run right before
it. Budgets are shares of all that a script needs. Checked: a plan, or that no plan fits, takes at most 3
times the dry run and 20 s.

    python benchmarks/planning.py --before CHECKOUT [--budgets 0.8,0.6,0.4] ["SCRIPT ARGUMENTS" ...]

Compares with the plans of another version of memfit, in a checkout of it. Checked: with the loop changed, a
step takes no longer than then; without a change of the loop, no longer than under the fastest plan of then
that needs none.
"""

import functools
import math
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from measuring import GIB, ROOT, command_line, memfit_json, table_head, table_line

import memfit
from memfit import MemfitError
from memfit.planning.run_changes_on_ghost import is_made_by_loop
from memfit.records import PlanRun, ScriptPlan
from memfit.report.terminal.plan_words import plan_changes_in_words

EXAMPLES = "gpt", "resnet50", "vit_l16", "unet", "lstm", "retinanet", "amp_gradscaler", "hf_trainer"
BUDGETS = "0.9,0.8,0.7,0.6,0.5,0.4,0.3,0.2"
NETWORKS = "gpt", "resnet50", "unet", "vit", "lstm", "gpt-dropout"
SCRIPTS = (
    *(f"examples/{name}.py" for name in EXAMPLES),
    "examples/hf_trainer.py --model gpt2",
    *(f"benchmarks/planned_networks.py {name} --batch-size 64" for name in NETWORKS),
)


def main() -> None:
    """Print a row for each script and budget, and exit with 1 if a promise is broken."""
    parser = command_line(__doc__)
    parser.add_argument("scripts", nargs="*", default=SCRIPTS)
    parser.add_argument("--budgets")
    parser.add_argument("--checkout", type=Path)
    parser.add_argument("--before", type=Path)
    options = parser.parse_args()
    budgets = options.budgets or (
        "0.7,0.45" if options.checkout else "0.8,0.6,0.4" if options.before else BUDGETS
    )
    shares = [float(share) for share in budgets.split(",")]
    if options.checkout is not None:
        columns = "script", "budget", "dry run, s", "plan, s", "at most, s", "answer", "within"
        print(table_head(columns, "lrrrrll"))
        missed = [
            not times(options.checkout, script, share) for script in options.scripts for share in shares
        ]
        sys.exit(any(missed))
    if options.before is not None:
        columns = "script", "budget", "then, loop changed", "now", "then, as it is", "now", "worse"
        print(table_head(columns, "lrrrrrl"))
        worse = [not as_good(options.before, script, share) for script in options.scripts for share in shares]
        sys.exit(any(worse))
    print(table_head(("script", "budget", "needs", "time", "bound", "runs", "seconds", "plan"), "lrrrrrrl"))
    broken = [fault for script in options.scripts for fault in rows(script, shares)]
    for fault in broken:
        print(f"BROKEN: {fault}", file=sys.stderr)
    sys.exit(bool(broken))


def rows(command: str, shares: list[float]) -> list[str]:
    """Print the rows of a script with its arguments, and return the promises that were broken."""
    script, *arguments = command.split()
    name = " ".join((Path(script).stem, *arguments))
    plan = functools.partial(memfit.plan, ROOT / script, arguments)
    try:
        written = plan().as_written
    except MemfitError as error:
        print(f"| {name} | not planned: {error} |")
        return [f"{name} was not planned"]
    outside = 512 << 20  # of the default card
    broken, slowest, least = [], 0.0, written.needs.bytes
    floor, ran = 0, written.needs.bytes
    for share in shares:
        budget = int(share * (written.needs.bytes - outside)) + outside
        started = time.monotonic()
        try:
            found = plan(budget=budget)
        except MemfitError as error:
            print(f"| {name} | {share:.0%} | failed: {error} |", flush=True)
            broken.append(f"{name} at {share:.0%}: {error}")
            continue
        seconds = time.monotonic() - started
        print(f"| {name} | {budget / 2**30:.2f} GiB | {row(found, seconds)} |", flush=True)
        ran = min([ran, *(run.needs.bytes for run in found.tried)])
        floor = max(floor, 0 if found.floor is None else found.floor.bytes)
        chosen = found.chosen
        if chosen is None:
            continue
        broken += [f"{name} at {share:.0%} {fault}" for fault in faults_of_choice(found, chosen)]
        if chosen.needs.bytes > least:
            broken.append(f"{name} at {share:.0%} needs more than with more memory")
        least = chosen.needs.bytes
        fastest = min(run.time for run in (chosen, found.in_loop) if run is not None)
        if fastest < slowest - 0.005:
            broken.append(f"{name} at {share:.0%} costs less time than with more memory")
        slowest = max(slowest, fastest)
    if ran < floor:
        broken.append(f"{name} has run with less than its floor")
    return broken


def faults_of_choice(found: ScriptPlan, chosen: PlanRun) -> Iterator[str]:
    """Yield what an answer promises of the plan that it chooses, and does not keep."""
    if chosen.needs.bytes > found.budget:
        yield "needs more than its budget"
    most = found.budget if found.is_tight else found.budget - found.uncertainty
    as_it_is = (run for run in found.tried if run.needs.bytes <= most and not is_made_by_loop(run.change))
    if any(run.time < chosen.time for run in as_it_is):
        yield "is slower than another plan that ran"
    if found.bound > chosen.time + 1e-9:
        yield "is faster than its bound"


def row(found: ScriptPlan, seconds: float) -> str:
    """Return what a row says of an answer."""
    needs = found.floor or (found.chosen or found.smallest).needs
    least = "" if found.chosen is not None else "at least " if found.floor is not None else "smallest "
    columns = [f"{least}{needs.bytes / 2**30:.2f}", "no plan", "", len(found.tried) + 1, f"{seconds:.0f}", ""]
    if found.chosen is not None:
        columns[1:3] = f"{found.chosen.time:.3f}", f"{found.bound:.3f}"
        columns[-1] = plan_changes_in_words(found.chosen)
        if found.in_loop is not None and found.in_loop.time < found.chosen.time:
            columns[-1] += f" ({found.in_loop.time:.3f} in the loop: {plan_changes_in_words(found.in_loop)})"
    return " | ".join(map(str, columns))


def times(checkout: Path, command: str, share: float) -> bool:
    """Print how long a dry run and a plan of a script take, and return whether the plan was in time."""
    script, *arguments = shlex.split(command)
    path = (checkout / script).resolve()
    name = f"{script} {shlex.join(arguments)}"
    dry_run, seconds = timed(path, arguments, "dry-run")
    if "error" in dry_run:
        print(table_line((name, "", f"{seconds:.1f}", "", "", dry_run["error"], "no")), flush=True)
        return False
    budget = int(share * dry_run["needs"]["bytes"])
    most = 3 * seconds + 20
    found, taken = timed(path, arguments, "plan", "--budget", f"{budget}B")
    proven = "no memory left for the script" in found.get("error", "")  # the context alone needs more
    within = (proven or "error" not in found) and taken <= most
    times = f"{seconds:.1f}", f"{taken:.1f}", f"{most:.1f}"
    of = f"{share:.0%} of {dry_run['needs']['bytes'] / GIB:.2f} GiB"
    print(table_line((name, of, *times, answered(found), "yes" if within else "no")), flush=True)
    return within


def as_good(before: Path, command: str, share: float) -> bool:
    """Print the times of plans then and now, and return whether none is longer than then."""
    script, *arguments = command.split()
    context = 512 << 20  # of the default card
    written = memfit_json("dry-run", str(ROOT / script), *arguments)[0]["needs"]["bytes"]
    budget = int(share * (written - context)) + context

    def plan(source: Path, *options: str) -> dict:
        command = ("plan", "--budget", f"{budget}B", *options, str(ROOT / script), *arguments)
        found, done = memfit_json(*command, environment={"PYTHONPATH": str(source.resolve() / "src")})
        return found if found is not None else sys.exit(done.stderr)

    then, now = plan(before), plan(ROOT)
    whole = plan(before, "--bitwise") if then["micro_batches"] else then
    changed = min(time_of(found) for found in (now, now["in_loop"]) if found is not None)
    by_hand = now["micro_batches"] is not None and not now["micro_batches"]["by_option"]
    times = time_of(then), changed, time_of(whole), math.inf if by_hand else time_of(now)
    worse = times[1] > times[0] + 0.001 or times[3] > times[2] + 0.001
    cells = f"{budget / GIB:.2f} GiB", *(f"{time:.3f}" for time in times), "worse" if worse else ""
    print(table_line((" ".join((Path(script).stem, *arguments)), *cells)), flush=True)
    return not worse


def time_of(found: dict) -> float:
    """Return the time of a plan's JSON, infinite if there is no plan."""
    return math.inf if found["time"] is None else found["time"]


def timed(path: Path, arguments: list[str], *command: str) -> tuple[dict, float]:
    """Return the JSON that a command of memfit writes for a script, or its error, and its seconds."""
    started = time.monotonic()
    found, done = memfit_json(*command, str(path), *arguments, folder=path.parent)
    seconds = time.monotonic() - started
    return found or {"error": done.stderr.strip().rpartition("\n")[-1]}, seconds


def answered(found: dict) -> str:
    """Return what a plan's JSON answers."""
    if "error" in found:
        return found["error"]
    tried = f" ({len(found['tried'])} tried)" if found["tried"] else ""
    if found["time"] is not None:
        return f"{'tight ' * found['is_tight']}plan, {found['time']:.3f} times the time{tried}"
    if found["floor"] is not None:
        return f"every plan needs {found['floor']['bytes'] / 2**30:.2f} GiB{tried}"
    return f"none that ran fits{tried}"


if __name__ == "__main__":
    main()
