"""``memfit check``."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

import memfit
from memfit.cli.command_output import show_script_progress, write_result
from memfit.cli.options import (
    Json,
    MemoryBudget,
    Module,
    Script,
    Values,
    checked_script_keywords,
    json_output_file,
    option_read_by,
    parse_tolerance,
)
from memfit.report.escape_control_characters import escaped
from memfit.run.options import STEPS


def check(
    *command: Script,
    module: Module = False,
    baseline: Path = Path("memfit-baseline.json"),
    update: bool = False,
    tolerance: Annotated[
        float, option_read_by(parse_tolerance), Parameter(show_default=lambda _: "1%")
    ] = 0.01,
    budget: MemoryBudget = MemoryBudget(),
    steps: int = STEPS,
    json: Json = None,
    values: Values = (),
) -> int:
    """Compare the memory that a script would use with a baseline, and fail if it grew.

    memfit runs the unmodified script on the ghost, as memfit dry-run does. The exit code is 1 if the script
    does not fit, or if something grew by more than the tolerance: a peak (allocated, reserved, process), a
    term of it (parameters, activations, ...), or what a module holds of a term. Each is compared with itself,
    so a layer that became 2 % wider is found in a model of any size. Terms and modules count only if the peak
    of allocated memory grew, too. If something fell by more than the tolerance and nothing grew, memfit
    reports it, and the exit code is 0.

    Args:
        baseline: The file of the baseline, to be committed with the code.
        update: Write this run to the file of the baseline. Nothing is written if the script does not fit.
        tolerance: By how much each figure may grow, for example 0.5%. With 0%, not by a byte.
        steps: Stop the script after this many training steps.
    """
    outputs = {"--json": json_output_file(json), "--baseline": baseline if update else None}
    options = checked_script_keywords(
        "check", command, outputs, module=module, inputs={"--baseline": baseline}
    )
    with show_script_progress(steps) as show:
        result = memfit.check(
            **options,
            **vars(budget),
            baseline=baseline,
            update=update,
            tolerance=tolerance,
            steps=steps,
            values=",".join(values),
            stdout_to_stderr=json == "-",
            on_progress=show,
        )
    write_result(result, json)
    if update and result.fits:
        print(escaped(f"Baseline: {baseline}"), file=sys.stderr)
        return 0
    return 0 if result.passed else 1
