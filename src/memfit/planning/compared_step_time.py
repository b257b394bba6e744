"""The time of a step under strategies, from its recorded operations: as for a plan.

Copies between the host and the device count in full, as if nothing ran beside them. What the GPUs of a job
send each other is not known, and so is no time of a sharding. Nor is that of offloaded inputs: which tensors
those are is not recorded.
"""

from memfit.analysis.breakdown import CATEGORY_NAMES
from memfit.devices import Device
from memfit.planning.optimizer_state_changes import offloads_state
from memfit.planning.run_changes_on_ghost import (
    forward_and_backward_seconds,
    host_copy_time_estimator,
    roofline_time_estimator,
)
from memfit.records import Category, Change, DryRun, StepOperations

_LEAST_OFFLOADED = 1 << 20  # bytes: the default of memfit.Offload


def step_time(
    change: Change, under: StepOperations | None, written: StepOperations | None, found: DryRun, card: Device
) -> float | None:
    """Return the time of a step under strategies, relative to the script as written; None if it is not known.

    Args:
        change: the strategies.
        under: the operations of a step under them.
        written: those of the script as written.
        found: the script as written.
        card: for which the time is estimated.
    """
    inputs = change.plan.get("offload", {}).get("what") == "inputs"
    if under is None or written is None or inputs:
        return None
    seconds, copied = roofline_time_estimator(card), 0
    if "offload" in change.plan:
        sizes = {each: written.storages[each] for call in written.calls for each in call.saves}
        copied += sum(size for size in sizes.values() if size >= _LEAST_OFFLOADED)
    if offloads_state(change):
        name = CATEGORY_NAMES[Category.OPTIMIZER_STATE]
        state = sum(term.figure.bytes for term in found.terms if term.name == name)
        if not state:  # there is none yet at the peak
            return None
        copied += state
    step = forward_and_backward_seconds(written, seconds)
    took = forward_and_backward_seconds(under, seconds) + host_copy_time_estimator(card)(copied)
    return took / step if step else None
