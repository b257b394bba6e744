"""Plan for a script or a live model: the fastest way under a budget, found and proven on the ghost."""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.analysis.trial_result import TrialResult, why_run_failed
from memfit.devices import DEFAULT, find_device
from memfit.errors import UsageError
from memfit.ghost.build.torch_install import find_torch
from memfit.planning.find_plan import find_plan
from memfit.planning.plan_search_base import OnFound, OutOfTimeError
from memfit.planning.run_changes_on_ghost import (
    RULE,
    PlannedScript,
    host_copy_time_estimator,
    kernel_time_estimator,
)
from memfit.planning.strategy_and_allocator_changes import LOW_BIT_STATE, PRECISIONS, AllowedChanges
from memfit.records import Change, ScriptEnd, ScriptPlan
from memfit.records.command_as_typed import command_as_typed, is_job_command
from memfit.run.job_rank import Rank
from memfit.run.options import STEPS, RunOptions
from memfit.run.parent import ScriptProgress, checked_script_argv
from memfit.run.resolve_ghost_settings import resolve_ghost_settings
from memfit.strategies.setting_checks import unknown_name_error
from memfit.temporary_folders import TemporaryFolder
from memfit.trials.rank_runs import RankRuns, UnfinishedRankError
from memfit.trials.runs_side_by_side import ProgressOfFirst, RunsAhead
from memfit.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    import torch


def plan(  # noqa: PLR0913 - one parameter an option
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    budget: int | None = None,
    module: bool = False,
    gpu: str = DEFAULT,
    in_use: int = 0,
    nproc: int = 1,
    nnodes: int = 1,
    steps: int = STEPS,
    values: str = "",
    bitwise: bool = False,
    allow: Sequence[str] = (),
    max_slowdown: float | None = None,
    max_time: float | None = None,
    policies: bool = False,
    on_progress: Callable[[ScriptProgress], None] = lambda _: None,
    on_found: OnFound = lambda _: None,
) -> ScriptPlan:
    """Return the fastest plan with which an unmodified script fits a budget; needs no GPU.

    memfit runs the script as written, solves for the activations to recompute and for the micro-batches to
    divide batches into, and runs the script under that plan; it corrects and repeats until the plan fits.
    Training under the plan gives the same results, up to the rounding of sums. The script runs without input
    and with its output hidden, and writes its output files again each time.

    Args:
        script: path of the script, or a module's name with ``module=True``.
        arguments: the script's own arguments.
        budget: bytes of device memory that the script may use, the CUDA context included; by default the
            memory of ``gpu``.
        module: run a module as ``python -m`` does.
        gpu: name of a device in the table (``memfit gpus``); times are estimated for it.
        in_use: bytes of device memory that other processes hold.
        nproc: processes on each machine, with a GPU each: every rank must fit. A script that trains on one
            GPU is sharded if that is needed; the ranks share each of its batches.
        nnodes: machines.
        steps: training steps after which memfit stops each run, at least 2.
        values: what the ghost returns when the script reads a GPU value, see ``RunOptions.values``.
        bitwise: whether results must be the same bit for bit: batches are not divided then.
        allow: other numerics that the plan may use: ``amp`` (bf16 autocast), ``bf16`` (bf16 parameters),
            ``8bit`` (Adam's or AdamW's state in 8 bits, by bitsandbytes).
        max_slowdown: how many times as long as the script as written a step may take, at least 1. If what
            fits is predicted to take longer, nothing is chosen, and ``too_slow`` is the fastest that fits.
        max_time: seconds after which the search ends: the answer is the fastest plan found by then. If none
            fitted, ``out_of_time`` tells that from a search that ended.
        policies: also run three policies that people use: checkpoint every block, every second one, and every
            block with matrix products kept.
        on_progress: called about ten times a second.
        on_found: called with each plan that is faster than those before it, as soon as it is found.

    Raises:
        MemfitError: the script or the device does not exist, this PyTorch or platform is not supported, or
            the script as written cannot be run, or not within ``max_time``.

    >>> found = plan("train.py", ["--batch-size", "8"], budget=8 << 30)  # doctest: +SKIP
    >>> found.chosen.needs.bytes <= 8 << 30, round(found.chosen.time, 2)  # doctest: +SKIP
    (True, 1.07)
    """
    options = RunOptions(
        module=module,
        steps=steps,
        gpu=gpu,
        memory=budget,
        rank=Rank(nproc=nproc, nnodes=nnodes),
        in_use=in_use,
        values=values,
    )
    allowed = parse_allowed_changes(bitwise=bitwise, allow=allow, max_slowdown=max_slowdown)
    command = checked_script_argv(script, arguments, options, None)
    return _plan_for(command, options, on_progress, allowed, policies, max_time, on_found)


