"""Train scripts on this machine's GPU, as written and under plans, and compare with what the plans predict.

    python benchmarks/gpu/plans.py --plan H100-80GB --out FOLDER     on any machine: write the plans
    python benchmarks/gpu/plans.py --plans FOLDER --out RESULTS      on the card: train, about four minutes
    python benchmarks/gpu/plans.py --rehearse H100-80GB --plans FOLDER --out RESULTS --rounds 1

The cases are in plans.toml. Compared: the most memory that PyTorch counted, the time of a step, and the
losses. Planning needs no GPU, but the same torch; without memfit installed, set PYTHONPATH="$PWD/src". Each
run is a process with a time limit; as written and under the plans take turns. The script writes
CARD-DRIVER-TORCH.json and .md after every run, and a second call leaves out the finished cases. With
``--rehearse`` the ghost stands in for the card: the peaks should be equal, and the times mean nothing.
"""

import argparse
import importlib.util
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from card_session import ResultFile, chosen, command_line, ran_on, rehearse, result_name
from plan_cases import AS_WRITTEN, ROOT, PlanCase, described, make_plans, plan_cases, plan_path, read_json
from plans_table import markdown
from timed_run import TimedRun, timed_run

from memfit.card.detect_card import detect_card
from memfit.devices import find_device
from memfit.errors import MemfitError

HERE = Path(__file__).resolve().parent


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = command_line(__doc__, minutes=5)
    parser.add_argument("--plan", metavar="GPU", help="write the plans for this GPU, and train nothing")
    parser.add_argument("--plans", type=Path, help="folder of the plans (default: that of --out)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each kind (default: 2)")
    return parser.parse_args()


def main() -> int:
    """Plan, or train; return 1 if a plan is missing, or a run failed or did not take place."""
    options = parsed()
    until = time.monotonic() + 60 * options.minutes
    cases = chosen(plan_cases(), options.only, "plans.toml")
    try:
        if options.plan:
            return _plan(cases, options.plan, options.out)
        rehearse(options.rehearse)
        result = _result(options.out)
    except MemfitError as error:
        sys.exit(f"plans.py: {error}")
    plans = options.plans or options.out
    for case in cases:
        if result.is_done(case.name) and not options.again:
            continue
        train(case, plans.resolve(), result, options.rounds, until)
    return result.shown(case.name for case in cases)


def _plan(cases: list[PlanCase], gpu: str, folder: Path) -> int:
    """Write the plans that are not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    device = find_device(gpu)
    missing = []
    for case in cases:
        print(f"{case.name} ...", file=sys.stderr)
        missing += make_plans(case, device.name, device.context_bytes, folder)
    for why in missing:
        print(why, file=sys.stderr)
    return int(bool(missing))


def _result(folder: Path) -> ResultFile:
    """Open the result file of this machine's GPU."""
    from torch import __version__ as torch

    card = detect_card("train under plans")
    result = ResultFile(folder.resolve(), result_name(card, f"{torch}-plans"), "cases", markdown)
    result.content |= ran_on(card, str(torch))
    return result


def train(case: PlanCase, folder: Path, result: ResultFile, rounds: int, until: float) -> None:
    """Train a script as written and under its plans in turn, and write the result after each run.

    Args:
        case: what to train.
        folder: where the plans are.
        result: gets the outcome.
        rounds: how often each runs.
        until: when the last run has to end, as ``time.monotonic`` says.
    """
    outcome: dict[str, Any] = {"status": "done", "command": [case.script, *case.arguments]}
    result.done[case.name] = outcome
    missing = [name for name in case.needs if importlib.util.find_spec(name) is None]
    paths = {f"{share:g}": plan_path(folder, case, share) for share in case.shares}
    plans = {share: read_json(path) for share, path in paths.items() if path.exists()}
    if missing or not plans:
        outcome |= {"status": "skipped", "why": f"needs {', '.join(missing)}" if missing else "no plans"}
        result.keep()
        return
    allocated = read_json(plan_path(folder, case, AS_WRITTEN))["allocated"]
    outcome["as written"] = {"plan": "", "predicted": allocated, "time": 1.0, "runs": []}
    for share, plan in plans.items():
        outcome[share] = {
            "plan": described(plan),
            "predicted": plan["allocated"],
            "time": plan["time"],
            "equality": plan["equality"],
            "planned_for": [plan["device"]["name"], plan["versions"]["torch"]],
            "runs": [],
        }
    for number in range(rounds):
        for kind in ("as written", *plans):
            left = until - time.monotonic()
            if left <= 0:
                outcome |= {"status": "not run", "why": f"no time left for round {number + 1} (--minutes)"}
                result.keep()
                return
            under = () if kind == "as written" else ("-m", "memfit", "train", "--plan", str(paths[kind]))
            command = (sys.executable, *under, case.script, *case.arguments)
            run = timed_run(command, ROOT, min(case.seconds, left))
            outcome[kind]["runs"].append(_kept(run, case.warm_up))
            if run.code != 0:
                why = "took too long" if run.code is None else f"exit code {run.code}: {run.error}"
                outcome |= {"status": "failed", "why": f"{kind}: {why}"}
            result.keep()
            print(f"{case.name} {kind}: {run.seconds:.1f} s, exit code {run.code}", file=sys.stderr)


def _kept(run: TimedRun, warm_up: int) -> dict[str, Any]:
    """Return what the result file says of a run."""
    found = asdict(run) | {"median": run.median(warm_up), "seconds": round(run.seconds, 2)}
    return found | {"steps": [round(step, 5) for step in run.steps]}


if __name__ == "__main__":
    sys.exit(main())
