"""A script's run as one of several ranks that torchrun has started, and the report on all of them.

torchrun --nproc-per-node 2 -m memfit dry-run train.py

torchrun ──> memfit ──> rank 0 on a ghost ──┐ its trace
         ──> memfit ──> rank 1 on a ghost ──┤
                                            └─> a folder of this machine ──> the first memfit reports on all
"""

import hashlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from memfit.analysis.equivalent_ranks import (
    group_equivalent_ranks,
    rank_run_sort_key,
    what_one_rank_holds,
)
from memfit.analysis.side_stream_peak_range import may_side_streams_change_peak, without_late_run
from memfit.analysis.trial_result import TrialResult, why_run_failed
from memfit.api.run_on_ghost import (
    LATE,
    RANK,
    FinishedRun,
    larger_need_with_late_streams,
    trace_file_of_rank,
    try_to_save_trace,
)
from memfit.api.traces import summarize
from memfit.records import Change, ScriptEnd
from memfit.run.job_rank import Rank
from memfit.run.options import RunOptions
from memfit.run.parent import PATIENCE, ScriptProgress, checked_script_argv, run_script
from memfit.run.parent_pipe import signal_process_when_parent_ends
from memfit.run.resolve_ghost_settings import resolve_ghost_settings
from memfit.temporary_folders import PREFIX, keep_folder_from_removal
from memfit.trace.trace_file import read_trace, write_trace
from memfit.trials.trial_run import trial_runner

_RACES = "streams race"
_NAMES_OF_JOB = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
"""Variables that torchrun sets, and that differ from job to job."""
_INTERVAL = 0.1  # seconds between two looks at what the other ranks have written


def run_as_torchrun_rank(
    script: str | Path,
    arguments: Sequence[str],
    options: RunOptions,
    environment: Mapping[str, str],
    *,
    output: Path | None,
    on_progress: Callable[[ScriptProgress], None],
) -> FinishedRun | None:
    """Run a script as the rank as which torchrun has started this process, beside the others.

    Args:
        script: as for ``dry_run``, like ``arguments``.
        arguments: of the script.
        options: with that rank, and ``real_ranks``.
        environment: that of this process.
        output: where to save the trace of the rank that needs most.
        on_progress: called about ten times a second.

    Returns:
        On the first rank of each machine, the result of the rank there that needs most, with all roles beside
        it; elsewhere None. If the script fails here, this rank's result.
    """
    signal_process_when_parent_ends(signal.SIGTERM)  # a killed torchrun ends no rank, which would wait for it
    command = checked_script_argv(script, arguments, options, output)
    early = SharedTraces(options.rank, environment, "early")
    recorded = run_script(
        command, options, resolve_ghost_settings(options), early.prepare(), on_progress, PATIENCE
    )
    result = summarize(recorded.trace)
    if result.end.reason not in ("end", "steps") or result.end.gave_up:
        early.abandon()
        return FinishedRun(
            recorded.trace,
            result,
            try_to_save_trace(recorded.trace, trace_file_of_rank(output, options.rank.rank)),
        )
    late, unfinished = None, ""
    if _RACES in early.exchange(_RACES * may_side_streams_change_peak(recorded.trace)).values():
        late = SharedTraces(options.rank, environment, "late")
        path = late.prepare()
        unlimited = replace(options, unlimited=True)
        trial = trial_runner(command, unlimited, on_progress)(Change(finish_late=True), LATE)
        if isinstance(trial, TrialResult):
            write_trace(trial.trace, path)
        why = "" if isinstance(trial, TrialResult) else f"{options.rank}: {why_run_failed(trial)}"
        unfinished = next(filter(None, late.exchange(why).values()), "")
    if options.rank.local:
        return None
    ranks = {
        rank: _read(rank, early, late, unfinished)
        for rank in range(options.rank.rank, options.rank.rank + options.rank.nproc)
    }
    (late or early).remove()
    largest = max(ranks.values(), key=lambda rank: rank_run_sort_key(rank.result))
    roles = group_equivalent_ranks(
        (number, what_one_rank_holds(number, rank.result)) for number, rank in ranks.items()
    )
    to_save = {output: largest.trace}
    if output is not None and RANK in output.name:
        to_save = {trace_file_of_rank(output, number): rank.trace for number, rank in ranks.items()}
    unsaved = [try_to_save_trace(trace, path) for path, trace in to_save.items()]
    result = replace(largest.result, ranks=roles)
    return FinishedRun(largest.trace, result, next(filter(None, unsaved), None))


class SharedTraces:
    """The traces of the ranks on this machine, in a folder that the processes of one job share.

    Args:
        rank: that of this process.
        environment: as torchrun has set it.
        name: of this run, if memfit runs the script several times.
    """

    def __init__(self, rank: Rank, environment: Mapping[str, str], name: str) -> None:
        job = "\0".join(environment.get(name, "") for name in _NAMES_OF_JOB)
        digest = hashlib.sha256(f"{os.getuid()}\0{job}".encode()).hexdigest()[:16]
        self._folder = Path(tempfile.gettempdir()) / f"{PREFIX}ranks-{digest}"
        self._lock: int | None = None
        self._first = rank.rank - rank.local
        self._rank = rank
        self._name = name

    def prepare(self) -> Path:
        """Return where this rank's trace is to be written; what an earlier job has left is removed."""
        self._release()
        self._lock = keep_folder_from_removal(self._folder)
        for suffix in ("memfit", "remark", "heard"):
            self._file(suffix).unlink(missing_ok=True)
        return self.trace(self._rank.rank)

    def trace(self, rank: int) -> Path:
        """Return the file of a rank's trace."""
        return self._file("memfit", rank)

    def exchange(self, remark: str) -> dict[int, str]:
        """Tell the other ranks that this one has written its trace, with a remark, and return theirs.

        A rank that fails never does; torchrun then ends all others.
        """
        own = self._file("written")
        own.write_text(remark)
        own.replace(own.with_suffix(".remark"))
        remarks = {rank: path.read_text() for rank, path in self._all("remark").items()}
        self._file("heard").touch()
        return remarks

    def remove(self) -> None:
        """Remove the folder once all ranks have heard the others."""
        self._all("heard")
        self.abandon()

    def abandon(self) -> None:
        """Remove the folder: this rank has failed."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _all(self, suffix: str) -> dict[int, Path]:
        """Wait until each rank has written a file, and return them."""
        ranks = range(self._first, self._first + self._rank.nproc)
        paths = {rank: self._file(suffix, rank) for rank in ranks}
        while not all(path.exists() for path in paths.values()):
            time.sleep(_INTERVAL)
        return paths

    def _file(self, suffix: str, rank: int | None = None) -> Path:
        return self._folder / f"{self._name}-{self._rank.rank if rank is None else rank}.{suffix}"


def _read(rank: int, early: SharedTraces, late: SharedTraces | None, unfinished: str) -> FinishedRun:
    """Return what a rank holds: at most, if streams race; ``unfinished`` tells why that is not known."""
    trace = read_trace(early.trace(rank))
    found = FinishedRun(trace, summarize(trace), None)
    if unfinished:
        return replace(found, result=without_late_run(found.result, ScriptEnd("refused", 0, unfinished)))
    return found if late is None else larger_need_with_late_streams(found, read_trace(late.trace(rank)))
