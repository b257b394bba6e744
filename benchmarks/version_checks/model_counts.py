"""Count what a plan recomputes: as the planner's model has it, and on the ghost.

    python model_counts.py PLAN.json SCRIPT.py [ARGUMENTS]

Prints JSON: for the model and for the ghost, the operations of a step's forward, and those of them that run
again; and ``again``, which kept results the recomputation made all the same. The model's count is the time
that it predicts if each operation takes a second.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from memfit.injection.injection_files import InjectionReport
from memfit.planning.choose_checkpointing import RegionSettings
from memfit.planning.module_checkpoint_options import (
    module_checkpoint_option,
    module_checkpoint_option_in_parts,
)
from memfit.planning.plan_file import read_plan
from memfit.planning.step_memory_model import module_calls_inside
from memfit.planning.tensor_recompute_options import (
    ContentsOfCall,
    RecomputeSimulation,
    kept_contents_mask,
    makers_of_call,
)
from memfit.records import Change, Operation, StepOperations, is_counted_operation
from memfit.run.options import RunOptions
from memfit.run.parent import run_script
from memfit.run.resolve_ghost_settings import resolve_ghost_settings
from memfit.trials.trial_run import prepare_injection

_RECOMPUTING = ("checkpointing", "offload")


def main() -> None:
    """Run the script twice, without what recomputes and under the plan, and print the counts."""
    plan, command = read_plan(Path(sys.argv[1])), tuple(sys.argv[2:])
    change = plan.change
    others = {name: given for name, given in change.plan.items() if name not in _RECOMPUTING}
    step, _ = _run(command, replace(change, plan=others, operations=True))
    _, report = _run(command, change)
    if step is None or report.operations is None:
        raise SystemExit(f"{' '.join(command)}: operations were not counted under {sys.argv[1]}.")
    regions = [RegionSettings(**each) for each in change.plan["checkpointing"]["regions"]]
    times = change.updates_held_back
    found = {
        "model": [operations_of_forward(step) * times, recomputed_operations(step, regions) * times],
        "ghost": [report.operations.forward, report.operations.recomputed],
        "again": report.again,
    }
    print(json.dumps(found))


def operations_of_forward(step: StepOperations) -> int:
    """Return how many operations a recorded step runs in the calls of its model."""
    return round(sum(_second(operation) for operation in step.forward if operation.call >= 0))


def recomputed_operations(step: StepOperations, regions: Sequence[RegionSettings]) -> int:
    """Return how many operations the planner expects to run again.

    Args:
        step: recorded without the plan.
        regions: of the plan.
    """
    inside = module_calls_inside(step.calls)
    seconds = sum(_of_tensors(step, each.save_ops) for each in regions if each.recompute == "tensors")
    for region in (each for each in regions if each.recompute == "module"):
        for number, call in enumerate(step.calls):
            if call.module not in region.modules:
                continue
            if region.split_at:
                option = module_checkpoint_option_in_parts(
                    step, call, inside[number], region.split_at, _second
                )
            else:
                option = module_checkpoint_option(step, call, region.save_ops, _second)
            seconds += option.seconds
    return round(seconds)


def _of_tensors(step: StepOperations, save_ops: Sequence[str]) -> float:
    call = step.calls[0]
    contents = ContentsOfCall.of(step, call)
    kept = kept_contents_mask(makers_of_call(step, call), step.storages, {*save_ops}, contents)
    backward = RecomputeSimulation(step, contents, kept, _second)
    backward.run(call)
    return backward.spent


def _second(operation: Operation) -> float:
    return float(is_counted_operation(operation.name))


def _run(command: tuple[str, ...], change: Change) -> tuple[StepOperations | None, InjectionReport]:
    """Run a script under a change; return a step's operations, if they are recorded, and what was counted."""
    with prepare_injection(change, RunOptions()) as injection:
        settings = resolve_ghost_settings(injection.options)
        run_script(command + change.arguments, injection.options, settings, None, lambda _: None)
        return injection.operations(), injection.report()


if __name__ == "__main__":
    main()
