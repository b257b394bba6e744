"""``memfit explain``."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

import memfit
from memfit.atomic_files import check_output_paths
from memfit.cli.command_output import write_result
from memfit.cli.options import OUTPUT, Html, Json, Notes, json_output_file


def explain(
    path: Path,
    /,
    *,
    at: str = "peak",
    by: Literal["category", "module", "line", "op"] | None = None,
    json: Json = None,
    snapshot: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    html: Html = None,
    source: Annotated[bool, Parameter(group=OUTPUT, negative="--no-source")] = True,
    csv: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    fragmentation: bool = False,
    notes: Notes = False,
) -> int:
    """Show what holds the GPU memory of a recorded run at a given moment, and which line allocated it.

    Args:
        path: A trace written by memfit (run.memfit), or a memory snapshot written by PyTorch
            (snapshot.pickle).
        at: The moment to explain: peak, a phase (forward, loss, backward, optimizer, ...), the number of a
            training step, such as 2, or a stage of a whole run (training, evaluation, saving, loading).
            Within any of these, memfit chooses the moment with the most allocated memory.
        by: Sum the allocated memory by category, module, line or op. The rows add up to the total.
        snapshot: Write the trace to this file as a memory snapshot, for PyTorch's viewer (memory_viz).
        source: Include file names and line numbers in the HTML report.
        csv: Write a table of all allocations to this file.
        fragmentation: Also show, at the peaks and at the end of the run, the reserved memory that no tensor
            uses (rounding, holes between blocks, cached segments). Also name the blocks that keep PyTorch
            from returning the largest holes to the GPU.
    """
    from memfit.api.traces import allocation_table, write_html
    from memfit.atomic_files import write_output_file
    from memfit.records import GroupBy

    outputs = {"--snapshot": snapshot, "--html": html, "--csv": csv}
    check_output_paths({**outputs, "--json": json_output_file(json)}, {"the input": path})
    trace = memfit.read(path)
    explanation = memfit.explain(trace, at, fragments=fragmentation)
    write_result(
        explanation,
        json,
        (snapshot, partial(memfit.write_snapshot, trace)),
        (html, partial(write_html, trace, explanation.summary, source=source)),
        (csv, lambda path: write_output_file(path, allocation_table(trace).encode())),
        by=None if by is None else GroupBy(by),
        notes=notes,
    )
    return 0
