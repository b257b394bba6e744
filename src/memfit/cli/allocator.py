"""``memfit allocator``."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from memfit.cli.console import write_comparison
from memfit.cli.options import OUTPUT, TARGET
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
    """Find the best allocator settings for a recorded run, and the smallest GPU for each.

    memfit replays the run under every setting worth trying, and reports the memory that each reserves and
    the time that it costs per step. It recommends a setting only if that reserves less memory than the
    current settings and is no slower.

    Args:
        path: A trace (run.memfit) or a memory snapshot written by PyTorch (snapshot.pickle).
        gpu: The GPU to assume instead of the one that the run was recorded for.
        memory: Use this much GPU memory instead of the GPU's own: 12GiB.
        in_use: GPU memory that the desktop or other jobs already use: 1.5GiB.
        json: Write the result as JSON to this file, or - for standard output.
    """
    write_comparison(compare(path, None, gpu, memory, in_use, smallest=True), json)
    return 0
