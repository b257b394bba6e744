"""``memfit diff``."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from memfit.cli.console import write_difference


def diff(
    before: Path,
    after: Path,
    /,
    *,
    at: str = "peak",
    by: Literal["category", "module", "line", "op"] = "category",
    json: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
) -> int:
    """Compare two recorded runs: what holds the GPU memory at the same moment of each.

    Args:
        before: The first run: a trace, or a memory snapshot written by PyTorch.
        after: The second run, likewise.
        at: The moment to compare, as for memfit explain: peak, a phase, or a training step.
        by: Sum the allocated memory by category, module, line or op.
        json: Write the result as JSON to this file, or - for standard output.
    """
    from memfit import api

    write_difference(api.diff(before, after, at, by), json)
    return 0
