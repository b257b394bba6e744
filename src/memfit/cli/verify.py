"""``memfit verify``."""

from pathlib import Path

import memfit
from memfit.cli.command_output import show_script_progress, write_result
from memfit.cli.options import Json, Module, Script, checked_script_keywords, json_output_file, require_plan

_RUNS = (
    "memfit: running the script until its first update, as written and under the plan, without terminal "
    "input and with its output hidden."
)


def verify(
    *command: Script,
    plan: Path | None = None,
    module: Module = False,
    json: Json = None,
) -> int:
    """Compare the gradients of a script's first update, under a plan and as written, by real arithmetic.

    memfit runs the unmodified script on this machine's GPU until its first update, as written and under the
    plan. Where there is no GPU, the CPU stands in for it, so that the kernels are the CPU's. Gradients are
    compared before they are clipped: bit for bit, or to the rounding of sums in another order if the plan
    divides batches. If they differ by more, the script runs once more as written, to see whether it computes
    the same twice. On a GPU, three steps under a verified plan follow, and their peak is compared with what
    the plan predicts. The exit code is 1 if the gradients differ, or cannot be compared. The script's own
    arguments may make the model smaller than in training.

    Args:
        plan: The file that memfit plan -o wrote; or a file of settings, such as fp16 = dict(loss_scale=512.):
            JSON, TOML, or a config.py of MMEngine, which is read and never run.
    """
    from memfit.records import VerificationVerdict

    outputs = {"--json": json_output_file(json)}
    options = checked_script_keywords("verify", command, outputs, module=module, inputs={"--plan": plan})
    with show_script_progress(None, reruns=_RUNS) as show:
        result = memfit.verify(**options, plan=require_plan("verify", plan), on_progress=show)
    write_result(result, json)
    return 0 if result.verdict is VerificationVerdict.VERIFIED else 1