def auto_checkpoint(  # noqa: PLR0913 - one parameter an option
    model: "torch.nn.Module",
    inputs: Any,
    budget: int | str,
    *,
    loss: Callable[..., Any] | None = None,
    optimizer: Any = None,
    gpu: str = DEFAULT,
    values: str = "",
    on_progress: Callable[[ScriptProgress], None] = lambda _: None,
) -> ScriptPlan:
    """Checkpoint a live model in place, so that a training step fits a budget at the least time.

    memfit plans as ``memfit.plan`` does, for the training loop of ``memfit.estimate``, and applies the plan;
    ``memfit.revert(model)`` undoes that. It needs no GPU, and runs the model only on the ghost.

    Args:
        model: on the CPU, on ``meta`` or on a GPU; without a plan of its own.
        inputs: example arguments of the model, as for ``memfit.estimate``.
        budget: what the process may use on the GPU, the CUDA context included: bytes, or text such as
            ``"8GiB"``.
        loss: as for ``memfit.estimate``.
        optimizer: as for ``memfit.estimate``; by default one without state (SGD).
        gpu: name of a device in the table (``memfit gpus``); times are estimated for it.
        values: what the ghost returns when the model reads a GPU value, see ``RunOptions.values``.
        on_progress: called about ten times a second.

    Returns:
        The plan that was applied; printing it shows what it needs and costs.

    Raises:
        UsageError: no plan fits; the message says what the smallest needs. The model is unchanged.
        NotSentError: an object that the model refers to cannot be copied; the message names it.
        TargetError: the model, the loss or the optimizer failed on the ghost.

    >>> from torch import nn, ones
    >>> net = nn.Sequential(*(nn.TransformerEncoderLayer(512, 8) for _ in range(6)))
    >>> print(auto_checkpoint(net, ones(512, 64, 512), "4GiB"))  # doctest: +SKIP
    PLAN FOUND   needs 3.95 GiB of 4.00 GiB instead of 8.09 GiB; a step takes 1.14 times as long
    ...
    """
    from torch.optim import SGD

    from memfit.estimating.serialise_training_step import collect_training_step, serialise_training_step
    from memfit.strategies.apply import apply

    amount = parse_bytes(budget) if isinstance(budget, str) else budget
    step = collect_training_step(model, inputs, loss, optimizer or functools.partial(SGD, lr=0.1), STEPS)
    options = RunOptions(module=True, gpu=gpu, memory=amount, values=values)
    with TemporaryFolder() as folder:
        file = Path(folder) / "model.job"
        file.write_bytes(serialise_training_step(step).data)
        command = checked_script_argv("memfit.estimating.training_loop", [str(file)], options, None)
        applicable = AllowedChanges(
            allocator=False, rounding=False, optimizer=False
        )  # what applies to the model alone
        found = _plan_for(command, options, on_progress, applicable)
    found = replace(found, command=(type(model).__name__,), models=())
    if found.chosen is None:
        smallest = format_bytes((found.smallest or found.as_written).needs.bytes)
        needs = f"The smallest needs {smallest}: " if found.floor is None else ""
        raise UsageError(f"budget={budget!r}: no plan fits. {needs}{found.reason}")
    if found.chosen.changes:
        apply(model, found.chosen.change.plan)
    return found


