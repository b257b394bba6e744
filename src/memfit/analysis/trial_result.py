"""What a run of a script under a change shows, and why it did not complete."""

from collections.abc import Callable
from dataclasses import dataclass

from memfit.records import Change, OperationCounts, ScriptEnd, ShardingCalls, StepOperations, Trace


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
    late: bool = False
    """Whether GPU work on side streams finished late."""
    counts: OperationCounts | None = None
    """Of what the first step ran in models with strategies; None if it was not counted."""
    others: tuple["TrialResult", ...] = ()
    """Of the same change: other ranks that may need more, and runs in which GPU work finishes late."""


RunTrial = Callable[[Change, str], TrialResult | ScriptEnd]
"""Runs the script again, given a change and its name. Returns how the script ended if it did not complete."""


def ran_to_completion(end: ScriptEnd) -> bool:
    """Return whether a script completed: it ended by itself, or after the requested steps."""
    return (end.stopped or end.reason == "end") and not end.exit_code


def why_run_failed(end: ScriptEnd) -> str:
    """Return why a run under a change did not complete, as a clause or a sentence."""
    if end.reason == "refused":
        return end.exception
    where = f" ({end.where})" if end.where else ""
    first_line = end.exception.partition("\n")[0]
    return f"the script ended with {first_line or f'exit code {end.exit_code}'}{where}"
