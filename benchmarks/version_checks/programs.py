"""Checks that run memfit's commands and benchmarks as a user does.

peaks       dry runs of examples                                  the recorded peaks, to the byte
training    memfit plan ──> dry-run --plan ──> verify ──> train   the peak that the plan predicts, equal
gradients, every step
equality    benchmarks/equality.py on a few networks              equal bit for bit
"""

import re
import tempfile

from outcomes import EXAMPLES, FailedError, Outcome, memfit, output

JOBS = (
    "gpt.py --steps 3",
    "checkpointed.py --steps 3",
    "accumulation.py --steps 3",
    "linear1024.py",
    "two_linear.py",
)
GPT = str(EXAMPLES / "gpt.py")
STEPS = 3
NETWORKS = 5


def peaks(python: str) -> Outcome:
    """Dry-run each job, and read its peak allocated and reserved in bytes."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for job in JOBS:
            script, *arguments = job.split()
            path = str(EXAMPLES / script)
            done = memfit(python, folder, "dry-run", "--steps", "1000", "--", path, *arguments)
            found[job] = {name: done["peak"][name] for name in ("allocated", "reserved")}
    return Outcome(f"the peaks of {len(found)} jobs", found)


def training(python: str) -> Outcome:
    """Make a plan for a GPT, run it on the ghost, verify it, and train under it, both on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        made = memfit(python, folder, "plan", "--budget", "5GiB", "--bitwise", "-o", "plan.json", GPT)
        planned = ("--plan", "plan.json", GPT)
        ran = memfit(python, folder, "dry-run", "--memory", "6GiB", *planned)
        verified = memfit(python, folder, "verify", *planned, "--context", "64")
        short = ("--batch-size", "1", "--context", "64", "--steps", str(STEPS))
        trained = output(python, "-m", "memfit", "train", *planned, *short, folder=folder)
    steps, gradients = len(re.findall(r"^step \d", trained, re.MULTILINE)), verified["planned"]
    failed = []
    if made["needs"]["bytes"] > made["budget"]:
        failed.append(f"the plan needs {made['needs']['bytes']:,} B, the budget is {made['budget']:,} B")
    if ran["peak"]["allocated"] != made["allocated"]:
        failed.append(f"{ran['peak']['allocated']:,} B allocated under the plan, not {made['allocated']:,} B")
    if verified["verdict"] != "verified":
        failed.append(f"memfit verify finds {verified}")
    if "memfit: applied to GPT" not in trained or steps != STEPS:
        failed.append(f"memfit train made {steps} steps of {STEPS} under the plan:\n{trained}")
    figures = {
        "needs": made["needs"]["bytes"],
        "as_written": made["as_written"]["needs"]["bytes"],
        "allocated": ran["peak"]["allocated"],
        "time": round(made["time"], 3),
        "equal_gradients": gradients["equal"],
        "steps": steps,
    }
    plan = "a plan of {needs:,} B instead of {as_written:,} B for {time:.3f} times the time".format(**figures)
    done = "{equal_gradients} gradients equal bit for bit, {steps} steps trained".format(**figures)
    return Outcome(f"{plan}, {done}", figures, tuple(failed))


def equality(python: str) -> Outcome:
    """Compare strategies with hand-written loops on a few random networks."""
    failed: tuple[str, ...] = ()
    try:
        printed = output(python, "benchmarks/equality.py", "--networks", str(NETWORKS))
    except FailedError as error:
        printed = str(error)
        failed = (printed,)
    combinations = len(re.findall(rf" {NETWORKS} equal ", printed))
    figures = {"combinations": combinations, "networks": NETWORKS}
    return Outcome(f"{combinations} combinations of strategies on {NETWORKS} networks", figures, failed)
