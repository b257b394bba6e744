"""``memfit gpus``."""

from typing import Annotated

from cyclopts import Parameter

from memfit.atomic_files import check_outputs
from memfit.cli.console import progress, stdout, write_result
from memfit.cli.options import OUTPUT, expect_script, json_file, memory_or_none, script_file
from memfit.errors import UsageError
from memfit.run.options import STEPS, RunOptions

USAGE = (
    "Usage: memfit gpus\n"
    "       memfit gpus --for [OPTIONS] SCRIPT.py [ARGS...]\n"
    "       memfit gpus --for [OPTIONS] -m MODULE [ARGS...]"
)
_RUNS = (
    "memfit: running the script for each kind of GPU and each plan, without terminal input and with its "
    "output hidden. Each run writes the script's output files again."
)


def gpus(
    *command: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    for_script: Annotated[bool, Parameter(name=["--for"], negative="")] = False,
    module: Annotated[bool, Parameter(name=["-m", "--module"], negative="")] = False,
    in_use: str = "0",
    bitwise: Annotated[bool, Parameter(negative="")] = False,
    steps: int = STEPS,
    json: Annotated[str | None, Parameter(group=OUTPUT, allow_leading_hyphen=True)] = None,
    values: Annotated[tuple[str, ...], Parameter(negative="")] = (),
) -> int:
    """List the GPUs that --gpu accepts; with --for, which of them run a script, as written or with a plan.

    Args:
        command: The script and its own arguments.
        for_script: Find out which GPUs run the script that follows. memfit runs it on the ghost, once for
            each compute capability, and looks for a plan, as memfit plan does, where it does not fit.
        module: Run a module, as python -m does.
        in_use: Assume that the desktop or other jobs already use this much GPU memory, for example 1.5GiB.
        bitwise: Find plans whose results are the same bit for bit.
        steps: Stop each run after this many training steps, at least 2.
        json: Write the result as JSON to this file. With -, print the JSON instead of the table.
        values: The values that the script gets when it reads from the GPU, as for memfit dry-run. May be
            repeated.
    """
    if not for_script:
        return _list(command)
    from memfit import api

    expect_script("gpus --for", command, {"--json": json})
    check_outputs({"--json": json_file(json)}, script_file(command[0], module=module))
    options = RunOptions(
        module=module, steps=steps, in_use=memory_or_none(in_use) or 0, values=",".join(values)
    )
    allowed = api.allowed_changes(bitwise=bitwise)
    with progress(options.steps, reruns=_RUNS) as show:
        result = api.gpus_on_ghost(command[0], command[1:], options, allowed, show)
    write_result(result, json)
    return 0


def _list(command: tuple[str, ...]) -> int:
    from memfit.devices import all_devices
    from memfit.report.terminal.devices import print_devices

    if command:
        raise UsageError(f"memfit gpus takes no script. Did you mean memfit gpus --for {' '.join(command)}?")
    with stdout() as console:
        print_devices(all_devices(), console)
    return 0
