"""What a run of a script under a change shows, and why it did not complete."""

from collections.abc import Callable
from dataclasses import dataclass

from memfit.records import Change, OperationCounts, ScriptEnd, ShardingCalls, StandIn, StepOperations, Trace


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The result of a run that completed."""

    trace: Trace
    models: tuple[str, ...] = ()
    """Models that strategies were applied to: the class of each, and the line that creates its optimizer."""
    shares: tuple[int, ...] = ()
    """By rank, the bytes of parameters whose optimizer state it holds; empty if all hold as much."""
    sharding_calls: tuple[ShardingCalls, ...] = ()
    """How the script shards itself."""
    operations: StepOperations | None = None
    """Of a training step, if they were to be recorded."""
    counts: OperationCounts | None = None
    """Of what the first step ran in models with strategies; None if it was not counted."""
    others: tuple["TrialResult", ...] = ()
    """Of the same change: other ranks that may need more, and runs in which GPU work finishes late."""


RunTrial = Callable[[Change, str], TrialResult | ScriptEnd]
"""Runs the script again, given a change and its name. Returns how the script ended if it did not complete."""


MOST_STAND_INS = 3
"""Reads that may be why a run is incomplete, and that are named."""


def ran_to_completion(end: ScriptEnd) -> bool:
    """Return whether a script completed: it ended by itself, or after the requested steps.

    A run that trained, and lacks updates, is no measurement of training.
    """
    return (end.stopped or end.reason == "end") and not end.exit_code and not end.missing_updates


def why_run_failed(end: ScriptEnd) -> str:
    """Return why a run under a change did not complete, as a clause or a sentence."""
    if end.reason == "refused":
        return end.exception
    where = f" ({end.where})" if end.where else ""
    first_line = end.exception.partition("\n")[0]
    why = f"the script ended with {first_line or f'exit code {end.exit_code}'}{where}"
    if end.missing_updates:
        why = missing_updates_as_clause(end)
    reads = "; ".join(map(stand_in_in_words, end.stand_ins[:MOST_STAND_INS]))
    return f"{why}. {STAND_INS_READ} {reads}" if reads else why


def missing_updates_as_clause(end: ScriptEnd) -> str:
    """Return which updates a script that trained did not make.

    >>> missing_updates_as_clause(ScriptEnd("end", 0, missing_updates="The script never stepped"))
    'the script never stepped'
    """
    return end.missing_updates[:1].lower() + end.missing_updates[1:]


STAND_INS_READ = "A GPU value that the script read may be why. The ghost computes none, and returned"
"""Before what ``stand_in_in_words`` returns."""


def stand_in_in_words(read: StandIn) -> str:
    """Return what a read returned, where, and the option that returns another value.

    >>> stand_in_in_words(StandIn("train.py:9", "an integer", "1", "train.py:9=0"))
    '1 for an integer at train.py:9 (to try another: --values train.py:9=0)'
    """
    option = f" (to try another: --values {read.instead})" if read.instead else ""
    return f"{read.value} for {read.what} at {read.where}{option}"
