"""One run of a script in this process: records it, and writes its trace when it ends.

Nothing here imports torch before the script does, as in ``child.py``.
"""

import atexit
import gc
import importlib
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from memfit.errors import MemfitError, TargetError
from memfit.ghost.compile.lazy_dynamo import import_dynamo_lazily
from memfit.ghost.ranks.absent_ranks import join_groups_with_absent_ranks
from memfit.ghost.ranks.object_exchange_files import ExchangedObjects
from memfit.ghost.ranks.present_ranks import PresentRanks
from memfit.patching.after_import import call_after_import
from memfit.patching.patches import call_before
from memfit.recording.loader_shortener import LoaderShortener
from memfit.recording.longest_batches import LongestBatchFinder
from memfit.recording.script_loaders import ScriptLoaders
from memfit.recording.script_options import ScriptOptionCollector
from memfit.recording.short_trainers import TrainerShortener
from memfit.recording.unreached_evaluations import UnreachedEvaluations
from memfit.records import Provenance, ScriptEnd
from memfit.run.backend import Backend
from memfit.run.child_start import ChildSettings, read_child_settings
from memfit.run.descendant_processes import kill_descendants
from memfit.run.follow_started_processes import (
    StartedProcessRecorder,
    follow_started_processes,
    read_started_processes,
    record_gpu_use_after_fork,
    record_running_programs,
)
from memfit.run.job_rank import rank_script_ran_as
from memfit.run.launchers import refuse_process_groups, wrong_group_size_error
from memfit.run.parent_pipe import ParentPipe, open_parent_pipe, report_compilations
from memfit.run.ranks_started_by_script import StartedRanks
from memfit.run.run_script_as_python import print_exception_as_python_does, run_script_as_main
from memfit.run.script_end import (
    call_when_started_process_ends,
    classify_script_end,
    flush_output,
    join_script_threads,
    noting_excepthook,
)
from memfit.termination_signals import INTERRUPTED

if TYPE_CHECKING:
    from memfit.recording.recorder import Recorder
    from memfit.records import LoaderBatchSize, Trace
    from memfit.run.standby_fork import StandbyForker

_exit = os._exit  # the script sees another: ScriptProcess._leave
_ALSO_USED = (
    "The script's own process, which started the ranks, used a GPU, too. What it held is not included."
)
FAILED_LATER = 15.0
"""Seconds that a rank waits before it reports its failure if another has failed before, which may be why.
torchrun ends it when the other has ended."""
THREAD_TIMEOUT = 5.0  # seconds that the threads of an ended script get to finish


