"""``memfit dry-run``."""

import os
import shlex
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from memfit.cli.command_output import Output as OutputFile
from memfit.cli.command_output import exit_code_of_run, show_script_progress, write_result, written_trace_file
from memfit.cli.options import (
    GHOST,
    TARGET,
    Fail,
    Html,
    Json,
    Labels,
    Module,
    Notes,
    Output,
    RankOfJob,
    Script,
    TargetGpu,
    ToEnd,
    checked_script_keywords,
    json_output_file,
)
from memfit.errors import UsageError
from memfit.run.job_rank import ALONE, first_rank_to_run
from memfit.run.launchers import rank_started_by_torchrun
from memfit.run.options import BATCHES, LONGEST_STEPS, SCAN, SECONDS, STEPS, RunOptions


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RunLength:
    """How much of the script runs."""

    steps: int | None = None
    """Stop the script after this many training steps. By default, it is 3, and 4 with --longest."""
    to_end: ToEnd = False
    whole: bool = False
    """Let the script run to its end with few batches: training, evaluation, saving, and whatever else it
    does. The summary has a row for each of these stages, and says what was shortened."""
    batches: int = BATCHES
    """With --whole, end each pass over a DataLoader after this many batches. The loader's length is then this
    number, too."""
    seconds: float = SECONDS
    """With --whole, stop the script after this time, at the next batch or forward."""
    resume_with: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None
    """With --whole, run the script a second time with these further arguments, such as
    '--resume --epochs 4', so that it resumes from what it has just written. The result is of the run that
    needs most, with the stages of both."""
    longest: bool = False
    """Find the batch that needs most, where batches differ. When the script first reads a DataLoader, memfit
    draws batches from it and gives the script the largest one first, then one of the median size and one
    between the two. The summary says how the peak follows the size."""
    scan: float = SCAN
    """With --longest, draw batches for up to this many seconds from each DataLoader."""

    def limits(self) -> dict[str, Any]:
        """Return what ends a run, by the names of ``RunOptions``."""
        if self.whole and (self.to_end or self.steps is not None):
            raise UsageError(
                "--whole runs the script to its end, but shorter: leave out --steps and --to-end."
            )
        if not self.whole and (self.batches != BATCHES or self.seconds != SECONDS):
            raise UsageError("--batches and --seconds shorten a whole run: add --whole.")
        if not self.longest and self.scan != SCAN:
            raise UsageError("--scan is the time in which --longest looks through batches: add --longest.")
        by_default = LONGEST_STEPS if self.longest else STEPS
        steps = by_default if self.steps is None else self.steps
        return {
            "steps": None if self.to_end or self.whole else steps,
            "batches": self.batches if self.whole else None,
            "seconds": self.seconds if self.whole else None,
            "scan": self.scan if self.longest else None,
        }

    def resuming(self) -> list[str] | None:
        """Return the further arguments of a second run; None if there is to be none."""
        try:
            return None if self.resume_with is None else shlex.split(self.resume_with)
        except ValueError as error:
            raise UsageError(f"--resume-with {self.resume_with!r}: {error}.") from None


