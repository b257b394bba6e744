"""``memfit verify``."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from memfit.atomic_files import check_outputs
from memfit.cli.console import progress, write_result
from memfit.cli.options import OUTPUT, expect_plan, expect_script, json_file, script_file

USAGE = (
    "Usage: memfit verify --plan plan.json SCRIPT.py [ARGS...]\n"
    "       memfit verify --plan plan.json -m MODULE [ARGS...]"
)
_RUNS = (
    "memfit: running the script until its first update, as written and under the plan, without terminal "
    "input and with its output hidden."
)


def verify(
    *command: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    plan: Path | None = None,
    module: Annotated[bool, Parameter(name=["-m", "--module"], negative="")] = False,
    json: Annotated[str | None, Parameter(group=OUTPUT, allow_leading_hyphen=True)] = None,
) -> int:
    """Compare the gradients of a script's first update, under a plan and as written, by real arithmetic.

    memfit runs the unmodified script on this machine's GPU until its first update, as written and under the
    plan. Where there is no GPU, the CPU stands in for it, so that the kernels are the CPU's. Gradients are
    compared before they are clipped: bit for bit, or to the rounding of sums in another order if the plan
    divides batches. If they differ by more, the script runs once more as written, to see whether it computes
    the same twice. On a GPU, three steps under a verified plan follow, and their peak is compared with what
    the plan predicts. The exit code is 1 if the gradients differ, or cannot be compared.

    Args:
        command: The script and its own arguments. They may make the model smaller than in training.
        plan: The file that memfit plan -o wrote.
        module: Run a module, as python -m does.
        json: Write the result as JSON to this file. With -, print the JSON instead of the text.
    """
    from memfit import api
    from memfit.records import VerificationVerdict

    expect_script("verify", command, {"--json": json, "--plan": plan})
    plan = expect_plan("verify", plan)
    check_outputs({"--json": json_file(json)}, script_file(command[0], module=module))
    with progress(None, reruns=_RUNS) as show:
        result = api.verify(command[0], command[1:], plan=plan, module=module, on_progress=show)
    write_result(result, json)
    return 0 if result.verdict is VerificationVerdict.VERIFIED else 1
