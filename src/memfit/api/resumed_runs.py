"""A script, and the same script again as it resumes from what it has written."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from memfit.analysis.rank_roles import weight
from memfit.api.ghost_runs import FinishedRun, save_trace
from memfit.errors import TargetError
from memfit.records import DryRun, ScriptLocation

RunWith = Callable[..., FinishedRun]
"""Runs a script: ``run(arguments, output=path)``."""


def run_and_resume(
    run: RunWith, arguments: Sequence[str], resuming: Sequence[str] | None, output: Path | None
) -> FinishedRun:
    """Run a script, and then once more with further arguments.

    Args:
        run: runs the script.
        arguments: of both runs.
        resuming: those that the second run has after them; None to run it once.
        output: where to save the trace; nowhere if None.

    Returns:
        The run that needs most, with the stages of both. That is the first one alone if it did not fit.

    Raises:
        TargetError: the script failed or was stopped, so that it may have written nothing to resume from.
        MemfitError: one of the runs was not possible.
    """
    first = run(arguments, output=output)
    if resuming is None:
        return first
    end = first.result.end
    if first.result.ran_out or end.reason == "interrupted":
        return first
    if end.reason != "end" or end.exit_code:
        how = "Its time was up: pass more --seconds." if end.stopped else end.exception
        raise TargetError(
            f"Cannot resume {first.result.command[0]}: its first run did not come to its end. {how}"
        )
    second = run((*arguments, *resuming), output=None)
    stages = (*first.result.stages, *(replace(use, resumed=True) for use in second.result.stages))
    shortened = tuple(dict.fromkeys((*first.result.shortened, *second.result.shortened)))
    if _severity(second.result) > _severity(first.result):
        result = _resumed(replace(second.result, stages=stages, shortened=shortened))
        return FinishedRun(second.trace, result, save_trace(second.trace, output))
    return replace(first, result=replace(first.result, stages=stages, shortened=shortened))


def _resumed(result: DryRun) -> DryRun:
    """Name the stages of the run that resumes."""
    failed = result.out_of_memory
    return replace(
        result,
        peak_place=_in_resumed(result.peak_place),
        out_of_memory=failed and replace(failed, place=_in_resumed(failed.place)),
        resumed=True,
    )


def _in_resumed(place: ScriptLocation) -> ScriptLocation:
    return replace(place, stage=f"{place.stage or 'the run'}, resumed")


def _severity(result: DryRun) -> tuple[bool, tuple[bool, int]]:
    return result.ran_out, weight(result)
