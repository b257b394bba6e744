"""``memfit check``."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from memfit.atomic_files import check_outputs
from memfit.cli.console import progress, write_result
from memfit.cli.options import (
    GHOST,
    OUTPUT,
    TARGET,
    expect_script,
    json_file,
    memory_or_none,
    script_file,
    share,
)
from memfit.devices import DEFAULT
from memfit.report.escape import escaped
from memfit.run.options import STEPS, RunOptions

USAGE = "Usage: memfit check [OPTIONS] SCRIPT.py [ARGS...]\n       memfit check [OPTIONS] -m MODULE [ARGS...]"


def check(  # noqa: PLR0913 - one parameter an option
    *command: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    module: Annotated[bool, Parameter(name=["-m", "--module"], negative="")] = False,
    baseline: Path = Path("memfit-baseline.json"),
    update: Annotated[bool, Parameter(negative="")] = False,
    tolerance: str = "1%",
    budget: Annotated[str | None, Parameter(group=TARGET)] = None,
    gpu: Annotated[str, Parameter(group=TARGET)] = DEFAULT,
    in_use: Annotated[str, Parameter(group=TARGET)] = "0",
    steps: int = STEPS,
    json: Annotated[str | None, Parameter(group=OUTPUT, allow_leading_hyphen=True)] = None,
    values: Annotated[tuple[str, ...], Parameter(negative="", group=GHOST)] = (),
) -> int:
    """Compare the memory that a script would use with a baseline, and fail if it grew.

    memfit runs the unmodified script on the ghost, as memfit dry-run does. The exit code is 1 if the script
    does not fit, or if something grew by more than the tolerance: a peak (allocated, reserved, process), a
    term of it (parameters, activations, ...), or what a module holds of a term. Each is compared with itself,
    so a layer that became 2 % wider is found in a model of any size. Terms and modules count only if the peak
    of allocated memory grew, too. If something fell by more than the tolerance and nothing grew, memfit
    reports it, and the exit code is 0.

    Args:
        command: The script and its own arguments.
        module: Run a module, as python -m does.
        baseline: The file of the baseline, to be committed with the code.
        update: Write this run to the file of the baseline. Nothing is written if the script does not fit.
        tolerance: By how much each figure may grow, for example 0.5%. With 0%, not by a byte.
        budget: How much GPU memory the script may use, for example 8GiB. It includes the CUDA context, as
            with memfit dry-run --memory. By default, the memory of the GPU.
        gpu: The GPU to assume: a name that memfit gpus lists, or a MIG slice such as A100-80GB:1g.10gb.
        in_use: Assume that the desktop or other jobs already use this much GPU memory, for example 1.5GiB.
        steps: Stop the script after this many training steps.
        json: Write the result as JSON to this file. With -, print the JSON instead of the tables.
        values: The values that the script gets when it reads from the GPU, as for memfit dry-run. May be
            repeated.
    """
    from memfit import api

    expect_script("check", command, {"--json": json, "--baseline": baseline})
    outputs = {"--json": json_file(json), "--baseline": baseline if update else None}
    check_outputs(outputs, script_file(command[0], module=module))
    options = RunOptions(
        module=module,
        steps=steps,
        stdout_to_stderr=json == "-",
        gpu=gpu,
        memory=memory_or_none(budget),
        in_use=memory_or_none(in_use) or 0,
        values=",".join(values),
    )
    with progress(options.steps) as show:
        result = api.check_on_ghost(
            command[0],
            command[1:],
            options,
            baseline=baseline,
            update=update,
            tolerance=share("--tolerance", tolerance),
            on_progress=show,
        )
    write_result(result, json)
    if update and result.fits:
        print(escaped(f"Baseline: {baseline}"), file=sys.stderr)
        return 0
    return 0 if result.passed else 1
