"""What the loss of a classifier holds: memory that ``memfit.ChunkedHead`` makes slice by slice."""

from memfit.planning.region_options import total_bytes
from memfit.records import StepOperations

_LOG_SOFTMAX = "aten._log_softmax.default"


def log_probabilities(step: StepOperations) -> int:
    """Return the bytes of the largest log-softmax of a step, the cross-entropy's; 0 if it has none.

    The logits before it and the gradient after it have as many elements.
    """
    return max(
        (total_bytes(step, each.creates) for each in step.forward if each.name == _LOG_SOFTMAX), default=0
    )
