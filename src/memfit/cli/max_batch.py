"""``memfit max-batch``."""

from typing import Annotated

from cyclopts import Parameter

import memfit
from memfit.cli.command_output import show_script_progress, text_before_runs, write_result
from memfit.cli.options import (
    Fail,
    Json,
    MemoryBudget,
    Module,
    RankOfJob,
    Script,
    Values,
    checked_script_keywords,
    json_output_file,
)
from memfit.run.options import STEPS


def max_batch(
    *command: Script,
    module: Module = False,
    budget: MemoryBudget = MemoryBudget(),
    ranks: RankOfJob = RankOfJob(),
    option: Annotated[str, Parameter(allow_leading_hyphen=True)] = "",
    multiple: int = 1,
    steps: int = STEPS,
    json: Json = None,
    fail: Fail = False,
    values: Values = (),
) -> int:
    """Find the largest batch size with which a script fits, without a GPU.

    memfit runs the unmodified script on the ghost with one batch size after another, until it fits with one
    and runs out of memory with the next. It sets the batch size through the script's own option, such as
    --batch-size, or if it has none, where the script creates its DataLoader. With --nproc, the batch size is
    that of one rank of several, under DDP or FSDP.

    Args:
        option: The script's option that sets the batch size, if memfit does not recognise it: --option
            --samples. With a name that ends in =, name and value are one word: --option data.batch=.
        multiple: Look for multiples of this number only.
        steps: Stop each run after this many training steps.
        fail: Exit with code 1 if no batch size fits.
    """
    options = checked_script_keywords(
        "max-batch", command, {"--json": json_output_file(json)}, module=module, ranks=ranks
    )
    with show_script_progress(steps, reruns=text_before_runs("with one batch size after another")) as show:
        result = memfit.max_batch(
            **options,
            **vars(budget),
            option=option,
            multiple=multiple,
            steps=steps,
            values=",".join(values),
            on_progress=show,
        )
    write_result(result, json)
    return 1 if fail and result.largest is None else 0
