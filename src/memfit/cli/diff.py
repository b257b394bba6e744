"""``memfit diff``."""

from pathlib import Path
from typing import Literal

import memfit
from memfit.atomic_files import check_output_paths
from memfit.cli.command_output import write_result
from memfit.cli.options import Json, json_output_file


def diff(
    before: Path,
    after: Path,
    /,
    *,
    at: str = "peak",
    by: Literal["category", "module", "line", "op"] = "category",
    json: Json = None,
) -> int:
    """Compare what holds the GPU memory in two recorded runs, at the same point in each.

    The runs may be two ranks of one job, as memfit dry-run --nproc 8 --all-ranks -o 'run-{rank}.memfit' keeps
    them.

    Args:
        before: The first run: a trace written by memfit, or a memory snapshot written by PyTorch.
        after: The second run: a trace or a snapshot.
        at: The moment to compare: peak, a phase (forward, loss, backward, optimizer, ...), a stage of a whole
            run (training, evaluation, saving, loading), or the number of a training step, such as 2.
        by: Sum the allocated memory by category, module, line or op.
    """
    check_output_paths({"--json": json_output_file(json)}, {"the first run": before, "the second run": after})
    write_result(memfit.diff(before, after, at, by), json)
    return 0
