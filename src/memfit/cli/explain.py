"""``memfit explain``."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from memfit.cli.console import write_explanation
from memfit.cli.options import OUTPUT


def explain(  # noqa: PLR0913 - one parameter an option
    path: Path,
    /,
    *,
    at: str = "peak",
    by: Literal["category", "module", "line", "op"] | None = None,
    json: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    snapshot: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    html: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    source: Annotated[bool, Parameter(group=OUTPUT)] = True,
    chrome: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    csv: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    fragmentation: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Show what holds the GPU memory of a recorded run, when, and which line allocated it.

    Args:
        path: A trace (run.memfit) or a memory snapshot written by PyTorch (snapshot.pickle).
        at: The moment to explain: peak, a phase (forward, loss, backward, optimizer, ...), or a training
            step (2). For a phase or a step, this is the moment when most memory is allocated.
        by: Sum the allocated memory by category, module, line or op. The rows add up to all of it.
        json: Write the result as JSON to this file, or - for standard output.
        snapshot: Write the trace to this file as a snapshot for PyTorch's viewer (memory_viz).
        html: Write a report for the browser to this file: one page that loads nothing else.
        source: Include file names and line numbers in the HTML report.
        chrome: Write the memory timeline by category to this file as a Chrome trace, for Perfetto.
        csv: Write a table of all allocations to this file.
        fragmentation: Also show how much reserved memory no tensor requested, at the peaks and at the end
            (rounding, holes, cached segments), and which blocks keep the largest holes.
    """
    from memfit import api

    trace = api.read(path)
    explanation = api.explain(trace, at, fragments=fragmentation)
    if snapshot is not None:
        api.write_snapshot(trace, snapshot)
    if html is not None:
        api.write_html(trace, explanation.summary, html, source=source)
    if chrome is not None:
        api.write_bytes(chrome, api.chrome_trace(trace))
    if csv is not None:
        api.write_bytes(csv, api.table(trace).encode())
    write_explanation(explanation, json, by)
    return 0
