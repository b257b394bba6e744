"""``memfit record``."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from memfit.atomic_files import check_outputs
from memfit.cli.console import exit_code, progress, trace_file, write_result
from memfit.cli.options import OUTPUT, expect_script, json_file, script_file
from memfit.errors import UsageError
from memfit.run.options import STEPS, RunOptions

USAGE = (
    "Usage: memfit record [OPTIONS] SCRIPT.py [ARGS...]\n       memfit record [OPTIONS] -m MODULE [ARGS...]"
)


def record(  # noqa: PLR0913 - one parameter an option
    *command: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    module: Annotated[bool, Parameter(name=["-m", "--module"], negative="")] = False,
    steps: int = STEPS,
    to_end: Annotated[bool, Parameter(negative="")] = False,
    output: Annotated[Path | None, Parameter(name=["-o", "--output"], group=OUTPUT)] = None,
    json: Annotated[str | None, Parameter(group=OUTPUT, allow_leading_hyphen=True)] = None,
    fail: Annotated[bool, Parameter(negative="", group=OUTPUT)] = False,
    labels: Annotated[bool, Parameter(group=OUTPUT)] = True,
    notes: Annotated[bool, Parameter(negative="", group=OUTPUT)] = False,
) -> int:
    """Run a script on this machine's GPU and report the GPU memory it used.

    The script actually trains until memfit stops it after a few training steps. memfit records every
    allocation made by PyTorch's allocator, and reads from the driver how much memory the process holds
    outside PyTorch's allocator. It saves the trace, which memfit explain can read on any machine.

    Args:
        command: The script and its own arguments.
        module: Run a module, as python -m does.
        steps: Stop the script after this many training steps.
        to_end: Let the script run to its end instead of stopping it. Each recorded allocation takes host
            memory, so a long run may need a lot of it.
        output: Save the trace to this file. The default is run.memfit. memfit overwrites an existing
            run.memfit only if you name it with this option.
        json: Write the result as JSON to this file. With -, print the JSON instead of the summary.
        fail: Exit with code 1 unless the verdict is FITS.
        labels: For each allocation, record the module that made it and the phase of the training step. With
            --no-labels, memfit records neither; the byte counts are the same either way.
        notes: List every assumption behind the figures. By default, the summary shows only those that may
            change a figure by more than 1 %, and says how many others there are.
    """
    from memfit import api

    expect_script("record", command, {"--json": json, "-o": output})
    trace = Path("run.memfit") if output is None else output
    if output is None and trace.exists():
        raise UsageError(
            f"{trace} already exists. Name another file with -o, or overwrite the existing one with "
            f"-o {trace}."
        )
    check_outputs({"-o": trace, "--json": json_file(json)}, script_file(command[0], module=module))
    options = RunOptions(
        module=module,
        steps=None if to_end else steps,
        labels=labels,
        stdout_to_stderr=json == "-",
    )
    with progress(options.steps) as show:
        run = api.run_on_card(command[0], command[1:], options, output=trace, on_progress=show)
    write_result(run.result, json, trace_file(trace, run), notes=notes)
    return exit_code(run.result, fail=fail)
