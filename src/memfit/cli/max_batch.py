"""``memfit max-batch``."""

from typing import Annotated

from cyclopts import Parameter

from memfit.atomic_files import check_outputs
from memfit.cli.console import progress, write_result
from memfit.cli.options import GHOST, OUTPUT, TARGET, expect_script, json_file, memory_or_none, script_file
from memfit.devices import DEFAULT
from memfit.run.options import STEPS, RunOptions
from memfit.run.rank import Rank

USAGE = (
    "Usage: memfit max-batch [OPTIONS] SCRIPT.py [ARGS...]\n"
    "       memfit max-batch [OPTIONS] -m MODULE [ARGS...]"
)
_RUNS = (
    "memfit: running the script with one batch size after another, without terminal input and with its "
    "output hidden. Each run writes the script's output files again."
)


def max_batch(  # noqa: PLR0913 - one parameter an option
    *command: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    module: Annotated[bool, Parameter(name=["-m", "--module"], negative="")] = False,
    budget: Annotated[str | None, Parameter(group=TARGET)] = None,
    gpu: Annotated[str, Parameter(group=TARGET)] = DEFAULT,
    in_use: Annotated[str, Parameter(group=TARGET)] = "0",
    nproc: Annotated[int, Parameter(group=TARGET)] = 1,
    nnodes: Annotated[int, Parameter(group=TARGET)] = 1,
    rank: Annotated[int, Parameter(group=TARGET)] = 0,
    option: Annotated[str, Parameter(allow_leading_hyphen=True)] = "",
    multiple: int = 1,
    steps: int = STEPS,
    json: Annotated[str | None, Parameter(group=OUTPUT, allow_leading_hyphen=True)] = None,
    fail: Annotated[bool, Parameter(negative="", group=OUTPUT)] = False,
    values: Annotated[tuple[str, ...], Parameter(negative="", group=GHOST)] = (),
) -> int:
    """Find the largest batch size with which a script fits, without a GPU.

    memfit runs the unmodified script on the ghost with one batch size after another, until it fits with one
    and runs out of memory with the next. It sets the batch size through the script's own option, such as
    --batch-size, or if it has none, where the script creates its DataLoader. With --nproc, the batch size is
    that of one rank of several, under DDP or FSDP.

    Args:
        command: The script and its own arguments.
        module: Run a module, as python -m does.
        budget: How much GPU memory the script may use, for example 8GiB. It includes the CUDA context, as
            with memfit dry-run --memory. By default, the memory of the GPU.
        gpu: The GPU to assume: a name that memfit gpus lists, or a MIG slice such as A100-80GB:1g.10gb.
        in_use: Assume that the desktop or other jobs already use this much GPU memory, for example 1.5GiB.
        nproc: Run the script as one of this many processes on each machine, as memfit dry-run --nproc does.
        nnodes: Number of machines.
        rank: Which of the processes to run, counted from 0 over all machines.
        option: The script's option that sets the batch size, if memfit does not recognise it: --option
            --samples. With a name that ends in =, name and value are one word: --option data.batch=.
        multiple: Look for multiples of this number only.
        steps: Stop each run after this many training steps.
        json: Write the result as JSON to this file. With -, print the JSON instead of the table.
        fail: Exit with code 1 if no batch size fits.
        values: The values that the script gets when it reads from the GPU, as for memfit dry-run. May be
            repeated.
    """
    from memfit import api

    expect_script("max-batch", command, {"--json": json})
    check_outputs({"--json": json_file(json)}, script_file(command[0], module=module))
    options = RunOptions(
        module=module,
        steps=steps,
        gpu=gpu,
        memory=memory_or_none(budget),
        in_use=memory_or_none(in_use) or 0,
        rank=Rank(rank=rank, nproc=nproc, nnodes=nnodes),
        values=",".join(values),
    )
    with progress(options.steps, reruns=_RUNS) as show:
        result = api.max_batch_on_ghost(
            command[0], command[1:], options, option=option, multiple=multiple, on_progress=show
        )
    write_result(result, json)
    return 1 if fail and result.largest is None else 0
