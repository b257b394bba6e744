"""Check that plans of each kind are carried out: the operations that run again are those that the plan means.

whole blocks            given    a region runs again as a whole
kept results            made     but for operations whose results it keeps
in parts                given    in parts, each from its beginning
tensor by tensor        made     each tensor when it is needed
micro-batches           made     with kept results, several times before an update

The planner's model says how many operations that are. On the ghost they are counted, and counted again in
real training on the CPU: ``memfit verify``.
"""

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outcomes import EXAMPLES, FailedError, Outcome, memfit, output

BLOCKS = [f"blocks.{number}" for number in range(12)]
GPT = ("gpt.py", ("--context", "64"))
RESNET = ("resnet50.py", ("--batch-size", "2"))


@dataclass(frozen=True, slots=True)
class Case:
    """A plan."""

    kind: str
    """As ``kinds`` finds it in the plan."""
    script: tuple[str, tuple[str, ...]]
    """An example, and its arguments on the CPU."""
    options: tuple[str, ...] = ()
    """Of ``memfit plan``; empty for a plan that is given."""
    region: dict[str, Any] = field(default_factory=dict)
    """The settings of a plan that is given."""


CASES = (
    Case("whole blocks", GPT, region={"modules": BLOCKS}),
    Case("kept results", GPT, ("--budget", "5GiB", "--bitwise")),
    Case("in parts", GPT, region={"modules": BLOCKS, "split_at": ["mlp"]}),
    Case("tensor by tensor", RESNET, ("--budget", "2.5GiB", "--bitwise")),
    Case("micro-batches", GPT, ("--budget", "3.2GiB")),
)


def plans(python: str) -> Outcome:
    """Count the operations of five plans."""
    figures, failed = {}, []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            try:
                figures[case.kind], wrong = _carried_out(python, folder, case)
            except FailedError as error:
                wrong = [str(error)]
        failed += [f"{case.kind} ({case.script[0]}): {each}" for each in wrong]
    counts = (f"{kind} {again} of {forward}" for kind, (forward, again) in figures.items())
    return Outcome(f"operations that run again: {', '.join(counts)}", figures, tuple(failed))


def _carried_out(python: str, folder: str, case: Case) -> tuple[list[int], list[str]]:
    """Return the operations of a plan's forward and of its recomputation, and what is wrong with them."""
    name, small = case.script
    script, plan = str(EXAMPLES / name), Path(folder) / "plan.json"
    if case.region:
        plan.write_text(json.dumps({"plan": {"checkpointing": {"regions": [case.region]}}}))
    else:
        memfit(python, folder, "plan", *case.options, "-o", str(plan), script)
    model_counts = str(Path(__file__).with_name("model_counts.py"))
    counts = json.loads(output(python, model_counts, str(plan), script, folder=folder).splitlines()[-1])
    wrong = []
    if case.kind not in (found := kinds(json.loads(plan.read_text()))):
        wrong.append(f"memfit plan made another one: {', '.join(sorted(found))}")
    if counts["ghost"] != counts["model"]:
        wrong.append("{again[1]} of {again[0]} operations run again".format(again=counts["ghost"]))
        wrong[-1] += ", not {0[1]} of {0[0]}, as the model has it".format(counts["model"])
    if counts["again"]:
        wrong.append(f"kept results are made again: {counts['again']}")
    try:
        verified = memfit(python, folder, "verify", "--plan", str(plan), script, *small)
    except FailedError as error:
        wrong.append(str(error))
    else:
        if not verified["operations"]["under_plan"]["recomputed"]:
            wrong.append("on the CPU, no operation runs again")
    return counts["ghost"], wrong


def kinds(plan: dict[str, Any]) -> set[str]:
    """Return the kinds of what a plan file changes."""
    found = {"micro-batches"} if plan.get("micro_batches") else set()
    for region in plan["plan"].get("checkpointing", {}).get("regions", ()):
        if region.get("recompute") == "tensors":
            found.add("tensor by tensor")
        elif region.get("split_at"):
            found.add("in parts")
        else:
            found.add("kept results" if region.get("save_ops") else "whole blocks")
    return found
