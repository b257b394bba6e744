"""Plan for a script: the fastest way under a budget, found and proven on the ghost."""

from collections.abc import Callable, Sequence
from pathlib import Path

from memfit.devices import DEFAULT, NO_LIMIT, find_device
from memfit.planning.search import find_plan
from memfit.planning.seconds import RULE, roofline
from memfit.records import ScriptPlan
from memfit.report.terminal.script_plan import PrintableScriptPlan
from memfit.run.options import STEPS, RunOptions
from memfit.run.parent import Progress, script_command
from memfit.run.resolve_options import ghost_settings
from memfit.strategies.trial_run import trial_runner


def plan(  # noqa: PLR0913 - one parameter an option
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    budget: int | None = None,
    module: bool = False,
    gpu: str = DEFAULT,
    in_use: int = 0,
    steps: int = STEPS,
    values: str = "",
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> ScriptPlan:
    """Return the fastest plan with which an unmodified script fits a budget; needs no GPU.

    memfit runs the script as written, solves for the activations to recompute, and runs the script under that
    plan; it corrects and repeats until the plan fits. Training under the plan gives the same results, bit for
    bit. The script runs without input and with its output hidden, and writes its output files again each
    time.

    Args:
        script: path of the script, or a module's name with ``module=True``.
        arguments: the script's own arguments.
        budget: bytes of device memory that the script may use, the CUDA context included; by default the
            memory of ``gpu``.
        module: run a module as ``python -m`` does.
        gpu: name of a device in the table (``memfit gpus``); times are estimated for it.
        in_use: bytes of device memory that other processes hold.
        steps: training steps after which memfit stops each run, at least 2.
        values: what the ghost returns when the script reads a GPU value, see ``RunOptions.values``.
        on_progress: called about ten times a second.

    Raises:
        MemfitError: the script or the device does not exist, this PyTorch or platform is not supported, or
            the script as written cannot be run.

    >>> found = plan("train.py", ["--batch-size", "8"], budget=8 << 30)  # doctest: +SKIP
    >>> found.chosen.needs.bytes <= 8 << 30, round(found.chosen.time, 2)  # doctest: +SKIP
    (True, 1.07)
    """
    options = RunOptions(module=module, steps=steps, gpu=gpu, memory=budget, in_use=in_use, values=values)
    return plan_on_ghost(script, arguments, options, on_progress)


def plan_on_ghost(
    script: str | Path,
    arguments: Sequence[str],
    options: RunOptions,
    on_progress: Callable[[Progress], None],
) -> ScriptPlan:
    """Do what ``plan`` does; ``options.memory`` is the budget."""
    command = script_command(script, arguments, options, None)
    device = ghost_settings(options).device
    shown = device.total.bytes
    unlimited = RunOptions(
        module=options.module,
        steps=options.steps,
        gpu=options.gpu,
        memory=NO_LIMIT,
        in_use=options.in_use,
        values=options.values,
    )
    run = trial_runner(command, unlimited, shown, on_progress)
    found = find_plan(run, shown - options.in_use, roofline(find_device(options.gpu)), RULE)
    return PrintableScriptPlan.of(found, device=device, command=command)
