"""Run a script once more with a strategy injected, to measure what the change would do."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import json

from memfit.analysis.trial_result import RunTrial, TrialResult, ran_to_completion
from memfit.errors import MemfitError
from memfit.injection.injection_files import InjectionReport, InjectionSettings
from memfit.records import Change, ScriptEnd, StepOperations, Trace
from memfit.run.child_start import StartScript, start_script
from memfit.run.options import RunOptions
from memfit.run.parent import ScriptProgress, run_script
from memfit.run.resolve_ghost_settings import resolve_ghost_settings
from memfit.temporary_folders import TemporaryFolder
from memfit.trials.script_standbys import ScriptRun, ScriptStandbys

_INJECTOR = "memfit.injection.inject_plan"
_NOTHING = Change()
_OURS = "memfit.errors."
"""What the names of memfit's exceptions begin with."""
NO_MODEL = "could not be applied to any model whose parameters an optimizer takes"
_REPORT, _OPERATIONS = "report.json", "operations.json"


def trial_runner(
    command: tuple[str, ...],
    options: RunOptions,
    on_progress: Callable[[ScriptProgress], None],
    always: Change = _NOTHING,
    standbys: ScriptStandbys | None = None,
) -> RunTrial:
    """Return the function with which searches run a script under a change.

    The change ``always`` is made in every run. A run goes on from one of ``standbys`` if it can.
    """
    ghost = resolve_ghost_settings(options)

    def run(change: Change, what: str) -> TrialResult | ScriptEnd:
        def show(progress: ScriptProgress) -> None:
            on_progress(replace(progress, trying=what))

        own = replace(options, finish_late=change.finish_late)
        made = always | replace(change, finish_late=False)
        return run_trial(ScriptRun(command, own, ghost, made), show, standbys)

    return run


def run_trial(
    run: ScriptRun, on_progress: Callable[[ScriptProgress], None], standbys: ScriptStandbys | None = None
) -> TrialResult | ScriptEnd:
    """Run a script with a change, without input and with its output hidden; it may fail.

    Args:
        run: the script, the options of a run of it alone, and the change to inject.
        on_progress: as for ``run_script``.
        standbys: of earlier runs of the script. Should the run go on from one, and end as a whole run might
            not, the whole script is run.

    Returns:
        The run; how it ended if it did not complete; or why the change could not be applied.

    Raises:
        KeyboardInterrupt: the user interrupted the run.
    """
    if standbys is None:
        return _run_once(run, on_progress, start_script)[0]
    with standbys.fork(run) as fork:
        if fork is not None:
            result, is_final = _run_once(
                run, lambda progress: on_progress(replace(progress, forked=True)), fork
            )
            if is_final:
                return result
    why = standbys.declined(run)
    with standbys.whole(run) as start:
        return _run_once(run, lambda progress: on_progress(replace(progress, unforked=why)), start)[0]


class _UnfitError(Exception):
    """The script does what its change does not permit: the rest of its run tells no more."""


def _run_once(
    run: ScriptRun, on_progress: Callable[[ScriptProgress], None], start: StartScript
) -> tuple[TrialResult | ScriptEnd, bool]:
    """Do what ``run_trial`` does; ``start`` as for ``run_script``.

    Returns:
        The result; and whether a run of the whole script has the same if this one is a fork: it completed, or
        did what its plan does not permit after that was applied.
    """
    change = run.change
    with prepare_injection(change, run.options) as injection:

        def watch(progress: ScriptProgress) -> None:
            if injection.report().is_unfit:
                raise _UnfitError
            on_progress(progress)

        try:
            trace = run_script(
                run.command + change.arguments, injection.options, run.ghost, None, watch, start=start
            ).trace
        except _UnfitError:
            return ScriptEnd("refused", 0, injection.why_unfit()), bool(injection.report().models)
        except MemfitError as error:
            end = ScriptEnd("refused", error.exit_code, f"when memfit ran the script without input, {error}")
            return end, False
        if trace.end.reason == "interrupted":
            raise KeyboardInterrupt
        if why := injection.why_unfit():
            return ScriptEnd("refused", 0, why), bool(injection.report().models)
        report = injection.report()
        if not ran_to_completion(trace.end):
            return _incomplete(trace.end, report)
        if report.again:
            return ScriptEnd("refused", 0, recomputed_saved_ops_in_words(report.again)), True
        return TrialResult(
            trace,
            models=report.models,
            shares=report.shares,
            sharding_calls=report.sharding_calls,
            operations=_recorded_operations(injection, trace),
            counts=report.operations,
        ), True


