"""Advice: the fewest changes that make a run fit, or lower its peak, each of them tried."""

from collections.abc import Iterator
from dataclasses import replace

from memfit.allocator.config import AllocatorConfig
from memfit.analysis.needed_memory import memory_needed_without_convolution_workspaces
from memfit.analysis.total_need_by_rerun import needs_unlimited_rerun, run_with_unlimited_memory
from memfit.analysis.trial_result import RunTrial, TrialResult, ran_to_completion
from memfit.errors import MemfitError, UsageError
from memfit.planning.batch_size_changes import (
    ASSUMED,
    SEEN,
    batch_size_of_setting,
    bytes_independent_of_batch,
    find_batch_size_setting,
)
from memfit.planning.fewest_changes import MOST_RUNS, FewestChangesSearch, TriedChanges
from memfit.planning.run_changes_on_ghost import replayable_run_of_trial
from memfit.records import (
    ARENA,
    Advice,
    DryRun,
    Figure,
    ScriptEnd,
    Trace,
    worst_provenance,
)
from memfit.termination_signals import INTERRUPTED
from memfit.units import format_bytes


def find_advice(trace: Trace, found: DryRun, run_trial: RunTrial | None = None) -> DryRun:
    """Find changes that make a run fit; if it fits already, those that lower the memory it needs.

    Args:
        trace: of the unchanged run.
        found: its summary.
        run_trial: runs the script under a change, with unlimited memory. By default nothing is run, and only
            allocator settings are tried: a trace from elsewhere names a script that the user did not ask
            memfit to run.

    Returns:
        The summary with ``advice``, ``advice_remarks``, ``needs`` and ``untried``; with what was found so
        far if the user interrupts.
    """
    answer = replace(found, advice=())
    try:
        for more in _advised(trace, answer, run_trial):
            answer = more
    except KeyboardInterrupt:
        return replace(answer, untried=ScriptEnd("interrupted", INTERRUPTED))
    except MemfitError as error:  # no history to replay, or an allocator that is not PyTorch's
        return replace(answer, untried=ScriptEnd("refused", error.exit_code, str(error)))
    return answer


def _advised(trace: Trace, answer: DryRun, run_trial: RunTrial | None) -> Iterator[DryRun]:
    """Yield the answer again whenever it grows."""
    first: TrialResult | ScriptEnd = TrialResult(trace) if ran_to_completion(trace.end) else trace.end
    if (
        needs_unlimited_rerun(answer) or answer.caught
    ):  # what the script did after it caught an error needs less
        if run_trial is None:
            return
        first = run_with_unlimited_memory(run_trial)
    if not isinstance(first, TrialResult):
        yield replace(answer, untried=first)
        return
    if AllocatorConfig.read(first.trace.settings).backend == ARENA:
        raise UsageError(
            "memfit cannot try allocator settings: they have no effect in a script that uses memfit.arena."
        )
    run = replayable_run_of_trial(first)
    search = FewestChangesSearch(run, run_trial, answer)
    bounds = run.found.bounds if answer.ran_out else ()
    needs, least = search.unchanged.run.needs, None
    if answer.ran_out:
        least = memory_needed_without_convolution_workspaces(
            first.trace, run.found, answer.device, needs, answer.device.total.bytes
        )
    answer = replace(answer, needs=needs, needs_without_workspaces=least, bounds=bounds or answer.bounds)
    yield answer
    for best in search.best():
        yield replace(
            answer,
            advice=tuple(_advice(search, tried) for tried in best),
            advice_remarks=tuple(_remarks(first.trace, search, answer)) if run_trial is not None else (),
            untried=search.failed,
        )


def _advice(search: FewestChangesSearch, tried: TriedChanges) -> Advice:
    change, needs, unchanged = tried.change, tried.run.needs, search.unchanged.run
    how = list(change.how)
    if change.strategies:
        code = ", ".join(change.code)
        models = f"{'each of ' * (len(tried.models) > 1)}{', '.join(tried.models)}"
        if all("(plan: " in model for model in tried.models) and tried.models:  # a second plan is refused
            how.append(f"add {code} to the plan of {models}")
        else:
            how.append(f"import memfit; memfit.apply(model, [{code}])  # after creating {models}")
    sure = worst_provenance(unchanged.reserved.provenance, tried.run.reserved.provenance)
    saves = Figure(unchanged.needs.bytes - needs.bytes, sure)
    costs = change.costs.replace(ASSUMED, SEEN) if search.undivided == "" else change.costs
    return Advice(change.words, tuple(how), change.where, costs, saves, needs, tried.fits)


def _remarks(trace: Trace, search: FewestChangesSearch, answer: DryRun) -> Iterator[str]:
    """Yield what a reader of the advice must know besides, sentence by sentence."""
    if (sample := _sample(trace, search)) is not None:
        yield f"One sample of a batch takes {format_bytes(sample.bytes)} ({sample.provenance})."
    fails = search.unchanged.fits is False
    if fails and find_batch_size_setting(trace) is None:
        yield (
            "memfit did not try a smaller batch: it found no option of the script and no DataLoader that "
            "sets the batch size. Try it yourself: write a smaller batch size into the script."
        )
    if search.undivided:
        yield f"Batches are not divided into micro-batches: {search.undivided}."
    if search.refused:
        yield f"memfit stopped after {MOST_RUNS} runs; other combinations may save more."
    if fails and answer.rank is None:
        yield "memfit plan, given --gpu or --budget, finds the fastest mix of changes that fits."


def _sample(trace: Trace, search: FewestChangesSearch) -> Figure | None:
    """Return the bytes at the peak that one more sample takes, if a smaller batch has its peak there, too."""
    setting, before = find_batch_size_setting(trace), search.unchanged.run
    if setting is None or not (smaller := search.smaller_batches()):
        return None
    size, after = max(smaller.items())
    if before.place.phase is not after.place.phase:
        return None
    whole, part = (
        next(term.figure for term in run.terms if term.name == "allocated") for run in (before, after)
    )
    more = (
        whole.bytes
        - bytes_independent_of_batch(before.terms)
        - part.bytes
        + bytes_independent_of_batch(after.terms)
    )
    return Figure(
        more // (batch_size_of_setting(setting) - size), worst_provenance(whole.provenance, part.provenance)
    )
