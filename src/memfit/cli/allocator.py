"""``memfit allocator``."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from memfit.atomic_files import check_outputs
from memfit.cli.console import write_result
from memfit.cli.options import OUTPUT, TARGET, json_file
from memfit.cli.replay import compare


def allocator(
    path: Path,
    /,
    *,
    gpu: Annotated[str | None, Parameter(group=TARGET)] = None,
    memory: Annotated[str | None, Parameter(group=TARGET)] = None,
    in_use: Annotated[str | None, Parameter(group=TARGET)] = None,
    json: Annotated[str | None, Parameter(group=OUTPUT, allow_leading_hyphen=True)] = None,
) -> int:
    """For each allocator setting, report how much memory a recorded run reserves and which GPU is big enough.

    memfit replays the recorded allocations under each allocator setting worth trying. For each setting, it
    reports how much memory PyTorch reserves and how much time the calls to the CUDA driver take per step.
    memfit recommends a setting that makes the run fit or, if the run fits already, lowers the reserved memory
    by at least 1 %. It never recommends a setting that slows a training step by more than 1 ms.

    Args:
        path: A trace written by memfit (run.memfit), or a memory snapshot written by PyTorch
            (snapshot.pickle).
        gpu: Assume this GPU instead of the one that the run was recorded for.
        memory: Assume this much GPU memory instead of the GPU's own, for example 12GiB.
        in_use: Assume that the desktop or other jobs already use this much GPU memory, for example 1.5GiB.
        json: Write the result as JSON to this file. With -, print the JSON instead of the summary.
    """
    check_outputs({"--json": json_file(json)}, {"the input": path})
    write_result(compare(path, None, gpu, memory, in_use, smallest=True), json)
    return 0
