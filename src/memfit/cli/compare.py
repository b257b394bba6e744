"""``memfit compare``."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

import memfit
from memfit.atomic_files import write_output_file
from memfit.cli.command_output import show_script_progress, text_before_runs, write_result
from memfit.cli.options import (
    OUTPUT,
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
    rows: str = "",
    steps: int = STEPS,
    html: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    json: Json = None,
    values: Values = (),
) -> int:
    """Compare memory and time of a script under each of memfit's strategies, without a GPU.

    The script runs unmodified on the ghost, once for each row of the table: as written; in mixed precision;
    with its batches in slices; with checkpointing; with activations or the optimizer's state on the host;
    with leaner optimizers; and with precision, slices and checkpointing in all combinations. Most rows go on
    from a copy of the first run, made just before it trained. Strategies that do not suit the script have a
    row with the reason. Times are estimated from the operations of a step, for the GPU of --gpu.

    With --nproc, the table also has DDP, ZeRO-1 and FSDP2, each with and without checkpointing and offload,
    and shows the rank that needs most. The ranks share each batch of the script's. A script that
    itself calls fully_shard, DistributedDataParallel or deepspeed.initialize is compared with other options
    of these calls instead.

    Ctrl-C ends the comparison, and prints the rows found so far.

    Args:
        rows: Compare only these with the script as written: names of rows, or of groups of them (precision,
            slices, checkpointing, offload, optimizer, combinations, sharding), and files of settings as for
            memfit train --plan, with commas between them.
        steps: Stop each run after this many training steps, at least 2 for times.
        html: Write the table, with a chart of time against memory, as an HTML page to this file: a single
            page that loads no other files.
    """
    options = checked_script_keywords(
        "compare",
        command,
        {"--html": html, "--json": json_output_file(json)},
        module=module,
        ranks=ranks,
    )
    with show_script_progress(steps, reruns=text_before_runs("once for each row")) as show:
        result = memfit.compare(
            **options,
            **vars(target),
            steps=steps,
            values=",".join(values),
            rows=[name.strip() for name in rows.split(",") if name.strip()],
            on_progress=show,
        )

    def write_page(path: Path) -> None:
        from memfit.report.html.comparison_page import comparison_report_html

        write_output_file(path, comparison_report_html(result).encode(errors="replace"))

    write_result(result, json, (html, write_page))
    return INTERRUPTED if result.interrupted else 0