def _incomplete(end: ScriptEnd, report: InjectionReport) -> tuple[ScriptEnd, bool]:
    """Return how an incomplete run ended, and whether a run of the whole script would have ended like that.

    It would if a strategy that was applied has refused what the script passes to its model.
    """
    if report.models and end.exception.startswith(_OURS):
        return ScriptEnd("refused", end.exit_code, end.exception.partition(": ")[2]), True
    return end, False


def recomputed_saved_ops_in_words(again: Mapping[str, int]) -> str:
    """Return what is wrong if kept results are recomputed, as a clause.

    >>> recomputed_saved_ops_in_words({"aten.addmm.default": 36})
    'the recomputation runs again what the plan keeps: aten.addmm.default (36 times)'
    """
    named = ", ".join(f"{name} ({count} times)" for name, count in again.items())
    return f"the recomputation runs again what the plan keeps: {named}"


@dataclass(frozen=True, slots=True)
class Injection:
    """A change to be injected into a script."""

    options: RunOptions
    """With which the script runs under the change."""
    _change: Change
    _folder: Path

    def report(self) -> InjectionReport:
        """Return what became of the change."""
        file = self._folder / _REPORT
        return json.decode(file.read_bytes(), type=InjectionReport) if file.exists() else InjectionReport()

    def operations(self) -> StepOperations | None:
        """Return the operations of a training step, if they were to be recorded and there was one."""
        file = self._folder / _OPERATIONS
        return json.decode(file.read_bytes(), type=StepOperations) if file.exists() else None

    def why_unfit(self) -> str:
        """Return why the change was not made as it should have been; empty if it was."""
        report, fields = self.report(), sorted(self._change.strategies)
        if report.cannot_accumulate:
            return f"the script cannot accumulate gradients over micro-batches: {report.cannot_accumulate}"
        if report.caught or report.unfit_optimizer:
            return (*report.caught, report.unfit_optimizer)[0]
        if report.refusals and (not report.models or "sharding" in fields):
            return report.refusals[0][0]
        if fields and not report.models:  # updates by hand, a plan of its own
            named = " with ".join(fields)
            return f"{named} {NO_MODEL}"
        for _, why in report.why_uncalled():
            return why
        missing = self._change.own_sharding.keys() - {each.call for each in report.sharding_calls}
        return f"the script does not call {', '.join(sorted(missing))}" if missing else ""


def _recorded_operations(injection: Injection, trace: Trace) -> StepOperations | None:
    """Return the operations of a step; of compiled code, those of the trace, if Inductor compiled it."""
    recorded, step = injection.operations(), trace.step
    if recorded is None or not recorded.compiled:
        return recorded
    if step is None or not step.compiled:
        return None
    return replace(recorded, forward=tuple(step.operations[number] for number in step.order))


@contextmanager
def prepare_injection(
    change: Change, options: RunOptions, *, silent: bool = True, counts_backward: bool = False
) -> Iterator[Injection]:
    """Prepare the injection of a change; the script's own options in it are left to the caller.

    Args:
        change: the change.
        options: with which the script would run alone.
        silent: whether the script gets no input, and its output is hidden.
        counts_backward: whether the operations of the backward are counted, too, which takes memory.
    """
    with TemporaryFolder() as name:
        folder = Path(name)
        settings = InjectionSettings(
            change,
            str(folder / _REPORT),
            silent,
            str(folder / _OPERATIONS),
            counts_backward,
            options.finish_late,
        )
        file = folder / "change.json"
        file.write_bytes(json.encode(settings))
        objects = options.objects if change == Change() else ""
        yield Injection(replace(options, preload=(_INJECTOR, str(file)), objects=objects), change, folder)
