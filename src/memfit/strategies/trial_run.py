"""Run a script once more with a strategy injected, to measure what the change would do."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from msgspec import json

from memfit.analysis.script_change import RunScript, ScriptChange, TrialResult, ran_to_completion
from memfit.errors import MemfitError
from memfit.records import ScriptEnd
from memfit.run.child_settings import GhostSettings
from memfit.run.options import RunOptions
from memfit.run.parent import Progress, run_script
from memfit.run.resolve_options import ghost_settings
from memfit.strategies.inject_plan import InjectionReport, Intervention

_INJECTOR = "memfit.strategies.inject_plan"


def trial_runner(
    command: tuple[str, ...], options: RunOptions, shown_memory: int, on_progress: Callable[[Progress], None]
) -> RunScript:
    """Return the function with which ``find_advice`` runs a script under a change.

    The memory of the GPU is unlimited, but PyTorch reports ``shown_memory`` bytes to the script.
    """
    ghost = ghost_settings(options, shown_memory)

    def run(change: ScriptChange, what: str) -> TrialResult | ScriptEnd:
        def show(progress: Progress) -> None:
            on_progress(replace(progress, trying=what))

        return run_trial(command, options, ghost, change, show)

    return run


def run_trial(
    command: tuple[str, ...],
    options: RunOptions,
    ghost: GhostSettings,
    change: ScriptChange,
    on_progress: Callable[[Progress], None],
) -> TrialResult | ScriptEnd:
    """Run a script with a change, without input and with its output hidden; it may fail.

    Args:
        command: the script's ``sys.argv``.
        options: as for a run of the script alone.
        ghost: what ``ghost_settings(options)`` returned.
        change: the change to inject.
        on_progress: as for ``run_script``.

    Returns:
        The run; how it ended if it did not complete; or why the change could not be applied.

    Raises:
        KeyboardInterrupt: the user interrupted the run.
    """
    with tempfile.TemporaryDirectory(prefix="memfit-") as folder:
        report_file = Path(folder) / "report.json"
        plan = {one.field: dict(one.settings) for one in change.strategies}
        intervention = Intervention(options.module, plan, change.fused, change.loader, str(report_file))
        change_file = Path(folder) / "change.json"
        change_file.write_bytes(json.encode(intervention))
        try:
            trace = run_script(
                (_INJECTOR, str(change_file), *command, *change.arguments),
                replace(options, module=True, objects=options.objects if change == ScriptChange() else ""),
                ghost,
                None,
                on_progress,
            ).trace
        except MemfitError as error:
            why = str(error).replace(_INJECTOR, command[0])
            return ScriptEnd(
                "refused", error.exit_code, f"when the script was run again without input, {why}"
            )
        if trace.end.reason == "interrupted":
            raise KeyboardInterrupt
        report = InjectionReport()
        if report_file.exists():
            report = json.decode(report_file.read_bytes(), type=InjectionReport)
        if why := _unfit(change, report):
            return ScriptEnd("refused", 0, why)
        if not ran_to_completion(trace.end):
            return trace.end
        return TrialResult(trace, report.models, report.shares)


def _unfit(change: ScriptChange, report: InjectionReport) -> str:
    """Return why a change was not made as it should have been; empty if it was."""
    fields = [one.field for one in change.strategies]
    if report.refusals and (not report.models or "sharding" in fields):
        return report.refusals[0]
    if fields and not report.models:  # updates by hand, a plan of its own
        return (
            f"{' with '.join(fields)} could not be applied to any model whose parameters an optimizer takes"
        )
    if report.uncalled:
        return (
            f"the script does not call {report.uncalled[0]} itself, but its methods or submodules: gradients "
            "would not be shared among ranks."
        )
    return ""
