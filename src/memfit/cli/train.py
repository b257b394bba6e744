"""``memfit train``."""

import os
import sys
from pathlib import Path

from memfit.cli.options import Module, Script, require_plan, require_script
from memfit.errors import UsageError
from memfit.records.command_as_typed import is_job_command


def train(
    *command: Script,
    plan: Path | None = None,
    module: Module = False,
    prediction: Path | None = None,
    as_far_as_it_goes: bool = False,
) -> int:
    """Train an unmodified script under a plan.

    memfit applies the plan when the script creates its optimizer, and sets PYTORCH_ALLOC_CONF if the plan
    does. If a part of the plan cannot be applied, memfit ends the script before its first step, and says what
    to write: micro-batches in its loop take a change of the script; the model may be another than the plan
    was made for. Under torchrun, a script for one GPU trains as ranks that share each of its batches: as one
    process would, but for rounding and dropout. memfit compares the measured peak with the one that the plan
    predicts. If memory runs out, memfit writes a post-mortem. Apart from that, the script runs as under
    python: to its end, with its own output and exit code. A script that ends without the plan has the exit
    code 3.

    Args:
        plan: The file that memfit plan -o wrote; or a file of settings, such as fp16 = dict(loss_scale=512.):
            JSON, TOML, or a config.py of MMEngine, which is read and never run.
        as_far_as_it_goes: Train even if a part of the plan cannot be applied. memfit says at the end what was
            left out.
        prediction: The trace that memfit dry-run --plan plan.json -o FILE wrote, to compare each step with.
    """
    from memfit.python_command import command_running_module
    from memfit.run.options import RunOptions
    from memfit.run.parent import checked_script_argv
    from memfit.script_training.training_process import TrainSettings
    from memfit.strategies.read_plan_or_settings import read_plan_or_settings
    from memfit.trace.trace_file import read_trace

    require_script("train", command, {"--plan": plan, "--prediction": prediction})
    plan = require_plan("train", plan)
    if module and is_job_command(command):
        raise UsageError(
            "memfit train trains scripts. Train a job in a script of your own: "
            f'engine = memfit.Engine(make_job(), "{plan}"), and engine.fit(loader).'
        )
    sharded = read_plan_or_settings(plan).is_sharded
    if prediction is not None:
        read_trace(prediction)
    target = checked_script_argv(command[0], command[1:], RunOptions(module=module), None)
    settings = TrainSettings(
        str(plan), module, "" if prediction is None else str(prediction), as_far_as_it_goes
    )
    process = command_running_module("memfit.script_training.training_process")
    if sharded:  # every rank goes through a set in the same order
        os.environ.setdefault("PYTHONHASHSEED", "0")
    # In place of this process: signals, the exit code and torchrun's bookkeeping are the script's.
    os.execv(sys.executable, [*process, settings.to_json(), *target])  # noqa: S606
