"""Compare the memory of a script with a baseline: the gate for continuous integration."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from memfit.analysis.baseline_check import compare_with_baseline, memory_baseline_of_run
from memfit.analysis.dry_run_result import dry_run_of_trace
from memfit.analysis.trial_result import ran_to_completion, why_run_failed
from memfit.api.run_on_ghost import run_on_ghost
from memfit.atomic_files import check_output_path, write_output_file
from memfit.devices import DEFAULT
from memfit.errors import TargetError, UsageError
from memfit.input_files import read_input_file
from memfit.records import Change, CheckVerdict, MemoryBaseline, MemoryCheck, ScriptEnd, Trace
from memfit.report.public_json import baseline_from_json, baseline_to_json
from memfit.run.options import STEPS, RunOptions
from memfit.run.parent import ScriptProgress
from memfit.trials.trial_run import trial_runner

BASELINE = "memfit-baseline.json"
TOLERANCE = 0.01
_LARGEST_BASELINE = 64 << 20


def check(  # noqa: PLR0913 - one parameter an option
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    baseline: str | Path | None = BASELINE,
    update: bool = False,
    tolerance: float = TOLERANCE,
    budget: int | None = None,
    module: bool = False,
    gpu: str = DEFAULT,
    in_use: int = 0,
    steps: int | None = STEPS,
    values: str = "",
    stdout_to_stderr: bool = False,
    on_progress: Callable[[ScriptProgress], None] = lambda _: None,
) -> MemoryCheck:
    """Run an unmodified script on the ghost, and compare its memory with a baseline; needs no GPU.

    Args:
        script: path of the script, or a module's name with ``module=True``.
        arguments: the script's own arguments.
        baseline: the file of the baseline; None to check only whether the script fits.
        update: write this run to that file. If there is one already, the result compares the two.
        tolerance: share by which each figure may change: each peak, each term of it, and what each module
            holds of each term. A module counts if the peak changed in the same direction.
        budget: bytes of device memory that the script may use, the CUDA context included; by default the
            memory of ``gpu``.
        module: run a module as ``python -m`` does.
        gpu: name of a device in the table (``memfit gpus``).
        in_use: bytes of device memory that other processes hold.
        steps: training steps after which memfit stops the script; None lets it run to its end.
        values: what the ghost returns when the script reads a GPU value, see ``RunOptions.values``.
        stdout_to_stderr: send the script's standard output to standard error.
        on_progress: called about ten times a second.

    Returns:
        What grew and what fell; ``passed`` says whether the script fits and nothing grew too much.

    Raises:
        UsageError: there is no baseline, or the tolerance is negative.
        FileFormatError: the file holds no baseline.
        MemfitError: the script fails, cannot be run, or starts processes that use the GPU; or the baseline
            cannot be written.

    >>> check("train.py").passed  # doctest: +SKIP
    True
    """
    options = RunOptions(
        module=module,
        steps=steps,
        stdout_to_stderr=stdout_to_stderr,
        gpu=gpu,
        memory=budget,
        in_use=in_use,
        values=values,
    )
    if tolerance < 0:
        raise UsageError(f"tolerance must not be negative: {tolerance}.")
    file = None if baseline is None else Path(baseline)
    before = _baseline(file, update=update)
    done = run_on_ghost(script, arguments, options, output=None, on_progress=on_progress)
    trace, found, fits = done.trace, done.result, not done.result.ran_out
    needs = found.needs or found.peak_process
    if not fits:
        run_unlimited = trial_runner(found.command, replace(options, unlimited=True), on_progress)
        trial = run_unlimited(Change(), "with unlimited memory")
        if isinstance(trial, ScriptEnd):
            raise TargetError(f"memfit cannot check the script: {why_run_failed(trial)}")
        trace = replace(trial.trace, device=found.device, command=found.command)
        found = dry_run_of_trace(trace)
    _expect_complete(trace)
    run = memory_baseline_of_run(trace, found)
    if before is not None:
        result = compare_with_baseline(before, run, found, needs, tolerance, fits=fits)
    else:
        fitting = CheckVerdict.FITS if file is None else CheckVerdict.WRITTEN
        result = MemoryCheck(fitting if fits else CheckVerdict.NO_FIT, tolerance, run, needs)
    if update and fits and file is not None:
        write_output_file(file, baseline_to_json(run))
    return result


def _baseline(file: Path | None, *, update: bool) -> MemoryBaseline | None:
    """Return the baseline in a file; None if it is to be written, and is not there yet, or without a file."""
    if file is None:
        return None
    if update:
        check_output_path(file)
        if not file.exists():
            return None
    elif not file.exists():
        raise UsageError(f"There is no baseline {file}. Write it with memfit check --update, and commit it.")
    return baseline_from_json(read_input_file(file, _LARGEST_BASELINE), str(file))


def _expect_complete(trace: Trace) -> None:
    """Refuse to check a script that did not complete, or only a part of it."""
    if trace.end.reason == "interrupted":
        raise KeyboardInterrupt
    if not ran_to_completion(trace.end):
        raise TargetError(f"memfit cannot check the script: {why_run_failed(trace.end)}")
    if trace.children:
        raise TargetError(
            "memfit cannot check the script: it started other processes that use the GPU, whose memory is "
            f"not included: {', '.join(child.name for child in trace.children)}. Check them by themselves."
        )
