"""Compare predicted and measured memory: run the jobs of jobs.toml on this machine's GPU and on the ghost.

    python benchmarks/gpu/validate.py --quick       eight jobs, a few minutes
    python benchmarks/gpu/validate.py               all jobs, at most nine minutes
    python benchmarks/gpu/validate.py --rehearse A100-80GB --only linear1024

No network is needed. If memfit is not installed, set PYTHONPATH="$PWD/src" (memfit then needs numpy, msgspec
and platformdirs in addition to torch). The script writes CARD-DRIVER-TORCH.json and .md after every job, and
a second call resumes where the first stopped. Each run is a separate process with a time limit. With
``--rehearse`` the ghost stands in for the card too: every difference should be zero; nothing is measured.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from card_session import ResultFile, chosen, command_line, ran_on, rehearse, result_name
from compare import difference
from measuring import ROOT
from table import markdown

import memfit
from memfit import __version__
from memfit.card.context_measurement import measure_context
from memfit.card.detect_card import detect_card
from memfit.devices import find_device
from memfit.errors import MemfitError, UnknownDeviceError
from memfit.records import CardContextReport, DryRun

HERE = Path(__file__).resolve().parent
STEPS = 3
SECONDS = 90


@dataclass(frozen=True)
class ValidationJob:
    """One row of jobs.toml."""

    name: str
    script: str
    arguments: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    seconds: int = SECONDS
    """Time limit of one run."""
    quick: bool = False


class TooLongError(Exception):
    """A run exceeded its time limit and was stopped."""


def jobs(path: Path = HERE / "jobs.toml") -> list[ValidationJob]:
    """Read the list of jobs."""
    return [
        msgspec.convert(row, ValidationJob) for row in tomllib.loads(path.read_text(encoding="utf-8"))["job"]
    ]


def in_time(seconds: float) -> Callable[[object], None]:
    """Return a progress callback that stops its run after ``seconds``."""
    until = time.monotonic() + seconds

    def check(_progress: object) -> None:
        if time.monotonic() > until:
            raise TooLongError(f"took more than {seconds:.0f} s and was stopped")

    return check


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables within the block."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def figures(run: DryRun) -> dict[str, Any]:
    """Return the compared figures of one run, in bytes, and how the run ended."""
    (context,) = (term.figure for term in run.terms if term.name == "CUDA context")
    return {
        "allocated": run.peak_allocated,
        "reserved": run.peak_reserved,
        "process": run.peak_process.bytes,
        "outside": context.bytes,
        "outside_provenance": context.provenance,
        "outside_source": context.source,
        "steps": run.steps,
        "verdict": run.verdict,
        "end": run.end.reason,
        "exception": run.end.exception,
        "notes": [note.text for note in run.notes],
    }


def compare_job(job: ValidationJob, gpu: str, total: int, seconds: float, folder: Path) -> dict[str, Any]:
    """Run one job on the card and on the ghost, and compare the traces.

    Args:
        job: what to run.
        gpu: the ghost's profile in the device table.
        total: memory of the card, and of the ghost, in bytes.
        seconds: time left for the two runs.
        folder: for the traces; the scripts write to the working folder.
    """
    missing = [name for name in job.needs if importlib.util.find_spec(name) is None]
    if missing:
        return {"status": "skipped", "why": f"needs {', '.join(missing)}"}
    script, until = ROOT / job.script, time.monotonic() + seconds
    traces = {"card": folder / "card.memfit", "ghost": folder / "ghost.memfit"}
    runs: dict[str, Callable[..., DryRun]] = {
        "card": memfit.record,
        "ghost": partial(memfit.dry_run, gpu=gpu, memory=total),
    }
    outcome: dict[str, Any] = {"status": "done"}
    for side, run in runs.items():
        begun = time.monotonic()
        try:
            with environment(job.environment):
                found = run(
                    script,
                    job.arguments,
                    steps=STEPS,
                    output=traces[side],
                    on_progress=in_time(min(job.seconds, until - begun)),
                )
        except (MemfitError, TooLongError) as error:
            return {
                **outcome,
                "status": "failed",
                "why": f"{side}: {error}",
            }  # keeps a measurement of the card
        outcome[side] = {**figures(found), "seconds": round(time.monotonic() - begun, 1)}
        if found.verdict == "unknown" or (found.end.reason == "end" and found.end.exit_code):
            why = found.end.exception or f"exit code {found.end.exit_code}"
            outcome = {"why": f"{side}: the script ended with {why}", **outcome, "status": "failed"}
    differs = difference(memfit.read(traces["card"]), memfit.read(traces["ghost"]))
    return {**outcome, "difference": msgspec.to_builtins(differs)}


def calibration(seconds: float) -> tuple[CardContextReport, dict[str, Any]]:
    """Measure the CUDA context, and the figures that only a card can report.

    Raises:
        MemfitError: PyTorch cannot use the card at all.
    """
    context = measure_context()
    try:
        measured = subprocess.run(
            [sys.executable, str(HERE / "calibrate.py")],
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return context, {"failed": f"took more than {seconds:.0f} s"}
    if measured.returncode != 0:
        return context, {"failed": (measured.stderr.splitlines() or ["no output"])[-1]}
    return context, msgspec.json.decode(measured.stdout)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = command_line(__doc__, minutes=9)
    parser.add_argument("--quick", action="store_true", help="the shortest useful set of jobs")
    parser.add_argument("--gpu", help="the ghost's profile, if the card's name is not in memfit's table")
    return parser.parse_args(arguments)


def main() -> int:
    """Validate; return 1 if a job failed or was not run for lack of time."""
    options = parsed()
    until = time.monotonic() + 60 * options.minutes
    rehearse(options.rehearse)
    listed = (job for job in jobs() if job.quick or not options.quick)
    these = chosen(listed, options.only, "jobs.toml")
    try:
        card = detect_card("validate")
        gpu = find_device(options.gpu or card.name).name
        context, measured = calibration(until - time.monotonic())
    except UnknownDeviceError as error:
        sys.exit(f"validate.py: {error} Choose the nearest profile with --gpu NAME.")
    except MemfitError as error:
        sys.exit(f"validate.py: {error}")
    result = ResultFile(options.out.resolve(), result_name(card, context.torch), "jobs", markdown)
    result.content |= ran_on(card, context.torch) | {
        "profile": gpu,
        "driver_cuda": card.cuda,
        "steps": STEPS,
        "context": msgspec.to_builtins(context)
        | {"outside": [[stage.what, stage.outside] for stage in context.stages]},
        "calibration": measured,
    }
    result.keep()
    run_all(these, result, gpu=gpu, total=context.total, until=until, again=options.again)
    return result.shown(job.name for job in these)


def run_all(
    these: Sequence[ValidationJob], result: ResultFile, *, gpu: str, total: int, until: float, again: bool
) -> None:
    """Run the jobs that have no result yet, one after another, and write each result."""
    terminal = os.fdopen(os.dup(2), "w", buffering=1)
    with tempfile.TemporaryDirectory(prefix="memfit-validate-") as scratch, quiet(result.path):
        os.chdir(scratch)
        for number, job in enumerate(these, 1):
            if result.is_done(job.name) and not again:
                continue
            print(f"{number}/{len(these)} {job.name}: ", end="", file=terminal, flush=True)
            left = until - time.monotonic()
            if left <= 0:
                outcome: dict[str, Any] = {"status": "not run", "why": "no time left (--minutes)"}
            else:
                outcome = compare_job(job, gpu, total, left, Path(scratch))
            named = {"script": job.script, "arguments": job.arguments, "memfit": __version__}
            result.done[job.name] = {**named, **outcome}
            result.keep()
            print(f"{outcome['status']} {outcome.get('why', '')}", file=terminal)
        os.chdir(ROOT)
    terminal.close()


@contextmanager
def quiet(path: Path) -> Iterator[None]:
    """Redirect the scripts' output to a log beside the result."""
    sys.stdout.flush()
    kept = os.dup(1), os.dup(2)
    with path.with_suffix(".log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        for descriptor, copy in enumerate(kept, 1):
            os.dup2(copy, descriptor)
            os.close(copy)


if __name__ == "__main__":
    sys.exit(main())
