"""Run a script or a live model: ``dry_run``, ``record`` and ``estimate``."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.analysis.needed_memory import (
    memory_needed_without_convolution_workspaces,
    process_bytes_on_smallest_gpu,
)
from memfit.api.run_on_ghost import FinishedRun, run_on_ghost
from memfit.api.traces import summarize, write_html
from memfit.card.detect_card import detect_card
from memfit.devices import DEFAULT, NO_LIMIT
from memfit.errors import TargetError
from memfit.records import DeviceUse, DryRun, Note, Provenance
from memfit.report.estimate_result import Estimate
from memfit.run.job_rank import first_rank_to_run
from memfit.run.options import BATCHES, LONGEST_STEPS, SCAN, SECONDS, STEPS, RunOptions
from memfit.run.parent import ScriptProgress, checked_script_argv, run_script
from memfit.run.resolve_ghost_settings import resolve_ghost_settings
from memfit.temporary_folders import TemporaryFolder

if TYPE_CHECKING:
    import torch

_LOSS_CALL = (
    "memfit called the loss as loss(model, inputs); such a loss must run the forward itself. To use a loss "
    "of (output, target), pass a criterion module: loss=nn.MSELoss(), inputs=(x, target)."
)


def dry_run(  # noqa: PLR0913 - one parameter an option
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    module: bool = False,
    gpu: str = DEFAULT,
    memory: int | None = None,
    in_use: int = 0,
    nproc: int = 1,
    nnodes: int = 1,
    rank: int = 0,
    all_ranks: bool = False,
    steps: int | None = STEPS,
    whole: bool = False,
    batches: int | None = None,
    seconds: float | None = None,
    resume_with: Sequence[str] | None = None,
    longest: bool = False,
    scan: float | None = None,
    values: str = "",
    host_memory: bool = True,
    weights: bool = True,
    workspaces: str = "cudnn",
    labels: bool = True,
    output: Path | None = None,
    html: Path | None = None,
    advise: bool = False,
    plan: str | Path | None = None,
    stdout_to_stderr: bool = False,
    on_progress: Callable[[ScriptProgress], None] = lambda _: None,
) -> DryRun:
    """Run an unmodified script on the ghost, and return the GPU memory it would use.

    A script that runs out of memory is run once more with unlimited memory, without input and with its output
    hidden, to find what it needs in total (``needs``).

    Args:
        script: path of the script, or a module's name with ``module=True``.
        arguments: the script's own arguments.
        module: run a module as ``python -m`` does.
        gpu: name of a device in the table (``memfit gpus``).
        memory: bytes of device memory instead of that device's.
        in_use: bytes of device memory that other processes hold.
        nproc: processes on each machine, with a GPU each; memfit runs the one that ``rank`` names.
        nnodes: machines.
        rank: the process to run, counted from 0 over all machines.
        all_ranks: run every rank whose memory may differ, one after the other. The result is of the rank that
            needs most; ``ranks`` has them all.
        steps: training steps after which memfit stops the script; None lets it run to its end.
        whole: let the script run to its end, but shorter: ``steps=None``, with 3 ``batches`` and 120
            ``seconds`` unless given. The result's ``stages`` have what training, evaluation and saving use.
        batches: end each pass over a ``DataLoader`` after so many batches.
        seconds: end the script after this time, where it next asks for a batch or calls a model.
        resume_with: with ``whole``, run the script a second time with these further arguments, to resume from
            what it has just written. The result is of the run that needs most, with the stages of both.
        longest: give the script the largest of the batches that memfit has drawn first, with a ``scan`` of 60
            seconds and 4 ``steps`` unless given. The result's ``longest`` says how the peak follows it.
        scan: draw batches from each ``DataLoader`` for so many seconds before the script reads it.
        values: what the ghost returns when the script reads a GPU value, see ``RunOptions.values``.
        host_memory: skip the filling of large CPU tensors, so that their pages take no host memory.
        weights: load the checkpoints that transformers' ``from_pretrained`` requests. Those missing from this
            machine, and with False all of them, are created from their configuration.
        workspaces: where cuDNN's workspace sizes come from: ``cudnn``, ``rules`` or ``none``.
        labels: record modules and phases; the byte counts are the same either way.
        output: where to save the trace; nowhere by default. In its name, ``{rank}`` stands for the rank: with
            ``all_ranks``, each that runs keeps its trace.
        html: where to write a report for the browser; nowhere by default.
        advise: find what makes the script fit, or, if it fits, what lowers its peak: the quick form of
            ``plan``. memfit runs the script again for each change, without input and with its output hidden,
            up to 13 times; each run writes the script's output files again. The result's ``advice`` lists
            alternatives, the fewest changes first; if the search is interrupted, those found so far.
        plan: run the script under the plan in this file, which ``memfit plan -o`` wrote.
        stdout_to_stderr: send the script's standard output to standard error.
        on_progress: called about ten times a second.

    Returns:
        Verdict, peaks in bytes, and where the peak or the failure was.

    Raises:
        MemfitError: the script or the device does not exist, this PyTorch or platform is not supported, the
            script never used the GPU, or a file cannot be written.

    >>> result = dry_run("train.py", ["--batch-size", "8"], gpu="RTX-3060")  # doctest: +SKIP
    """
    if whole:
        steps = None
        batches = BATCHES if batches is None else batches
        seconds = SECONDS if seconds is None else seconds
    if longest:
        steps = LONGEST_STEPS if steps == STEPS else steps
        scan = SCAN if scan is None else scan
    options = RunOptions(
        module=module,
        steps=steps,
        batches=batches,
        seconds=seconds,
        scan=scan,
        labels=labels,
        stdout_to_stderr=stdout_to_stderr,
        gpu=gpu,
        memory=memory,
        rank=first_rank_to_run(rank=rank, nproc=nproc, nnodes=nnodes, all_ranks=all_ranks),
        in_use=in_use,
        values=values,
        host_memory=host_memory,
        weights=weights,
        workspaces=workspaces,
    )
    run = run_on_ghost(
        script,
        arguments,
        options,
        output=output,
        advise=advise,
        all_ranks=all_ranks,
        plan=None if plan is None else Path(plan),
        resume_with=resume_with,
        on_progress=on_progress,
    )
    if html is not None:
        write_html(run.trace, run.result, html)
    return run.saved()


def record(  # noqa: PLR0913 - one parameter an option
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    module: bool = False,
    steps: int | None = STEPS,
    labels: bool = True,
    output: Path | None = None,
    stdout_to_stderr: bool = False,
    on_progress: Callable[[ScriptProgress], None] = lambda _: None,
) -> DryRun:
    """Run an unmodified script on this machine's GPU, and return the GPU memory it used.

    Args:
        script: path of the script, or a module's name with ``module=True``.
        arguments: the script's own arguments.
        module: run a module as ``python -m`` does.
        steps: training steps after which memfit stops the script; None lets it run to its end. The history
            stays in host memory until then, so pass a number for hours of training.
        labels: record modules and phases; the byte counts are the same either way.
        output: where to save the trace; nowhere by default.
        stdout_to_stderr: send the script's standard output to standard error.
        on_progress: called about ten times a second.

    Returns:
        Verdict, peaks in bytes, and where the peak or the failure was. ``device.machine`` is ``card``, or
        ``rehearsal`` if memfit's ghost stands in for the GPU.

    Raises:
        MemfitError: there is no GPU, the script does not exist, PyTorch keeps no history with the allocator
            in use, the script never used the GPU, or the trace cannot be written.

    >>> result = record("train.py", ["--batch-size", "8"])  # doctest: +SKIP
    """
    options = RunOptions(module=module, steps=steps, labels=labels, stdout_to_stderr=stdout_to_stderr)
    return run_on_card(script, arguments, options, output=output, on_progress=on_progress).saved()


def run_on_card(
    script: str | Path,
    arguments: Sequence[str],
    options: RunOptions,
    *,
    output: Path | None,
    on_progress: Callable[[ScriptProgress], None],
) -> FinishedRun:
    """Do what ``record`` does, and return a result whose trace may not have been saved."""
    command = checked_script_argv(script, arguments, options, output)
    detect_card(f"record {command[0]}")
    recorded = run_script(command, options, None, output, on_progress, None)
    return FinishedRun(recorded.trace, summarize(recorded.trace), recorded.unsaved)


def estimate(  # noqa: PLR0913 - one parameter an option
    model: "torch.nn.Module",
    inputs: Any,
    *,
    loss: Callable[..., Any] | None = None,
    optimizer: Any = None,
    gpu: str = DEFAULT,
    memory: int | None = None,
    in_use: int = 0,
    steps: int = STEPS,
    values: str = "",
) -> Estimate:
    """Return the GPU memory that a live model would use. It needs no GPU, and works in a notebook.

    memfit sends a copy of the model, without the values of its weights, to a process on the ghost. There it
    runs the loop of PyTorch's tutorials (``estimating/training_loop.py``): ``zero_grad``, forward, loss,
    backward, step, with the inputs moved to the GPU in each step. The arguments are not changed. The model
    runs in its current mode (``train()``, ``eval()``) under this process's PyTorch settings. Use autocast
    inside ``loss``: without a GPU, PyTorch disables it around this call. Existing gradients and optimizer
    state are not copied; the estimate starts fresh.

    With an optimizer, the estimate is of training; with only a loss, of forward and backward; with neither,
    of inference: the forward under ``torch.no_grad()``.

    Args:
        model: on the CPU, on ``meta`` or on a GPU; the estimate puts its parameters and buffers on the GPU.
        inputs: example arguments of the model. Only shapes and types matter. A tuple holds positional
            arguments, a mapping keyword arguments, ``(tuple, mapping)`` both; anything else is the only
            argument.
        loss: ``loss(model, inputs)`` runs the forward itself and returns the loss. For a criterion
            (``nn.CrossEntropyLoss()``), ``inputs`` is ``(arguments of the model, target)``. Without a loss,
            memfit uses the ``loss`` in the model's output, or the sum of the output.
        optimizer: an optimizer of the model's parameters, recreated from its class and settings; or a class
            or function that creates one from parameters. Its ``step`` must not need a closure, as LBFGS does.
        gpu: name of a device in the table (``memfit gpus``).
        memory: bytes of device memory instead of that device's.
        in_use: bytes of device memory that other processes hold.
        steps: training steps, or forward passes.
        values: what the ghost returns when code reads a GPU value, see ``RunOptions.values``.

    Returns:
        ``total``, ``fits()``, ``breakdown``, and the whole dry run as ``run``. Printing it shows the summary.

    Raises:
        NotSentError: an object that the model refers to cannot be copied; the message names it.
        TargetError: the model, the loss or the optimizer failed on the ghost.
        UsageError: the device does not exist, an option is out of range, or the optimizer belongs to another
            model.

    >>> from torch import nn, ones, optim
    >>> net = nn.Linear(1024, 1024)
    >>> answer = estimate(net, ones(8, 1024), optimizer=optim.AdamW(net.parameters()))  # doctest: +SKIP
    >>> answer.fits(), answer.breakdown["parameters"].bytes  # doctest: +SKIP
    (True, 4198400)
    """
    from memfit.estimating.serialise_training_step import collect_training_step, serialise_training_step

    serialised = serialise_training_step(collect_training_step(model, inputs, loss, optimizer, steps))

    def run(gpu: str, memory: int | None, beyond: DeviceUse | None = None) -> DryRun:
        """Run the step on a GPU, None for its own memory; or find what it needs of the GPU ``beyond``."""
        options = RunOptions(
            module=True,
            steps=steps,
            gpu=gpu,
            memory=memory,
            unlimited=beyond is not None,
            in_use=in_use,
            values=values,
        )
        with TemporaryFolder() as folder:
            file = Path(folder) / "model.job"
            file.write_bytes(serialised.data)
            command = checked_script_argv("memfit.estimating.training_loop", [str(file)], options, None)
            trace = run_script(command, options, resolve_ghost_settings(options), None, lambda _: None).trace
        found = summarize(trace)
        if found.end.reason == "interrupted":
            raise KeyboardInterrupt
        if found.end.reason == "exception":
            raise TargetError(_failure_of_model(found, calls_loss=serialised.calls_loss))
        if beyond is not None:
            total = beyond.total.bytes
            needs = process_bytes_on_smallest_gpu(trace, found, beyond, fails_at=total)
            least = memory_needed_without_convolution_workspaces(trace, found, beyond, needs, total)
            found = dataclasses.replace(found, needs=needs, needs_without_workspaces=least)
        notes = tuple(Note(Provenance.ASSUMED, text, sizes=True) for text in serialised.notes)
        return dataclasses.replace(found, command=(serialised.name,), notes=(*notes, *found.notes))

    first = unlimited = run(gpu, memory)
    if first.verdict not in ("fits", "tight"):  # its total takes one more run, with unlimited memory
        unlimited = run(gpu, NO_LIMIT, first.device)
    return Estimate(first, unlimited, run)


def _failure_of_model(result: DryRun, *, calls_loss: bool) -> str:
    """Return how a model failed on the ghost; ``calls_loss``: memfit called its loss."""
    gaps = " ".join(note.text for note in result.notes if note.sizes)
    where = f" ({result.end.where})" if result.end.where else ""
    called = f" {_LOSS_CALL}" * calls_loss
    return f"The model failed on the ghost{where}: {result.end.exception}.{called} {gaps}".rstrip()