class ScriptProcess:
    """One run of a script in this process."""

    def __init__(
        self, command: tuple[str, ...], settings: ChildSettings, backend: Backend, parent: ParentPipe
    ) -> None:
        self._command = command
        self._settings = settings
        self._backend = backend
        self._parent = parent
        self._pid = os.getpid()
        self._script: int | None = self._pid
        """The process that runs the script; None if this is another that the script started."""
        self._ranks = StartedRanks(Path(settings.folder), settings.options.rank.nproc)
        self._recorder: Recorder | None = None
        self._last_error: BaseException | None = None
        self._others: PresentRanks | None = None
        if settings.options.real_ranks and backend.ghost is not None:
            run = "late" if settings.options.finish_late else "early"
            self._others = PresentRanks(backend.ghost, run, self._refuse_group)
        self._interrupted = False  # while it stands for the script
        self._runs_as_rank = False  # of a process group that it has joined
        self._steps_reported = 0
        self._record: StartedProcessRecorder | None = None  # of a process beside the script's
        self._options, self._loaders = ScriptOptionCollector(), ScriptLoaders()
        self._loader: LoaderBatchSize | None = None  # that of the last training step
        self._evaluations = UnreachedEvaluations()
        self._leaving: set[int] = set()  # threads that have called os._exit
        self.standby: StandbyForker | None = None
        self._short: tuple[LoaderShortener | TrainerShortener, ...] = ()
        self._longest: LongestBatchFinder | None = None
        self._change_batches(settings.options.batches, settings.options.scan)
        self._options.install()
        self._loaders.install()

    def _change_batches(self, most: int | None, scan: float | None) -> None:
        """End passes after so many batches, and look for the longest one, each if the options say so."""
        loaders = None if most is None else LoaderShortener(most, self._loaders)
        if scan is not None:  # first, so that it can draw from loaders that are not shortened
            self._longest = LongestBatchFinder(scan, self._loaders, loaders, lambda: self._recorder)
            self._longest.install()
        if most is not None and loaders is not None:
            self._short = (loaders, TrainerShortener(most))
            for each in self._short:
                each.install()

    def go_on(self, settings: str, called: object) -> None:
        """Go on as another run, in a fork of this process; arguments as in ``StandbyForker``."""
        before, self._settings = self._settings, read_child_settings(Path(settings).read_text("ascii"))
        self._parent.move(self._settings.progress)
        self._pid = self._script = os.getpid()
        self._ranks = StartedRanks(Path(self._settings.folder), self._settings.options.rank.nproc)
        follow_started_processes(self._settings, before)
        self._backend.go_on(self._settings)
        if (preload := self._settings.options.preload) is not None:
            module, argument = preload
            importlib.import_module(module).install_in_fork(argument, called)

    def begin(self) -> None:
        """Start recording: torch has just been imported."""
        import torch

        from memfit.recording.recorder import Recorder

        options = self._settings.options
        torch.cuda._lazy_call(self._check_backend)  # type: ignore[no-untyped-call]
        recorder = Recorder(
            self._backend.ghost,
            options.steps,
            labels=options.labels,
            on_change=self._changed,
            end_now=lambda reason: self.finish(ScriptEnd(reason, 0)),
        )
        if options.seconds is not None:
            recorder.steps.deadline = time.monotonic() + options.seconds
        recorder.install()
        self._evaluations.install()
        os._exit = self._leave
        if self._settings.ghost is not None:
            os.register_at_fork(after_in_child=self._forked)
        self._backend.begin(recorder)
        self._recorder = recorder
        if self.standby is not None:
            self.standby.watch()
        call_after_import("torch._dynamo.callback", lambda: report_compilations(self._parent.compiling))
        if self._settings.ghost is not None:
            call_after_import("torch.distributed.distributed_c10d", self._prepare_process_groups)
            import_dynamo_lazily()

    def _forked(self) -> None:
        if self.standby is None or not self.standby.forking:
            record_gpu_use_after_fork(Path(self._settings.folder))

    def _check_backend(self) -> None:
        """End the run if it cannot be measured on this backend."""
        if reason := self._backend.refusal():
            self._refuse(reason, TargetError.exit_code)
        if self._is_the_script() and not self._runs_as_rank:
            self._ranks.note_gpu_use()
        if not self._is_the_script() and self._settings.ghost is not None:
            context = self._settings.ghost.device.context
            self._record = StartedProcessRecorder(Path(self._settings.folder), context)
            self._record.begin()

    def _leave(self, status: int) -> NoReturn:
        """End this process as ``os._exit`` does; the script's, with its trace."""
        if self._is_the_script() and threading.get_ident() not in self._leaving:
            self._leaving.add(threading.get_ident())
            self.finish(ScriptEnd("end", status), run_exit_handlers=False)
        _exit(status)

    def _is_the_script(self) -> bool:
        """Return whether this is the script's process, or the rank to run that the script started."""
        return os.getpid() == self._script

    def _prepare_process_groups(self) -> None:
        """Have the script join process groups as its rank, if there are others; refuse groups otherwise."""
        if self._others is not None:
            self._others.meet(self._backend.joined)
            self._backend.exchange_with(self._others)
        elif self._settings.options.rank.world_size > 1 and self._backend.ghost is not None:
            rank = self._settings.options.rank
            exchange = ExchangedObjects(self._folders, rank.rank, self._refuse_group)
            join_groups_with_absent_ranks(self._join, exchange, rank.first_of_machines, self._backend.ghost)
            self._backend.exchange_with(exchange)
        else:
            refuse_process_groups(self._refuse_group, in_script=self._is_the_script)

    def _folders(self) -> tuple[Path, Path]:
        """Return where the ranks of the job leave objects, and where those of this run ask for others."""
        return Path(self._settings.options.objects or self._settings.asks), Path(self._settings.asks)

    def _refuse_group(self, why: str) -> None:
        if not self._is_the_script():
            self._parent = ParentPipe(open_parent_pipe(self._settings.progress), started=True)
        self._refuse(why, TargetError.exit_code)

    def _join(self, rank: int, size: int) -> None:
        """Go on if this process joins the job as the rank to run; another rank leaves."""
        if self.standby is not None:
            self.standby.fork()  # NCCL's process groups start threads
        job = self._settings.options.rank
        self._backend.joined()
        if size == 1 or self._runs_as_rank:
            return
        if size != job.world_size:
            self._refuse_group(wrong_group_size_error(size, job))
        self._ranks.join(rank)
        if rank == job.rank and self._ranks.claim():
            self._runs_as_rank = True
            if not self._is_the_script():
                self._stand_for_the_script()
            return
        if self._is_the_script():
            self._ranks.wait_for_rank()
            self.finish(ScriptEnd("end", 0))
        if self._record is not None:
            self._record.withdraw()
        flush_output()
        _exit(0)

    def _stand_for_the_script(self) -> None:
        """Have this process, which the script started, write the run's trace when it ends."""
        self._pid = self._script = os.getpid()
        self._parent = ParentPipe(open_parent_pipe(self._settings.progress), started=True)
        if self._record is not None:
            self._record.withdraw()
            self._record = None
        handle = signal.getsignal(signal.SIGINT)
        if callable(handle) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, call_before(self._note_interruption, handle))
        call_when_started_process_ends(self._end_as_rank)
        self._ranks.wait_for_others()

    def _note_interruption(self, *_: object) -> None:
        self._interrupted = True

    def _end_as_rank(self, error: BaseException | None, printed: bool) -> None:
        end = ScriptEnd("end", 0) if error is None else self._end_of(error, printed=printed)
        if error is None and self._interrupted:  # mp.spawn ends a rank on Ctrl-C as if it had trained
            end = ScriptEnd("interrupted", INTERRUPTED, "KeyboardInterrupt")
        self.finish(end)

    def _refuse(self, why: str, exit_code: int) -> NoReturn:
        self._parent.end(ScriptEnd("refused", exit_code, why), traced=False)
        kill_descendants(os.getpid())  # which Python's exit handlers would have ended
        _exit(exit_code)

    def script(self) -> ScriptEnd:
        """Run the script and return how it ended; its traceback goes to standard error."""
        in_threads: list[BaseException] = []
        threading.excepthook = noting_excepthook(threading.excepthook, in_threads)
        try:
            if (preload := self._settings.options.preload) is not None:
                module, argument = preload
                importlib.import_module(module).install(argument)
            run_script_as_main(self._command, module=self._settings.options.module)
        except BaseException as error:  # noqa: BLE001 - a script may end by raising anything
            return self._end_of(error)
        join_script_threads(None)  # Python waits for them too; one of them may be the training
        if self._enough():
            return ScriptEnd("steps", 0)
        if in_threads:
            self._last_error = in_threads[0]
            return classify_script_end(in_threads[0])
        return ScriptEnd("end", 0)

    def _end_of(self, error: BaseException, *, printed: bool = False) -> ScriptEnd:
        self._last_error = error  # its frames keep the script's objects alive for the recorder
        end = classify_script_end(error)
        if end.reason in ("end", "exception") and not printed:
            print_exception_as_python_does(error, __file__, planned=bool(self._settings.options.preload))
        if (end.reason == "exception" or end.gave_up) and (hint := self._backend.hint()):
            print(f"memfit: {hint}", file=sys.stderr)
        return end

    def finish(self, end: ScriptEnd, *, run_exit_handlers: bool = True) -> None:
        """Write the trace, let the script's exit handlers run, and exit.

        The interpreter is not finalised: autograd's device thread may still be dropping its last
        Python object, which aborts a process that finalises at that moment.
        """
        if os.getpid() != self._pid:  # a fork of the script ends here
            if self._record is not None:
                self._record.end()
            _exit(end.exit_code)
        gc.disable()  # a collection would touch all that a fork shares with its origin
        if self._recorder is not None:
            end = self._backend.explained(end, shortened=any(each.shortened for each in self._short))
        flush_output()
        self._let_others_end(end)
        if end.reason == "interrupted":
            self._parent.interrupted()
        record_running_programs(self._settings, self._pid)
        try:
            trace = self._trace(end)
            unsaved = self._save(trace) if trace is not None else ""
            if self._runs_as_rank:
                self._ranks.note_trace()
        except MemfitError as error:
            self._refuse(str(error), error.exit_code)
        self._parent.end(end, traced=trace is not None, unsaved=unsaved)
        self._stay(end)
        if run_exit_handlers:
            join_script_threads(THREAD_TIMEOUT)
            atexit._run_exitfuncs()
        flush_output()
        if end.reason == "interrupted":
            kill_descendants(self._pid)
        _exit(end.exit_code)

    def _let_others_end(self, end: ScriptEnd) -> None:
        """Wait for the rank that the script has started, or for one that has failed before this one."""
        if self._is_the_script() and self._ranks.is_elsewhere():
            self._ranks.wait_for_rank()
        failed = end.reason in ("exception", "out of memory")
        if self._others is not None and failed and not self._others.fail():
            time.sleep(FAILED_LATER)

    def _stay(self, end: ScriptEnd) -> None:
        """Wait as long as other processes of the run must not miss this one."""
        if self._parent.started and end.stopped:
            time.sleep(THREAD_TIMEOUT)  # until memfit ends the script, which would go on after this process
        if self._others is not None and end.reason in ("end", "steps") and not end.exit_code:
            self._others.wait_for_all()

    def _changed(self) -> None:
        if self._recorder is None:
            return
        completed = self._recorder.steps.completed
        stepped = completed > self._steps_reported
        self._steps_reported = completed
        if stepped and (self._is_the_script() or self._others is not None):
            self._backend.stepped()
        if not self._is_the_script():
            if self._enough():
                self.finish(ScriptEnd("steps", 0))  # what started it may take an exception for a failure
            if self._record is not None:
                self._record.update()
            return
        self._parent.progress(completed)
        if stepped:
            self._loader = self._loaders.last  # not that of an evaluation

    def _enough(self) -> bool:
        wanted = self._settings.options.steps
        return self._recorder is not None and wanted is not None and self._recorder.steps.completed >= wanted

    def _trace(self, end: ScriptEnd) -> "Trace | None":
        """Return the trace of the script; None if it never used the GPU."""
        if not self._is_the_script() or self._ranks.is_elsewhere():
            return None  # another process writes it; this one may record itself
        if not (self._recorder and (torch := sys.modules.get("torch")) and torch.cuda.is_initialized()):
            return None
        from memfit.recording.allocator_history import peak_pinned_host_bytes
        from memfit.versions import software_versions

        if end.stopped:
            end = replace(end, evaluation=self._evaluations.not_run())
        if self._parent.started and self._ranks.script_used_gpu():
            self._recorder.note(Provenance.ASSUMED, _ALSO_USED, sizes=True)
        all_versions = software_versions() | self._backend.versions()
        job = self._settings.options.rank
        trace = self._recorder.finish(
            self._backend.device(), end, self._command or tuple(sys.argv), all_versions, index=job.device
        )
        children = read_started_processes(Path(self._settings.folder))
        return replace(
            trace,
            options=self._options.found(),
            loader=self._loader or self._loaders.last,
            children=children,
            rank=rank_script_ran_as(job, os.environ),
            cudnn_workspaces=self._backend.cudnn_workspaces(),
            pinned=peak_pinned_host_bytes(),
            shortened=tuple(found for each in self._short for found in each.shortened),
            scans=self._longest.scans if self._longest is not None else (),
        )

    def _save(self, trace: "Trace") -> str:
        """Write a trace to its file or, if that fails, to the temporary folder; return why it failed."""
        from memfit.trace.trace_file import write_trace

        try:
            write_trace(trace, Path(self._settings.output))
        except MemfitError as error:
            write_trace(trace, Path(self._settings.fallback))
            return str(error)
        return ""
