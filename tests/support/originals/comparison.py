"""A row of report.py: a training by the original, the same by memfit, and what is expected."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from training import ADAMW, Task, Trained, divided_by_full_window, sum_and_count, train_with_memfit

import memfit

Train = Callable[[], Trained]


@dataclass(frozen=True, slots=True)
class Row:
    """A comparison; both trainings must be equal bit for bit unless a field says otherwise."""

    settings: Mapping[str, Any]
    """As given to the original and to memfit."""
    task: Task
    original: Train
    ours: Train
    how: str = ""
    """Which of the original's interfaces trains, and with what else."""
    reason: str = ""
    """What the original does otherwise than memfit: both must differ."""
    alike: Train | None = None
    """memfit's training, told to do the same: it must equal the original bit for bit."""
    rounding: str = ""
    """Why the last bits differ: by no more than ``Trained.rounding``."""
    refusal: str = ""
    """Words of the error with which the original refuses these settings."""


def row(train: Callable[..., Trained], task: Task, settings: Mapping[str, Any], **fields: Any) -> Row:
    """Return the row of ``train(task, settings)`` against memfit with the same arguments."""
    fields = {"ours": partial(train_with_memfit, task, settings)} | fields
    return Row(settings, task, partial(train, task, settings), **fields)


def row_of_token_means(
    original: str, train: Callable[..., Trained], task: Task, settings: Mapping[str, Any], *, how: str = ""
) -> Row:
    """Return the row of batches with different numbers of tokens, whose means an original averages."""
    return row(
        train,
        task,
        settings,
        how=how,
        ours=partial(train_with_memfit, task, settings, sum_and_count),
        reason=f"{original} averages the means of batches, however many tokens each has",
        alike=partial(train_with_memfit, task, settings),
    )


def rows_of_partial_windows(original: str, train: Callable[..., Trained], option: str) -> Iterator[Row]:
    """Yield the rows of epochs with a partial window, which an original divides as if it were full."""
    for window, task in ((2, Task(7)), (4, Task(13, optimizer=ADAMW))):
        settings = {option: window}
        yield row(
            train,
            task,
            settings,
            reason=f"{original} divides the last window of an epoch by {window}, though it has fewer batches",
            alike=partial(train_with_memfit, task, settings, divided_by_full_window(task, window)),
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a comparison found."""

    updates: str
    """The original's number, and memfit's if that differs."""
    text: str
    failed: bool = False


def compare(row: Row) -> Outcome:
    """Run the trainings of a row."""
    if row.refusal:
        return _refused(row)
    theirs, ours = row.original(), row.ours()
    updates = str(theirs.updates)
    if theirs.updates != ours.updates:
        updates += f", memfit {ours.updates}"
    difference = theirs.difference(ours)
    if row.reason:
        return _explained(row, theirs, difference, updates)
    if row.rounding:
        bound = theirs.rounding()
        text = f"to {difference:.1e}, at most {bound:.1e}: {row.rounding}"
        return Outcome(updates, text, failed=difference > bound)
    if difference or theirs.updates != ours.updates:
        return Outcome(updates, f"differs by {difference:.1e}", failed=True)
    return Outcome(updates, "equal bit for bit")


def _explained(row: Row, theirs: Trained, difference: float, updates: str) -> Outcome:
    """Return what became of a difference whose reason is stated."""
    if row.alike is None:
        raise ValueError(f"No training shows that this is the reason: {row.reason}.")
    if not difference:
        return Outcome(updates, f"not seen any more: {row.reason}", failed=True)
    left = theirs.difference(row.alike())
    if left:
        text = f"differs by {difference:.1e}; by {left:.1e} even without this: {row.reason}"
        return Outcome(updates, text, failed=True)
    return Outcome(updates, f"differs by {difference:.1e}: {row.reason}")


def _refused(row: Row) -> Outcome:
    memfit.configure(row.settings)
    try:
        theirs = row.original()
    except Exception as error:  # noqa: BLE001 - whatever the original raises
        failed = row.refusal not in str(error)
        return Outcome("0", f"refused by the original: {error if failed else row.refusal}", failed)
    return Outcome(str(theirs.updates), f"not refused any more: {row.refusal}", failed=True)