def parse_allowed_changes(
    *, bitwise: bool, allow: Sequence[str] = (), max_slowdown: float | None = None
) -> AllowedChanges:
    """Return what a plan may change, given as for ``plan``."""
    for name in allow:
        if name not in (known := (*PRECISIONS, LOW_BIT_STATE)):
            raise unknown_name_error("other numerics that a plan can use", name, known)
    if allow and bitwise:
        raise UsageError("bitwise keeps every bit, but allow permits other numerics: choose one of the two.")
    allowed = AllowedChanges(
        rounding=not bitwise,
        precisions=tuple(name for name in allow if name in PRECISIONS),
        low_bit_state=LOW_BIT_STATE in allow,
    )
    if max_slowdown is None:
        return allowed
    if not max_slowdown >= 1:  # NaN, too
        raise UsageError(
            f"max_slowdown is {max_slowdown:g}. It says how many times as long as the script as written a "
            "step may take: give a number of at least 1, for example 1.3."
        )
    return replace(allowed, slowdown=max_slowdown)


def _plan_for(
    command: tuple[str, ...],
    options: RunOptions,
    on_progress: Callable[[ScriptProgress], None],
    allowed: AllowedChanges,
    policies: bool = False,
    max_time: float | None = None,
    on_found: OnFound = lambda _: None,
) -> ScriptPlan:
    """Return the fastest plan for a command; ``options.memory`` is the budget, the rest as for ``plan``."""
    if options.rank.world_size > 1 and is_job_command(command):
        raise UsageError(
            f"{command_as_typed(command)[0]}: memfit plans jobs for one GPU. For several, give memfit.Engine "
            "a sharding yourself, or plan for a script."
        )
    device = resolve_ghost_settings(options).device
    card, job = find_device(options.gpu), options.rank
    until = None if max_time is None else time.monotonic() + max_time
    fits: float | None = None

    def show(progress: ScriptProgress) -> None:
        if until is not None and time.monotonic() >= until:
            raise OutOfTimeError
        on_progress(replace(progress, fits=fits))

    def completed(found: ScriptPlan) -> ScriptPlan:
        return replace(
            found,
            nproc=job.nproc,
            nnodes=job.nnodes,
            ran=ranks.count,
            distributed=ranks.distributed,
            device=device,
            command=command,
        )

    def note(found: ScriptPlan) -> None:
        nonlocal fits
        fits = None if found.chosen is None else found.chosen.time
        on_found(completed(found))

    shows = ProgressOfFirst(show)
    with RankRuns(command, options, shows.show) as ranks:
        runs = RunsAhead(functools.partial(_run_ranks, ranks), shows)
        planned = PlannedScript(
            runs.run,
            kernel_time_estimator(card, find_torch().version),
            host_copy_time_estimator(card),
            RULE,
            job.world_size,
            (lambda _: None) if job.world_size > 1 else runs.make,
        )
        left = device.total.bytes - options.in_use
        return completed(find_plan(planned, left, allowed, policies=policies, on_found=note))


def _run_ranks(ranks: RankRuns, change: Change, what: str) -> TrialResult | ScriptEnd:
    """Run a script on the ranks that may need most; the first time as written."""
    try:
        runs = ranks.under(change, what) if ranks.count else ranks.as_written(change, what)
    except UnfinishedRankError as error:
        if error.rank.world_size == 1:
            return error.end
        return ScriptEnd("refused", error.end.exit_code, f"as {error.rank}, {why_run_failed(error.end)}")
    if isinstance(runs, ScriptEnd):
        return runs
    first, *others = (result for run in runs for result in run.results)
    return replace(first, others=tuple(others))
