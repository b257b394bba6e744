"""Write a job for a script: ``memfit.Engine`` trains it, and plans are carried out in full."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from msgspec import json

from memfit.analysis.summary import summarize
from memfit.analysis.trial_result import TrialResult, why_it_failed
from memfit.atomic_files import check_output, write_bytes
from memfit.devices import NO_LIMIT
from memfit.errors import TargetError, UsageError
from memfit.records import Change, JobObservation, JobScaffold, ObservedJob, Trace
from memfit.records.targets import JOBS
from memfit.report.terminal.job_scaffold import PrintableJobScaffold
from memfit.run.options import STEPS, RunOptions
from memfit.run.parent import Progress, run_script, script_command
from memfit.run.resolve_options import ghost_settings
from memfit.scaffold.job_file import text_of_job
from memfit.temporary_folders import TemporaryFolder
from memfit.trials.trial_run import trial_runner

_OBSERVER = "memfit.scaffold.observe"
FUNCTION = "make_job"


def scaffold_job(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    output: str | Path | None = None,
    module: bool = False,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> JobScaffold:
    """Write a file with the job of a script; needs no GPU.

    memfit watches the unmodified script on the ghost up to its first update: where it creates its model and
    its optimizer, and the statements that compute the loss. From these it writes ``make_job``. Then it runs
    script and job on the ghost, and compares their peaks.

    Args:
        script: path of the script, or a module's name with ``module=True``.
        arguments: the script's own arguments.
        output: the file to write, which must not exist; by default ``job.py`` beside the script.
        module: run a module as ``python -m`` does.
        on_progress: called about ten times a second.

    Returns:
        The job, and what is left to do in it.

    Raises:
        UsageError: the file exists.
        TargetError: the script cannot be run, or a job cannot do what it does; the message says why.

    >>> scaffold_job("nowhere.py", ["--batch-size", "8"])
    Traceback (most recent call last):
    memfit.errors.UsageError: No such script: nowhere.py. Give the path as you would to python.
    """
    options = RunOptions(module=module, steps=STEPS, memory=NO_LIMIT)
    command = script_command(script, arguments, options, None)
    path = _new_file(output, Path(f"{command[0].rpartition('.')[2]}.py") if module else Path(command[0]))
    job = _observed(command, options, on_progress)
    text = text_of_job(job, command)
    run = _runner(command, options, on_progress)
    trace = run("the script")
    if isinstance(trace, str):
        raise TargetError(f"memfit cannot write a job: {trace}")
    write_bytes(path, text.encode())
    size = ["--batch-size", str(job.batch_size)] if job.batch_size else []
    found = _runner((JOBS, f"{path}:{FUNCTION}", *size), replace(options, module=True), on_progress)(
        "the job"
    )
    scaffold = JobScaffold(
        path=str(path),
        job=job,
        arguments=tuple(size),
        command=command,
        script_peak=summarize(trace).peak_allocated,
        job_peak=None if isinstance(found, str) else summarize(found).peak_allocated,
        fault=found if isinstance(found, str) else "",
    )
    return PrintableJobScaffold.of(scaffold)


def _new_file(output: str | Path | None, script: Path) -> Path:
    folder = script.parent
    path = folder / "job.py" if output is None else Path(output)
    if path.resolve().stem == script.stem:
        raise UsageError(f"{path} would import itself, not the script. Write another file with -o FILE.py.")
    if path.exists():
        raise UsageError(f"{path} exists, and may be your own work. Write another file with -o FILE.py.")
    if path.suffix != ".py":
        raise UsageError(f"{path} does not end in .py. Write a Python file: -o job.py.")
    check_output(path)
    return path


def _observed(
    command: tuple[str, ...], options: RunOptions, on_progress: Callable[[Progress], None]
) -> ObservedJob:
    """Return the job of a script.

    Raises:
        TargetError: there is none.
    """
    with TemporaryFolder() as folder:
        file = Path(folder) / "job.json"
        watched = replace(options, steps=1, preload=(_OBSERVER, str(file)))
        end = run_script(command, watched, ghost_settings(watched), None, on_progress).trace.end
        if end.reason == "interrupted":
            raise KeyboardInterrupt
        if not file.exists():
            raise TargetError(f"memfit cannot write a job: it saw no optimizer.step(); {why_it_failed(end)}.")
        found = json.decode(file.read_bytes(), type=JobObservation)
    if found.job is None:
        raise TargetError(f"memfit cannot write a job for {command[0]}. {found.reason}")
    return found.job


def _runner(
    command: tuple[str, ...], options: RunOptions, on_progress: Callable[[Progress], None]
) -> Callable[[str], Trace | str]:
    """Return a function that runs a command on the ghost: its trace, or why it did not complete."""
    run = trial_runner(command, options, ghost_settings(options).device.total.bytes, on_progress)

    def trace(what: str) -> Trace | str:
        result = run(Change(), what)
        return result.trace if isinstance(result, TrialResult) else why_it_failed(result)

    return trace