def dry_run(
    *command: Script,
    module: Module = False,
    target: TargetGpu = TargetGpu(),
    ranks: RankOfJob = RankOfJob(),
    all_ranks: Annotated[bool, Parameter(group=TARGET)] = False,
    length: RunLength = RunLength(),
    output: Output = None,
    json: Json = None,
    html: Html = None,
    fail: Fail = False,
    advise: bool = False,
    plan: Path | None = None,
    values: Annotated[tuple[str, ...], Parameter(group=GHOST)] = (),
    fill_host_memory: Annotated[bool, Parameter(group=GHOST)] = False,
    no_weights: Annotated[bool, Parameter(group=GHOST)] = False,
    workspaces: Annotated[Literal["cudnn", "rules", "none"], Parameter(group=GHOST)] = "cudnn",
    labels: Labels = True,
    notes: Notes = False,
) -> int:
    """Run a script without a GPU and report the GPU memory it would use.

    The script runs unmodified, as python would run it, on the ghost: memfit's stand-in for the CUDA runtime.
    PyTorch's allocator works as usual, but no GPU value is computed. The script still writes its output
    files. memfit stops it after a few training steps.

    A launcher may precede the script, as in memfit dry-run torchrun train.py or memfit dry-run accelerate
    launch train.py. memfit then runs the script directly, without the launcher. If the launcher would start
    several processes, memfit runs one of them, as with --nproc and --nnodes.

    torchrun may also start memfit, as in torchrun --nproc-per-node 2 -m memfit dry-run train.py. Each rank
    then runs on a ghost of its own and meets the others, and the first rank of each machine reports on the
    ranks of that machine, as with --all-ranks.

    memfit's own options come before the script's name. If one comes after it, memfit stops with an error,
    because the option was probably misplaced. If the script has an option of the same name, write -- before
    the script, as in memfit dry-run -- train.py --steps 100.

    Args:
        all_ranks: Run every process whose memory may differ, one after the other, and list what each holds.
            The rest of the result is of the one that needs most. Of many machines, memfit runs the first and
            the last, and others only as far as those two differ.
        output: Save the trace to this file, for example run.memfit. A trace holds every allocation of the
            run; memfit explain, diff, replay, allocator and pack read it. With --all-ranks, it is the trace
            of the rank that needs most; a name with {rank}, such as 'run-{rank}.memfit', keeps the trace of
            every rank that ran.
        fail: Exit with code 1 unless the verdict is FITS.
        advise: Find the fewest changes that make the script fit. memfit tries micro-batches, or a smaller
            batch where the script cannot accumulate gradients, the script's own options for checkpointing
            and low precision, allocator settings, and its own strategies. If the script fits already, memfit
            looks for changes that lower the peak. To try them, it runs the script up to 13 more times,
            without terminal input and with its output hidden. Each of these runs writes the script's output
            files again. It is the quick form of memfit plan, which finds the fastest mix of changes.
        plan: Run the script under the plan in this file, which memfit plan -o wrote: memfit applies it when
            the script creates its optimizer, and sets PYTORCH_ALLOC_CONF if the plan does. Or a file of
            settings, such as fp16 = dict(loss_scale=512.): JSON, TOML, or a config.py of MMEngine, which is
            read and never run.
        values: The values that the script gets when it reads from the GPU. The defaults are
            float=1,int=1,bool=false,all=true,copy=0,count=upper; list only the ones to change. 'all' is the
            result of torch.all and similar checks. 'copy' is the value of every number in a tensor that is
            copied to the CPU. 'count' is the number of elements that torch.nonzero and similar ops find:
            'upper' (as many as possible), a share such as 25%, or an integer. To choose the values for one
            operator or for one source line, use its name or FILE:LINE as the key, for example
            nonzero=25%,roi_heads.py:808=256. May be repeated.
        fill_host_memory: Fill large CPU tensors as usual. By default, memfit leaves them unfilled, so that
            they take no host memory.
        no_weights: When the script calls from_pretrained (transformers), create the model from its
            configuration, without reading or downloading a checkpoint. By default, memfit does so only for
            models whose checkpoint is not on this machine.
        workspaces: How to determine the sizes of cuDNN's workspaces. With 'cudnn', memfit asks the installed
            cuDNN, and uses its own rules where cuDNN reports no size. With 'rules', memfit uses only
            its rules. With 'none', it counts each workspace as 0 bytes.
    """
    from memfit.api.run_as_torchrun_rank import run_as_torchrun_rank
    from memfit.api.run_on_ghost import FinishedRun, run_on_ghost
    from memfit.api.traces import write_html

    limits, resuming = length.limits(), length.resuming()
    outputs = {"-o": output, "--html": html, "--json": json_output_file(json)}
    found = checked_script_keywords("dry-run", command, outputs, module=module, ranks=ranks)
    script, arguments, module = (found.pop(name) for name in ("script", "arguments", "module"))
    if all_ranks and ranks.rank is None:
        found["rank"] = 0
    stands_for = first_rank_to_run(**found, all_ranks=all_ranks)
    beside = rank_started_by_torchrun(os.environ)
    alone = all_ranks or advise or plan is not None or resuming is not None or stands_for != ALONE
    if beside is not None and alone:
        raise UsageError(
            f"torchrun has started memfit as {beside}: leave out --nproc, --nnodes, --rank, --all-ranks, "
            "--advise, --plan and --resume-with, or run memfit without torchrun."
        )
    options = RunOptions(
        module=module,
        **limits,
        **vars(target),
        labels=labels,
        stdout_to_stderr=json == "-",
        rank=beside or stands_for,
        real_ranks=beside is not None,
        values=",".join(values),
        host_memory=not fill_host_memory,
        weights=not no_weights,
        workspaces=workspaces,
    )
    quiet = beside is not None and beside.local > 0
    run: FinishedRun | None
    with nullcontext(lambda _: None) if quiet else show_script_progress(options.steps) as show:
        if beside is not None:
            run = run_as_torchrun_rank(
                script, arguments, options, dict(os.environ), output=output, on_progress=show
            )
        else:
            run = run_on_ghost(
                script,
                arguments,
                options,
                output=output,
                advise=advise,
                all_ranks=all_ranks,
                plan=plan,
                resume_with=resuming,
                on_progress=show,
            )
    if run is None:  # the first rank of this machine reports
        return 0
    page: OutputFile = (html, partial(write_html, run.trace, run.result))
    write_result(run.result, json, page, written_trace_file(output, run), notes=notes)
    failed = beside is not None and not run.result.ranks  # torchrun must end the other ranks
    return exit_code_of_run(run.result, fail=fail or failed)
