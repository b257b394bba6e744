"""``memfit compare``."""

import memfit
from memfit.cli.command_output import show_script_progress, text_before_runs, write_result
from memfit.cli.options import (
    JobSize,
    Json,
    Module,
    Script,
    TargetGpu,
    Values,
    checked_script_keywords,
    json_output_file,
)
from memfit.run.options import STEPS
from memfit.termination_signals import INTERRUPTED


def compare(
    *command: Script,
    module: Module = False,
    target: TargetGpu = TargetGpu(),
    ranks: JobSize = JobSize(),
    steps: int = STEPS,
    json: Json = None,
    values: Values = (),
) -> int:
    """Compare what a script would need with each of memfit's strategies, without a GPU.

    The script runs unmodified on the ghost, once for each row of the table. memfit applies the strategies
    when the script creates its optimizer. With --nproc, the table also has DDP, ZeRO-1 and FSDP2, each with
    and without checkpointing and offload, and shows the rank that needs most. The ranks share each batch of
    the script's. A script that itself calls fully_shard, DistributedDataParallel or
    deepspeed.initialize is compared with other options of these calls instead. Strategies that do not suit
    the script have a row with the reason.

    Ctrl-C ends the comparison, and prints the rows found so far.

    Args:
        steps: Stop each run after this many training steps.
    """
    options = checked_script_keywords(
        "compare", command, {"--json": json_output_file(json)}, module=module, ranks=ranks
    )
    with show_script_progress(steps, reruns=text_before_runs("once for each row")) as show:
        result = memfit.compare(
            **options, **vars(target), steps=steps, values=",".join(values), on_progress=show
        )
    write_result(result, json)
    return INTERRUPTED if result.interrupted else 0
