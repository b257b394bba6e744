"""The largest batch that fits, found in few runs: memory is nearly a line in the number of samples."""

from collections.abc import Sequence

from memfit.analysis.advice_attempt import AdviceAttempt, Trials
from memfit.analysis.advice_candidates import AdviceCandidate

_FIXED = ("parameters", "gradients", "optimizer state", "buffers")
"""Terms of the summary that do not depend on the batch."""


def largest_that_fits(
    base: AdviceAttempt, smaller: Sequence[AdviceCandidate], trials: Trials, room: int
) -> AdviceAttempt | None:
    """Find the largest batch with which a run fits, on top of changes already made.

    The first size comes from what the summary holds that does not depend on the batch; each run then corrects
    the line through it and the run with the full batch.

    Args:
        base: the run with the full batch.
        smaller: batches to choose from, largest first.
        trials: makes the runs.
        room: bytes that may be reserved.

    Returns:
        The run with that batch; if none fits, with the smallest that ran; None if none ran.
    """
    fixed = sum(term.figure.bytes for term in base.facts.found.terms if term.name in _FIXED)
    sizes = [one.batch_size for one in smaller]
    full = base.facts.batch_size
    per_sample = max(base.reserved.bytes - fixed, 0) / full
    low, high, best, closest = 0, len(smaller) - 1, None, None
    while low <= high:
        likely = next(
            (
                index
                for index in range(low, high + 1)
                if base.reserved.bytes - per_sample * (full - sizes[index]) <= room
            ),
            None,
        )
        if likely is None and best is not None:
            break
        index = high if likely is None else likely
        then = trials.attempt((*base.made, smaller[index]))
        if then is None:
            break
        per_sample = (base.reserved.bytes - then.reserved.bytes) / (full - sizes[index])
        if then.fits:
            best, high = then, index - 1
        else:
            closest, low = then, index + 1
    return best or closest
