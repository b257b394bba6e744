"""``memfit compare``."""

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
    launched_job,
    memory_or_none,
    script_file,
)
from memfit.ctrl_c import INTERRUPTED
from memfit.devices import DEFAULT
from memfit.run.options import STEPS, RunOptions
from memfit.run.rank import Rank

USAGE = (
    "Usage: memfit compare [OPTIONS] SCRIPT.py [ARGS...]\n       memfit compare [OPTIONS] -m MODULE [ARGS...]"
)
_RUNS = (
    "memfit: running the script once for each row, without terminal input and with its output hidden. Each "
    "run writes the script's output files again."
)


def compare(  # noqa: PLR0913 - one parameter an option
    *command: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    module: Annotated[bool, Parameter(name=["-m", "--module"], negative="")] = False,
    gpu: Annotated[str, Parameter(group=TARGET)] = DEFAULT,
    memory: Annotated[str | None, Parameter(group=TARGET)] = None,
    in_use: Annotated[str, Parameter(group=TARGET)] = "0",
    nproc: Annotated[int, Parameter(group=TARGET)] = 1,
    nnodes: Annotated[int, Parameter(group=TARGET)] = 1,
    steps: int = STEPS,
    json: Annotated[str | None, Parameter(group=OUTPUT, allow_leading_hyphen=True)] = None,
    values: Annotated[tuple[str, ...], Parameter(negative="", group=GHOST)] = (),
) -> int:
    """Compare what a script would need with each of memfit's strategies, without a GPU.

    The script runs unmodified on the ghost, once for each row of the table. memfit applies the strategies
    when the script creates its optimizer. With --nproc, the table also has DDP, ZeRO-1 and FSDP2, each with
    and without checkpointing and offload, and shows the rank that needs most. Each rank trains on batches of
    the script's own size. Strategies that do not suit the script have a row with the reason.

    Ctrl-C ends the comparison, and prints the rows found so far.

    Args:
        command: The script and its own arguments.
        module: Run a module, as python -m does.
        gpu: The GPU to assume: a name that memfit gpus lists, or a MIG slice such as A100-80GB:1g.10gb.
        memory: Assume this much GPU memory instead of the GPU's own, for example 12GiB.
        in_use: Assume that the desktop or other jobs already use this much GPU memory, for example 1.5GiB.
        nproc: Compare for this many processes, with a GPU each, as torchrun --nproc-per-node would start
            them.
        nnodes: Assume this many machines, each with --nproc processes.
        steps: Stop each run after this many training steps.
        json: Write the result as JSON to this file. With -, print the JSON instead of the table.
        values: The values that the script gets when it reads from the GPU, as for memfit dry-run. May be
            repeated.
    """
    from memfit import api

    expect_script("compare", command, {"--json": json})
    launched, nproc, nnodes = launched_job(command, nproc, nnodes, module=module)
    check_outputs({"--json": json_file(json)}, script_file(launched.command[0], module=launched.module))
    options = RunOptions(
        module=launched.module,
        steps=steps,
        gpu=gpu,
        memory=memory_or_none(memory),
        rank=Rank(nproc=nproc, nnodes=nnodes),
        in_use=memory_or_none(in_use) or 0,
        values=",".join(values),
    )
    with progress(options.steps, reruns=_RUNS) as show:
        result = api.compare_on_ghost(launched.command[0], launched.command[1:], options, show)
    write_result(result, json)
    return INTERRUPTED if result.interrupted else 0
