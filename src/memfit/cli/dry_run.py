"""``memfit dry-run``."""

import os
import shlex
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from memfit.atomic_files import check_outputs
from memfit.cli.console import Output, exit_code, progress, trace_file, write_result
from memfit.cli.options import (
    GHOST,
    OUTPUT,
    TARGET,
    expect_script,
    json_file,
    launched_job,
    memory_or_none,
    script_file,
)
from memfit.devices import DEFAULT
from memfit.errors import UsageError
from memfit.planning.plan_file import read_plan
from memfit.records import Change
from memfit.run.options import BATCHES, LONGEST_STEPS, SCAN, SECONDS, STEPS, RunOptions
from memfit.run.parent import Progress
from memfit.run.rank import ALONE, Rank
from memfit.run.started_by_torchrun import started_rank

USAGE = (
    "Usage: memfit dry-run [OPTIONS] SCRIPT.py [ARGS...]\n       memfit dry-run [OPTIONS] -m MODULE [ARGS...]"
)


def dry_run(  # noqa: PLR0913 - one parameter an option
    *command: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    module: Annotated[bool, Parameter(name=["-m", "--module"], negative="")] = False,
    gpu: Annotated[str, Parameter(group=TARGET)] = DEFAULT,
    memory: Annotated[str | None, Parameter(group=TARGET)] = None,
    in_use: Annotated[str, Parameter(group=TARGET)] = "0",
    nproc: Annotated[int, Parameter(group=TARGET)] = 1,
    nnodes: Annotated[int, Parameter(group=TARGET)] = 1,
    rank: Annotated[int, Parameter(group=TARGET)] = 0,
    all_ranks: Annotated[bool, Parameter(negative="", group=TARGET)] = False,
    steps: int | None = None,
    to_end: Annotated[bool, Parameter(negative="")] = False,
    whole: Annotated[bool, Parameter(negative="")] = False,
    batches: int = BATCHES,
    seconds: float = SECONDS,
    resume_with: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    longest: Annotated[bool, Parameter(negative="")] = False,
    scan: float = SCAN,
    output: Annotated[Path | None, Parameter(name=["-o", "--output"], group=OUTPUT)] = None,
    json: Annotated[str | None, Parameter(group=OUTPUT, allow_leading_hyphen=True)] = None,
    html: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    fail: Annotated[bool, Parameter(negative="", group=OUTPUT)] = False,
    advise: Annotated[bool, Parameter(negative="")] = False,
    plan: Annotated[Path | None, Parameter()] = None,
    values: Annotated[tuple[str, ...], Parameter(negative="", group=GHOST)] = (),
    fill_host_memory: Annotated[bool, Parameter(negative="", group=GHOST)] = False,
    no_weights: Annotated[bool, Parameter(negative="", group=GHOST)] = False,
    workspaces: Annotated[Literal["cudnn", "rules", "none"], Parameter(group=GHOST)] = "cudnn",
    labels: Annotated[bool, Parameter(group=OUTPUT)] = True,
    notes: Annotated[bool, Parameter(negative="", group=OUTPUT)] = False,
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
        command: The script and its own arguments.
        module: Run a module, as python -m does.
        gpu: The GPU to assume: a name that memfit gpus lists, or a MIG slice such as A100-80GB:1g.10gb.
        memory: Assume this much GPU memory instead of the GPU's own, for example 12GiB.
        in_use: Assume that the desktop or other jobs already use this much GPU memory, for example 1.5GiB.
        nproc: Run the script as one of this many processes, with a GPU each, as torchrun --nproc-per-node
            would start them. memfit runs only the one process; the others do not exist.
        nnodes: Assume this many machines, each with --nproc processes.
        rank: Which of the processes to run, counted from 0 over all machines.
        all_ranks: Run every process whose memory may differ, one after the other, and list what each holds.
            The rest of the result is of the one that needs most. Of many machines, memfit runs the first and
            the last, and others only as far as those two differ.
        steps: Stop the script after this many training steps. By default, it is 3, and 4 with --longest.
        to_end: Let the script run to its end instead of stopping it. Each recorded allocation takes host
            memory, so a long run may need a lot of it.
        whole: Let the script run to its end with few batches: training, evaluation, saving, and whatever else
            it does. The summary has a row for each of these stages, and says what was shortened.
        batches: With --whole, end each pass over a DataLoader after this many batches. The loader's length is
            then this number, too.
        seconds: With --whole, stop the script after this time, at the next batch or forward.
        resume_with: With --whole, run the script a second time with these further arguments, such as
            '--resume --epochs 4', so that it resumes from what it has just written. The result is of the run
            that needs most, with the stages of both.
        longest: Find the batch that needs most, where batches differ. When the script first reads a
            DataLoader, memfit draws batches from it and gives the script the largest one first, then one of
            the median size and one between the two. The summary says how the peak follows the size.
        scan: With --longest, draw batches for up to this many seconds from each DataLoader.
        output: Save the trace to this file, for example run.memfit. A trace holds every allocation of the
            run; memfit explain, diff, replay, allocator and pack read it. With --all-ranks, it is the trace
            of the rank that needs most; a name with {rank}, such as 'run-{rank}.memfit', keeps the trace of
            every rank that ran.
        json: Write the result as JSON to this file. With -, print the JSON instead of the summary.
        html: Write an HTML report to this file: a single page that loads no other files.
        fail: Exit with code 1 unless the verdict is FITS.
        advise: Find the fewest changes that make the script fit. memfit tries micro-batches, or a smaller
            batch where the script cannot accumulate gradients, the script's own options for checkpointing
            and low precision, allocator settings, and its own strategies. If the script fits already, memfit
            looks for changes that lower the peak. To try them, it runs the script up to 13 more times,
            without terminal input and with its output hidden. Each of these runs writes the script's output
            files again. It is the quick form of memfit plan, which finds the fastest mix of changes.
        plan: Run the script under the plan in this file, which memfit plan -o wrote: memfit applies it when
            the script creates its optimizer, and sets PYTORCH_ALLOC_CONF if the plan does.
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
        labels: For each allocation, record the module that made it and the phase of the training step. With
            --no-labels, memfit records neither; the byte counts are the same either way.
        notes: List every assumption behind the figures. By default, the summary shows only those that may
            change a figure by more than 1 %, and says how many others there are.
    """
    from memfit import api

    expect_script("dry-run", command, {"--json": json, "-o": output, "--html": html})
    launched, nproc, nnodes = launched_job(command, nproc, nnodes, module=module)
    command, module = launched.command, launched.module
    _expect_one_length(steps, batches, seconds, to_end=to_end, whole=whole, advise=advise)
    _expect_scan(scan, longest=longest)
    if resume_with is not None and not whole:
        raise UsageError("--resume-with runs a whole script twice: add --whole.")
    if all_ranks and rank:
        raise UsageError("--rank is one rank, and --all-ranks is all of them: give one of the two.")
    stands_for = Rank(rank=rank, nproc=nproc, nnodes=nnodes)
    beside = started_rank(os.environ)
    alone = all_ranks or advise or plan is not None or resume_with is not None or stands_for != ALONE
    if beside is not None and alone:
        raise UsageError(
            f"torchrun has started memfit as {beside}: leave out --nproc, --nnodes, --rank, --all-ranks, "
            "--advise, --plan and --resume-with, or run memfit without torchrun."
        )
    check_outputs(
        {"-o": output, "--html": html, "--json": json_file(json)}, script_file(command[0], module=module)
    )
    options = RunOptions(
        module=module,
        steps=None if to_end or whole else _or_default(steps, longest=longest),
        batches=batches if whole else None,
        seconds=seconds if whole else None,
        scan=scan if longest else None,
        labels=labels,
        stdout_to_stderr=json == "-",
        gpu=gpu,
        memory=memory_or_none(memory),
        rank=beside or stands_for,
        real_ranks=beside is not None,
        in_use=memory_or_none(in_use) or 0,
        values=",".join(values),
        host_memory=not fill_host_memory,
        weights=not no_weights,
        workspaces=workspaces,
    )
    change = Change()
    if plan is not None:
        planned = read_plan(plan)
        change = planned.change
        if planned.is_sharded:
            if stands_for.world_size == 1:
                raise UsageError(
                    f"{plan} shards the model over {planned.world_size} GPUs. Say how many there are, as in "
                    f"memfit dry-run --nproc {planned.nproc}"
                    f"{f' --nnodes {planned.nnodes}' * (planned.nnodes > 1)} --all-ranks --plan {plan}."
                )
            options = replace(options, rank=replace(stands_for, own_gpu_only=True))
        if change.allocator:
            os.environ["PYTORCH_ALLOC_CONF"] = change.allocator
    quiet = beside is not None and beside.local > 0
    run: api.FinishedRun | None
    with nullcontext(_show_nothing) if quiet else progress(options.steps) as show:
        if beside is not None:
            run = api.run_beside_ranks(
                command[0], command[1:], options, dict(os.environ), output=output, on_progress=show
            )
        else:
            one = partial(
                api.run_on_ghost,
                command[0],
                options=options,
                advise=advise,
                all_ranks=all_ranks,
                change=change,
                on_progress=show,
            )
            resuming = None if resume_with is None else _words(resume_with)
            run = api.run_and_resume(one, command[1:], resuming, output)
    if run is None:  # the first rank of this machine reports
        return 0
    page: Output = (html, partial(api.write_html, run.trace, run.result))
    write_result(run.result, json, page, trace_file(output, run), notes=notes)
    failed = beside is not None and not run.result.ranks  # torchrun must end the other ranks
    return exit_code(run.result, fail=fail or failed)


def _or_default(steps: int | None, *, longest: bool) -> int:
    """Return after how many training steps the script is stopped."""
    if steps is not None:
        return steps
    return LONGEST_STEPS if longest else STEPS


def _words(arguments: str) -> list[str]:
    """Split arguments as a shell does.

    Raises:
        UsageError: a quotation has no end.
    """
    try:
        return shlex.split(arguments)
    except ValueError as error:
        raise UsageError(f"--resume-with {arguments!r}: {error}.") from None


def _expect_one_length(
    steps: int | None, batches: int, seconds: float, *, to_end: bool, whole: bool, advise: bool
) -> None:
    """Check that the options which say how long the script runs do not contradict each other.

    Raises:
        UsageError: they do.
    """
    if whole and (to_end or steps is not None):
        raise UsageError("--whole runs the script to its end, but shorter: leave out --steps and --to-end.")
    if whole and advise:
        raise UsageError(
            "--advise lowers the peak of training steps. Run --whole first, which names the stage that needs "
            "most, and then --advise without --whole."
        )
    if not whole and (batches != BATCHES or seconds != SECONDS):
        raise UsageError("--batches and --seconds shorten a whole run: add --whole.")
    if batches < 1 or not seconds > 0:
        raise UsageError("--batches must be at least 1, and --seconds more than 0.")


def _expect_scan(scan: float, *, longest: bool) -> None:
    """Check the time for which memfit looks through batches.

    Raises:
        UsageError: it is not positive, or --longest is missing.
    """
    if not longest and scan != SCAN:
        raise UsageError("--scan is the time in which --longest looks through batches: add --longest.")
    if not scan > 0:
        raise UsageError("--scan must be more than 0.")


def _show_nothing(_: Progress) -> None:
    """Show no progress."""
