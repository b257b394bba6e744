"""Read a recorded run and answer questions about it: ``explain``, ``diff``, ``replay``, and the exports."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from memfit.allocator.timeline import memory_timeline
from memfit.analysis import dry_run_result as summary
from memfit.analysis.allocator_comparison import compare_allocator_settings
from memfit.analysis.attribution import attribute_allocations
from memfit.analysis.breakdown import compare_run_breakdowns
from memfit.analysis.explanation import explain_trace
from memfit.analysis.needed_memory import with_needed_memory, with_range_by_workspaces
from memfit.atomic_files import write_output_file
from memfit.devices import find_device
from memfit.planning.advice import find_advice
from memfit.records import AllocatorComparison, DryRun, Explanation, GroupBy, RunDifference, Trace
from memfit.report.trace_exports import allocations_csv
from memfit.trace.snapshot import read_snapshot
from memfit.trace.trace_file import looks_like_trace_file, read_trace


def read(path: str | Path) -> Trace:
    """Read a trace (``.memfit``) or a memory snapshot written by PyTorch (a pickle).

    Raises:
        FileFormatError: the file is neither of them, is damaged, or holds more than plain data.
    """
    path = Path(path)
    return read_trace(path) if looks_like_trace_file(path) else read_snapshot(path)


def summarize(trace: Trace) -> DryRun:
    """Return what the run of a trace used, as ``dry_run`` does. Printing it shows the summary.

    Raises:
        FileFormatError: the history contradicts itself.
    """
    return _with_needs(trace, summary.dry_run_of_trace(trace))


def _with_needs(trace: Trace, found: DryRun) -> DryRun:
    return with_range_by_workspaces(trace, with_needed_memory(trace, found))


def explain(target: Trace | str | Path, at: str = "peak", *, fragments: bool = False) -> Explanation:
    """Return what holds the GPU memory of a run, when, and which line allocated it.

    Args:
        target: a trace, or the path of a trace or of a memory snapshot written by PyTorch.
        at: ``peak``, or the moment when most memory is allocated in a phase (``backward``), a step (``2``),
            or a stage of a whole run (``evaluation``).
        fragments: also report the reserved memory that no tensor requested.

    Returns:
        The summary, what holds memory at that moment by category, module, line and op, and what each phase
        changed. Printing it shows all of it.

    Raises:
        UsageError: the run has no such moment.
        FileFormatError: the file is neither of them, or contradicts itself.

    >>> explanation = explain("run.memfit", at="backward")  # doctest: +SKIP
    >>> explanation.held.rows["module"][0]  # doctest: +SKIP
    Row(name='head', bytes=823410688, blocks=1, provenance=<Provenance.EXACT: 'exact'>)
    """
    trace = target if isinstance(target, Trace) else read(target)
    explanation = explain_trace(trace, at, fragments=fragments)
    found = _with_needs(trace, explanation.summary)
    advised = find_advice(trace, found)  # the script is not run: settings of the allocator only
    shown = advised if advised.advice else found
    return replace(explanation, summary=shown, page=lambda: _html_report(trace, shown))


def diff(
    before: Trace | str | Path, after: Trace | str | Path, at: str = "peak", by: str = "category"
) -> RunDifference:
    """Compare what holds the GPU memory of two runs, at the same moment of each.

    Args:
        before: a trace, or the path of a trace or of a memory snapshot written by PyTorch.
        after: the other run, likewise.
        at: the moment, as for ``explain``.
        by: ``category``, ``module``, ``line`` or ``op``.

    Raises:
        UsageError: one of the runs has no such moment.
        FileFormatError: a file is neither of them, or contradicts itself.
    """
    runs = [run if isinstance(run, Trace) else read(run) for run in (before, after)]
    return compare_run_breakdowns(runs[0], runs[1], at, GroupBy(by))


def replay(
    trace: Trace | str | Path,
    confs: Sequence[str] | str | None = None,
    *,
    gpu: str | None = None,
    memory: int | None = None,
    in_use: int | None = None,
    smallest: bool = False,
    on_progress: Callable[[str], None] = lambda _: None,
) -> AllocatorComparison:
    """Predict a recorded run under other allocator settings, or on another GPU; needs no GPU.

    Args:
        trace: what ``read`` returned, or its file.
        confs: one or several values of ``PYTORCH_ALLOC_CONF``. None tries those worth trying, no caching at
            all, and ``empty_cache`` after each step.
        gpu: name of a device in the table; by default the one that the run was recorded for.
        memory: bytes of device memory instead of that device's.
        in_use: bytes that other processes use; by default as during the recording.
        smallest: also find the smallest device for each setting.
        on_progress: called with the name of the setting being replayed.

    Raises:
        UsageError: PyTorch does not accept a setting, or the device does not exist.
        FileFormatError: the trace does not hold the sizes that were requested.
    """
    return compare_allocator_settings(
        trace if isinstance(trace, Trace) else read(trace),
        confs,
        device=find_device(gpu) if gpu is not None else None,
        memory=memory,
        in_use=in_use,
        smallest=smallest,
        on_progress=on_progress,
    )


def _html_report(trace: Trace, result: DryRun, *, source: bool = True) -> str:
    """Return a report for the browser: one page that loads nothing else, opened at the peak."""
    from memfit.report.html import run_report_html

    line = memory_timeline(trace)
    return run_report_html(trace, line, attribute_allocations(trace, line), result, source=source)


def write_html(trace: Trace, result: DryRun, path: Path, *, source: bool = True) -> None:
    """Write the report for the browser to a file, atomically."""
    write_output_file(path, _html_report(trace, result, source=source).encode(errors="replace"))


def allocation_table(trace: Trace) -> str:
    """Return every allocation as a row of comma-separated values."""
    return allocations_csv(trace, attribute_allocations(trace, memory_timeline(trace)))
