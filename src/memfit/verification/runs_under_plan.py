"""Run a script under a plan: until its first update, also as written, and a few steps on a GPU for its peak.

If the gradients are not those that the plan promises, the script runs once more as written: it may not
compute the same twice.
"""

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from memfit.analysis.dry_run_result import dry_run_of_trace
from memfit.analysis.trial_result import ran_to_completion, why_run_failed
from memfit.errors import TargetError, UsageError
from memfit.planning.plan_file import PlanFile
from memfit.python_command import command_running_module
from memfit.records import Change, CountedOperations, MeasuredPeak, Verification, VerificationVerdict
from memfit.records.command_as_typed import command_as_typed
from memfit.run.child_start import kill_script
from memfit.run.options import RunOptions
from memfit.run.parent import ScriptProgress, run_script
from memfit.temporary_folders import TemporaryFolder
from memfit.termination_signals import INTERRUPTED
from memfit.trials.trial_run import prepare_injection
from memfit.verification.compare_updates import (
    FirstUpdateRun,
    gradient_difference,
    gradients_keep_promise,
    largest_allowed_difference,
    why_other_operations,
    why_runs_not_comparable,
)
from memfit.verification.first_update_process import FirstUpdateRunSettings, read_first_update

_ON_CPU = "\nTo compute on the CPU instead, write: CUDA_VISIBLE_DEVICES= memfit verify ..."


def verify_plan(
    command: tuple[str, ...],
    plan: PlanFile,
    *,
    module: bool,
    on_cpu: bool,
    on_progress: Callable[[ScriptProgress], None],
) -> Verification:
    """Return whether the script's first update under a plan has the gradients that the plan promises.

    Raises:
        TargetError: the script, as written or under the plan, makes no update.
    """
    change = plan.change
    draws = change.micro_batches is not None and change.micro_batches.draws
    dropout = not draws and "batch_slices" not in change.plan
    with TemporaryFolder() as name:

        def run(what: str, change: Change) -> FirstUpdateRun:
            on_progress(ScriptProgress(trying=what))
            folder = Path(name) / what
            folder.mkdir()
            settings = FirstUpdateRunSettings(str(folder), module, on_cpu, dropout)
            return _run(command, settings, change, what)

        plain, planned = run("as written", Change()), run("under the plan", change)
        apart = gradient_difference(plain, planned, parts=change.updates_held_back)
        parts = change.parts
        bound = largest_allowed_difference(plan.equality, plain.update.arithmetic)
        verdict, reason, repeated = VerificationVerdict.VERIFIED, "", None
        if not gradients_keep_promise(plain, planned, apart, bound, parts=parts):
            again = run("as written, again", Change())
            repeated = gradient_difference(plain, again)
            reason = why_runs_not_comparable(plain, again, planned, repeated, bound, parts=parts)
            verdict = VerificationVerdict.NOT_COMPARABLE if reason else VerificationVerdict.DIFFERS
        under = planned.report.operations
        operations = (
            None
            if under is None
            else CountedOperations(under, plain.report.operations, plan.operations_under(plain.update.torch))
        )
        if verdict is VerificationVerdict.VERIFIED:
            reason = why_other_operations(
                operations,
                planned.report.again,
                is_same=command == plan.command and not on_cpu,
                is_checkpointing=change.plan.keys() == {"checkpointing"}
                and change.micro_batches is None
                and not change.own_sharding,  # gradients that are views of DDP's buckets are not copied
            )
            verdict = VerificationVerdict.OTHER_OPERATIONS if reason else verdict
        peaks = (plain.update.peak, planned.update.peak)
    return Verification(
        verdict=verdict,
        reason=reason,
        equality=plan.equality,
        planned=apart,
        repeated=repeated,
        bound=bound,
        arithmetic=plain.update.arithmetic,
        device=plain.update.device,
        measured=None,
        operations=operations,
        peaks=None if peaks[0] is None or peaks[1] is None else (peaks[0], peaks[1]),
        command=command,
        planned_for=plan.command,
        dropout=dropout,
        versions={"torch": plain.update.torch},
    )


def _run(
    command: tuple[str, ...], settings: FirstUpdateRunSettings, change: Change, what: str
) -> FirstUpdateRun:
    """Run the script under a change until its first update."""
    folder = Path(settings.folder)
    with prepare_injection(change, RunOptions(module=settings.module), counts_backward=True) as injection:
        _, intervention = injection.options.preload or ("", "")
        read, write = os.pipe()
        file = folder / "settings.json"
        settings = msgspec.structs.replace(
            settings,
            change=intervention,
            steps_in_backward=change.plan.get("optimizer_state", {}).get("step_in_backward", False),
            pipe=write,
        )
        file.write_bytes(msgspec.json.encode(settings))
        try:
            _start(
                [
                    *command_running_module("memfit.verification.first_update_process"),
                    str(file),
                    *command,
                    *change.arguments,
                ],
                change.allocator,
                write,
            )
        finally:
            os.close(read)
            os.close(write)
        update, report = read_first_update(folder), injection.report()
        why = injection.why_unfit()
    if why:
        raise UsageError(f"The plan does not suit {command[0]}: {why}")
    if update.failure:
        stands_in = " on the CPU, because this machine has no GPU that PyTorch can use"
        on = stands_in if settings.on_cpu else ""
        raise TargetError(
            f"memfit ran {command_as_typed(command)[0]} {what}{on}: {update.failure}{'' if on else _ON_CPU}"
        )
    return FirstUpdateRun(folder, update, report)


def _start(command: Sequence[str], conf: str, pipe: int) -> None:
    """Run a process to its end, and kill it with all that it started if memfit is interrupted or ended.

    ``conf`` is its ``PYTORCH_ALLOC_CONF``, empty for the user's own; it inherits the descriptor ``pipe``.
    """
    environment = os.environ | {"PYTHONHASHSEED": "0"} | ({"PYTORCH_ALLOC_CONF": conf} if conf else {})
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, pass_fds=[pipe])
    try:
        if process.wait() == INTERRUPTED:
            raise KeyboardInterrupt
    finally:
        kill_script(process)


def measure_peak_under_plan(
    command: tuple[str, ...], plan: PlanFile, *, module: bool, on_progress: Callable[[ScriptProgress], None]
) -> MeasuredPeak:
    """Return the peak of a script under a plan over its first steps, as ``memfit record`` measures it.

    Raises:
        TargetError: the script never used the GPU, or failed, or its process died.
    """
    change = plan.change

    def show(progress: ScriptProgress) -> None:
        on_progress(replace(progress, trying="under the plan, for its peak"))

    options = RunOptions(module=module, labels=False, allocator=change.allocator)
    with prepare_injection(change, options) as injection:
        trace = run_script(command + change.arguments, injection.options, None, None, show).trace
    if not ran_to_completion(trace.end):
        raise TargetError(
            f"memfit trained {command_as_typed(command)[0]} under the plan, but {why_run_failed(trace.end)}"
        )
    found = dry_run_of_trace(trace)
    return MeasuredPeak(
        found.peak_allocated,
        found.peak_reserved,
        found.peak_process,
        plan.allocated_for(command),
    )
