"""The largest batch size with which a script fits, by whole runs on the ghost."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from memfit.devices import DEFAULT
from memfit.errors import UsageError
from memfit.planning.max_batch import MaxBatchScript, find_max_batch
from memfit.records import MaxBatch
from memfit.run.job_rank import Rank
from memfit.run.options import STEPS, RunOptions
from memfit.run.parent import ScriptProgress, checked_script_argv
from memfit.run.resolve_ghost_settings import resolve_ghost_settings
from memfit.trials.trial_run import trial_runner


def max_batch(  # noqa: PLR0913 - one parameter an option
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    budget: int | None = None,
    option: str = "",
    multiple: int = 1,
    module: bool = False,
    gpu: str = DEFAULT,
    in_use: int = 0,
    nproc: int = 1,
    nnodes: int = 1,
    rank: int = 0,
    steps: int | None = STEPS,
    values: str = "",
    on_progress: Callable[[ScriptProgress], None] = lambda _: None,
) -> MaxBatch:
    """Return the largest batch size with which an unmodified script fits a budget; needs no GPU.

    memfit runs the script with one batch size after another, without input and with its output hidden, until
    it fits with one and runs out of memory with the next. Each run writes the script's output files again.

    Args:
        script: path of the script, or a module's name with ``module=True``.
        arguments: the script's own arguments.
        budget: bytes of device memory that the script may use, the CUDA context included; by default the
            memory of ``gpu``.
        option: the script's option that sets the batch size, as it is written (``"--samples"``; a name that
            ends in ``=`` is one word with its value). By default, memfit recognises usual names, and
            otherwise changes the script's ``DataLoader``.
        multiple: look for multiples of it only.
        module: run a module as ``python -m`` does.
        gpu: name of a device in the table (``memfit gpus``).
        in_use: bytes of device memory that other processes hold.
        nproc: processes on each machine, with a GPU each; memfit runs the one that ``rank`` names.
        nnodes: machines.
        rank: the process to run, counted from 0 over all machines.
        steps: training steps after which memfit stops each run; None lets it run to its end.
        values: what the ghost returns when the script reads a GPU value, see ``RunOptions.values``.
        on_progress: called about ten times a second.

    Raises:
        UsageError: memfit does not know what sets the batch size, or an option is out of range.
        MemfitError: the script or the device does not exist, this PyTorch or platform is not supported, or
            the script fails.

    >>> max_batch("train.py", budget=8 << 30).largest  # doctest: +SKIP
    17
    """
    options = RunOptions(
        module=module,
        steps=steps,
        gpu=gpu,
        memory=budget,
        rank=Rank(rank=rank, nproc=nproc, nnodes=nnodes),
        in_use=in_use,
        values=values,
    )
    if multiple < 1:
        raise UsageError(f"multiple must be at least 1, not {multiple}.")
    command = checked_script_argv(script, arguments, options, None)
    device = resolve_ghost_settings(options).device
    limited, unlimited = (
        trial_runner(command, way, on_progress) for way in (options, replace(options, unlimited=True))
    )
    budgeted = MaxBatchScript(limited, unlimited, command[1:], device)
    return replace(find_max_batch(budgeted, multiple=multiple, option=option), command=command)
