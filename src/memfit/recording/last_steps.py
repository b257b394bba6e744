"""Count the training steps that only the end of a script shows.

An update by hand is known by the next backward pass, which the last update has not:

    backward 1 │ update │ forward   backward 2 │ update │ an evaluation, or the end
                                  step 1 ends ┘         └ step 2 ends

Optimizers that never stepped counted as in use while the script ran: then no step was complete.
"""

from collections import Counter

from memfit.recording.event_labels import LabelBook
from memfit.records import MarkKind


def add_last_steps(book: LabelBook, completed: int, backwards: int, used: set[int]) -> int:
    """Mark the steps that a script has completed beside those that are marked, and return how many all are.

    Args:
        book: has the marks of the run.
        completed: steps that are marked.
        backwards: outermost backward passes that have ended.
        used: the numbers of the optimizers that stepped and still exist.
    """
    marks = book.marks
    kinds = [kind for _, kind, _ in marks]
    if completed and completed == backwards - 1 and MarkKind.OPTIMIZER_STEP not in kinds:
        last = max(at for at, (_, *mark) in enumerate(marks) if mark == [MarkKind.BACKWARD, completed])
        moment = marks[last + 1][0] if last + 1 < len(marks) else book.moment()
        marks.insert(last + 1, (moment, MarkKind.TRAINING_STEP, completed))
        return completed + 1
    made: Counter[int] = Counter()
    for at, (moment, kind, optimizer) in enumerate(() if completed else tuple(marks)):
        if kind is MarkKind.OPTIMIZER_STEP and optimizer in used:
            made[optimizer] += 1
            if len(made) == len(used) and min(made.values()) > completed:
                completed += 1
                marks.insert(at + completed, (moment, MarkKind.TRAINING_STEP, completed - 1))
    return completed
