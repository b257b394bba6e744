"""Judge a plan by the operations that the first update under it has run."""

from collections.abc import Mapping

from memfit.records import CountedOperations, OperationCounts
from memfit.trials.trial_run import why_again


def counted(
    under_plan: OperationCounts | None, as_written: OperationCounts | None, planned: OperationCounts | None
) -> CountedOperations | None:
    """Return the counts of a verification; None if those under the plan are not known."""
    return None if under_plan is None else CountedOperations(under_plan, as_written, planned)


def why_other_operations(
    operations: CountedOperations | None,
    again: Mapping[str, int],
    *,
    is_same: bool,
    is_checkpointing: bool,
) -> str:
    """Return why an update did not run the operations that were planned, as a sentence; empty if it did.

    Args:
        operations: as counted.
        again: by operation, how often its results were kept, and it was recomputed all the same.
        is_same: whether the plan was made for this command, and it ran on a GPU.
        is_checkpointing: whether the plan changes nothing but what is recomputed.

    >>> found = CountedOperations(OperationCounts(168, 60), None, OperationCounts(168, 24))
    >>> why_other_operations(found, {}, is_same=True, is_checkpointing=True)
    'The update recomputes 60 of 168 operations, the plan 24 of 168 operations.'
    """
    if again:
        why = why_again(again)
        return f"{why[0].upper()}{why[1:]}."
    if operations is None:
        return ""
    found, planned, plain = operations.under_plan, operations.planned, operations.as_written
    if planned is not None and is_same and not found.recomputes_as(planned):
        return f"The update recomputes {found}, the plan {planned}."
    if is_checkpointing and plain is not None and found.backward != plain.backward:
        return (
            f"Besides what is recomputed, the backward runs {found.backward} operations, and as written "
            f"{plain.backward}."
        )
    return ""
