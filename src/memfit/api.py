"""The whole pipeline in one file: read this first.

script ── run.parent ──> trace file ── trace.trace_file ──> Trace ─┬─ analysis.summary ──> DryRun
             dry_run: on the ghost              no torch from here on ├─ analysis.explanation ──> Explanation
             record: on this machine's GPU                            │    explain
             advice: again, with a change                             └─ analysis.allocator_comparison
                                                                           replay
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from memfit.allocator.requests import read_requests
from memfit.allocator.timeline import timeline
from memfit.analysis import summary
from memfit.analysis.advice import find_advice
from memfit.analysis.allocator_comparison import compare_settings
from memfit.analysis.attribution import attribute
from memfit.analysis.explanation import explain_trace
from memfit.analysis.location import least_certain
from memfit.analysis.run_difference import compare_runs
from memfit.atomic_files import check_output, write_bytes
from memfit.card.context_measurement import keep_context, measure_context
from memfit.card.find import find_card
from memfit.devices import DEFAULT, NO_LIMIT, find_device
from memfit.ghost.doctor import Check, checks
from memfit.packing import best_packing
from memfit.packing.best_packing import Packing
from memfit.packing.csv_table import packed_table, read_buffers
from memfit.packing.graph_packing import pack_graph
from memfit.packing.lifetimes import ALIGNMENT, CPU_ALIGNMENT
from memfit.packing.run_packing import pack_run
from memfit.records import AllocatorComparison, DryRun, GroupBy, Machine, RunDifference, Trace
from memfit.report import export
from memfit.report.estimate import Estimate
from memfit.report.html import page
from memfit.report.terminal.allocator_comparison import PrintableComparison
from memfit.report.terminal.explanation import PrintableExplanation
from memfit.report.terminal.packing import PrintableGraphPacking, PrintableRunPacking
from memfit.report.terminal.run_difference import PrintableDifference
from memfit.report.terminal.summary import PrintableDryRun
from memfit.run.options import STEPS, RunOptions
from memfit.run.parent import Progress, run_script, script_command
from memfit.run.resolve_options import ghost_settings
from memfit.strategies.trial_run import trial_runner
from memfit.trace.snapshot import read_snapshot, write_snapshot
from memfit.trace.trace_file import is_trace, read_trace

if TYPE_CHECKING:
    import torch

    from memfit.records import SettingOutcome

__all__ = [
    "check_output",
    "chrome_trace",
    "diagnose",
    "diff",
    "dry_run",
    "estimate",
    "explain",
    "html",
    "keep_context",
    "measure_context",
    "pack",
    "pack_table",
    "packed_table",
    "read",
    "record",
    "replay",
    "summarize",
    "table",
    "write_bytes",
    "write_snapshot",
]


def dry_run(  # noqa: PLR0913 - one parameter an option
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    module: bool = False,
    gpu: str = DEFAULT,
    memory: int | None = None,
    in_use: int = 0,
    steps: int = STEPS,
    values: str = "",
    host_memory: bool = True,
    weights: bool = True,
    workspaces: str = "cudnn",
    labels: bool = True,
    output: Path | None = None,
    html: Path | None = None,
    advise: bool = False,
    stdout_to_stderr: bool = False,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> DryRun:
    """Run a script on the ghost, unmodified, and say what it would use.

    Args:
        script: path of the script, or a module's name with ``module=True``.
        arguments: the script's own arguments.
        module: run a module as ``python -m`` does.
        gpu: name of a device in the table (``memfit gpus``).
        memory: bytes of device memory instead of that device's.
        in_use: bytes of device memory that other processes hold.
        steps: training steps after which the script is ended.
        values: what the script is told when it reads a GPU value, see ``ValueChoices``.
        host_memory: pass over the filling of large CPU tensors, so that they cost no memory.
        weights: read the checkpoints that transformers' ``from_pretrained`` is asked for. Those that are not
            on this machine, and with False all of them, are made up from their configuration.
        workspaces: who says what cuDNN works in: ``cudnn``, ``rules`` or ``none``, see ``WorkspaceSource``.
        labels: record modules and phases; the figures are the same without.
        output: where the trace is kept; nowhere by default.
        html: where a report for browsers is written; nowhere by default.
        advise: run the script again, silently, without input and up to about six times, with what may lower
            its peak and leaves its loop alone; what helps is in the result's ``advice``. The script writes
            its files again. If that is interrupted, the result holds what was found by then.
        stdout_to_stderr: keep standard output free of what the script prints.
        on_progress: called about ten times a second.

    Returns:
        Verdict, peaks in bytes, and where the peak or the failure was.

    Raises:
        MemfitError: no such script or device, torch or the platform does not serve, or the script
            never used the GPU.

    >>> result = dry_run("train.py", ["--batch-size", "8"], gpu="RTX-3060")  # doctest: +SKIP
    """
    options = RunOptions(
        module=module,
        steps=steps,
        labels=labels,
        stdout_to_stderr=stdout_to_stderr,
        gpu=gpu,
        memory=memory,
        in_use=in_use,
        values=values,
        host_memory=host_memory,
        weights=weights,
        workspaces=workspaces,
    )
    command = script_command(script, arguments, options, output)
    trace = run_script(command, options, ghost_settings(options), output, on_progress)
    found = summarize(trace)
    if advise:
        unlimited = dataclasses.replace(options, memory=NO_LIMIT)
        found = find_advice(trace, found, trial_runner(command, unlimited, on_progress))
    if html is not None:
        write_html(trace, found, html)
    return found


def record(  # noqa: PLR0913 - one parameter an option
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    module: bool = False,
    steps: int | None = STEPS,
    labels: bool = True,
    output: Path | None = None,
    stdout_to_stderr: bool = False,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> DryRun:
    """Run a script on this machine's GPU, unmodified, and say what it used: ``dry_run`` for real.

    Args:
        script: path of the script, or a module's name with ``module=True``.
        arguments: the script's own arguments.
        module: run a module as ``python -m`` does.
        steps: training steps after which the script is ended; None lets it come to its own end. The
            history is kept in host memory until then, so give hours of training a number.
        labels: record modules and phases; the figures are the same without.
        output: where the trace is kept; nowhere by default.
        stdout_to_stderr: keep standard output free of what the script prints.
        on_progress: called about ten times a second.

    Returns:
        Verdict, peaks in bytes, and where the peak or the failure was. ``device.machine`` is ``card``, or
        ``rehearsal`` where memfit's ghost stands in for the card.

    Raises:
        MemfitError: there is no GPU or no such script, PyTorch keeps no history with the allocator
            chosen, or the script never used the GPU.

    >>> result = record("train.py", ["--batch-size", "8"])  # doctest: +SKIP
    """
    options = RunOptions(module=module, steps=steps, labels=labels, stdout_to_stderr=stdout_to_stderr)
    command = script_command(script, arguments, options, output)
    find_card(f"record {command[0]}")
    return summarize(run_script(command, options, None, output, on_progress))


def estimate(  # noqa: PLR0913 - one parameter an option
    model: "torch.nn.Module",
    inputs: Any,
    *,
    loss: Callable[..., Any] | None = None,
    optimizer: Any = None,
    gpu: str = DEFAULT,
    memory: int | None = None,
    in_use: int = 0,
    steps: int = STEPS,
    values: str = "",
) -> Estimate:
    """Say what a live model would use on a GPU, in a notebook too; no GPU is needed.

    A copy of the model without its weights' values goes to a process on the ghost and is run there, in a
    loop as PyTorch's tutorials write it (``estimating/training_script.py``): ``zero_grad``, forward, loss,
    backward, step, with the inputs moved to the GPU anew each time. Nothing that is passed in is changed.
    The model runs in the mode it is in (``train()``, ``eval()``), under the switches in force here. Autocast
    belongs into ``loss``: around this call PyTorch itself leaves it off where there is no GPU. Gradients and
    optimizer state that are there already are not copied: the estimate begins afresh.

    With an optimizer it is training; with a loss alone, forward and backward; with neither, inference: the
    forward under ``torch.no_grad()``.

    Args:
        model: on the CPU, on ``meta`` or on a GPU; its parameters and buffers are taken to be on the GPU.
        inputs: an example of what the model is called with. Only shapes and types matter. A tuple is the
            positional arguments, a mapping the keyword arguments, ``(tuple, mapping)`` both; anything else
            is the one argument.
        loss: ``loss(model, inputs)`` runs the forward itself and returns the loss. A criterion
            (``nn.CrossEntropyLoss()``) takes ``inputs`` as ``(what the model is called with, target)``.
            Without one, the ``loss`` in the model's output stands for it, or the sum of what it returns.
        optimizer: an optimizer on the model's parameters, which is made anew from its class and its
            settings; or a class or function that makes one from parameters. Not one whose ``step`` wants
            a closure, such as LBFGS.
        gpu: name of a device in the table (``memfit gpus``).
        memory: bytes of device memory instead of that device's.
        in_use: bytes of device memory that other processes hold.
        steps: training steps, or forward passes.
        values: what code is told that reads a GPU value, see ``ValueChoices``.

    Returns:
        ``total``, ``fits()``, ``breakdown``, and the whole dry run as ``run``; printed, the summary.

    Raises:
        NotSentError: something that hangs on the model cannot be copied; it is named.
        TargetError: the model, the loss or the optimizer failed on the ghost.
        UsageError: no such device, an option out of range, or an optimizer that is another model's.

    >>> from torch import nn, ones, optim
    >>> net = nn.Linear(1024, 1024)
    >>> answer = estimate(net, ones(8, 1024), optimizer=optim.AdamW(net.parameters()))  # doctest: +SKIP
    >>> answer.fits(), answer.breakdown["parameters"].bytes  # doctest: +SKIP
    (True, 4198400)
    """
    from memfit.estimating.ghost_runner import GhostRunner
    from memfit.estimating.serialise import pack, training_step

    run_job = functools.partial(dry_run, module=True, in_use=in_use, steps=steps, values=values)
    run = GhostRunner(pack(training_step(model, inputs, loss, optimizer, steps)), run_job)
    first = run(gpu, memory)
    # The total of a model that does not fit takes one more run, with unlimited memory.
    return Estimate(first, first if first.verdict == "fits" else run(gpu, NO_LIMIT), run)


def read(path: str | Path) -> Trace:
    """Read a trace (``.memfit``) or a memory snapshot that PyTorch wrote (a pickle).

    Raises:
        FileFormatError: the file is neither, is damaged, or holds more than plain data.
    """
    path = Path(path)
    return read_trace(path) if is_trace(path) else read_snapshot(path)


def summarize(trace: Trace) -> DryRun:
    """Say what a trace's run used, as ``dry_run`` does of its own; printed, the summary.

    Raises:
        FileFormatError: the history contradicts itself.
    """
    return PrintableDryRun.of(summary.summarize(trace))


def explain(target: Trace | str | Path, at: str = "peak", *, fragments: bool = False) -> PrintableExplanation:
    """Say who holds the memory of a run, when, and from which line.

    Args:
        target: a trace, or the path of one, or of a memory snapshot that PyTorch wrote.
        at: ``peak``, a phase (``backward``), or a training step (``2``): the moment in it that holds most.
        fragments: tell apart what is reserved and not requested, too.

    Returns:
        The summary, who holds what at that moment by category, module, line and op, and what each phase
        changed; printed, all of it.

    Raises:
        UsageError: there is no such moment in the run.
        FileFormatError: the file is neither, or contradicts itself.

    >>> found = explain("run.memfit", at="backward")  # doctest: +SKIP
    >>> found.held.rows["module"][0]  # doctest: +SKIP
    Row(name='head', bytes=823410688, blocks=1, provenance=<Provenance.EXACT: 'exact'>)
    """
    trace = target if isinstance(target, Trace) else read(target)
    found = explain_trace(trace, at, fragments=fragments)
    return PrintableExplanation.of(
        found, summary=PrintableDryRun.of(found.summary), page=lambda: html(trace, found.summary)
    )


def diff(
    before: Trace | str | Path, after: Trace | str | Path, at: str = "peak", by: str = "category"
) -> RunDifference:
    """Say what changed between two runs: who holds what, at the same moment of each.

    Args:
        before: a trace, or the path of one, or of a memory snapshot that PyTorch wrote.
        after: another.
        at: the moment, as for ``explain``.
        by: ``category``, ``module``, ``line`` or ``op``.

    Raises:
        UsageError: there is no such moment in a run.
        FileFormatError: a file is neither, or contradicts itself.
    """
    runs = [run if isinstance(run, Trace) else read(run) for run in (before, after)]
    return PrintableDifference.of(compare_runs(runs[0], runs[1], at, GroupBy(by)))


def html(trace: Trace, found: DryRun, *, source: bool = True) -> str:
    """Return a report for browsers: one file that loads nothing, with the peak open.

    Args:
        trace: what ``read`` returned.
        found: the answer to show at the top, with advice if there is any.
        source: whether file names, lines and the command may be in it.
    """
    line = timeline(trace)
    return page(trace, line, attribute(trace, line), found, source=source)


def write_html(trace: Trace, found: DryRun, path: Path, *, source: bool = True) -> None:
    """Write the report for browsers, whole or not at all."""
    write_bytes(path, html(trace, found, source=source).encode(errors="replace"))


def chrome_trace(trace: Trace) -> bytes:
    """Return the timeline by category as a Chrome trace (JSON), which Perfetto reads as well."""
    line = timeline(trace)
    return export.chrome_trace(trace, line, attribute(trace, line))


def table(trace: Trace) -> str:
    """Return every allocation as a row of comma-separated values."""
    return export.table(trace, attribute(trace, timeline(trace)))


def replay(
    trace: Trace,
    confs: Sequence[str] | str | None = None,
    *,
    gpu: str | None = None,
    memory: int | None = None,
    in_use: int | None = None,
    smallest: bool = False,
    on_progress: Callable[[str], None] = lambda _: None,
) -> AllocatorComparison:
    """Say how a trace would have fared under other allocator settings, or on another GPU; needs neither.

    Args:
        trace: what ``read`` returned.
        confs: one or several values of ``PYTORCH_ALLOC_CONF``; None tries those that are worth trying, no
            caching at all, and ``empty_cache`` after each step.
        gpu: name of a device in the table; by default the one that the trace was made for.
        memory: bytes of device memory instead of that device's.
        in_use: bytes of it that other processes hold; by default as when the trace was made.
        smallest: find the smallest device for each, too.
        on_progress: called with what is being tried.

    Raises:
        UsageError: a conf is not what PyTorch takes, or the device is not known.
        FileFormatError: the trace does not tell what was asked for.
    """
    return PrintableComparison.of(
        compare_settings(
            trace,
            confs,
            device=find_device(gpu) if gpu is not None else None,
            memory=memory,
            in_use=in_use,
            smallest=smallest,
            on_progress=on_progress,
        )
    )


@overload
def pack(
    target: Trace | str | Path,
    capacity: int | None = None,
    *,
    seconds: float = 10.0,
    on_progress: Callable[[str], None] = ...,
) -> PrintableRunPacking: ...
@overload
def pack(
    target: "torch.fx.GraphModule",
    capacity: int | None = None,
    *,
    seconds: float = 10.0,
    on_progress: Callable[[str], None] = ...,
) -> PrintableGraphPacking: ...
def pack(
    target: "Trace | str | Path | torch.fx.GraphModule",
    capacity: int | None = None,
    *,
    seconds: float = 10.0,
    on_progress: Callable[[str], None] = lambda _: None,
) -> PrintableRunPacking | PrintableGraphPacking:
    """Say how small a run's memory is if offsets are planned from when each of its buffers lives.

    Args:
        target: a trace, or the path of one, or of a memory snapshot that PyTorch wrote; or a graph whose
            inputs' sizes are known, of ``torch.export``, of ``make_fx``, or what AOTAutograd hands to a
            compiler.
        capacity: bytes that are enough; None looks for as few as there can be.
        seconds: that are spent at most, about.
        on_progress: called with what is being tried.

    Returns:
        Bytes planned, what lives at once, each buffer's offset; of a run what PyTorch's allocator reserves;
        of a graph which of its values lie in one memory. Of a graph neither the memory of its inputs and
        parameters is planned nor what an operation takes and gives back inside itself.

    Raises:
        FileFormatError: the file is neither, or does not tell what was asked for.
        TargetError: an operation of the graph cannot be followed; the message names it.
        UsageError: no such time, or there is nothing to pack.
        MemfitError: the packers could not be compiled.

    >>> found = pack("run.memfit")  # doctest: +SKIP
    >>> found.height, found.live  # doctest: +SKIP
    (6424867328, 6424867328)
    >>> graph = torch.export.export(model, inputs).run_decompositions({}).graph_module  # doctest: +SKIP
    >>> pack(graph).sets  # doctest: +SKIP
    """
    if not isinstance(target, Trace | str | Path):
        from memfit.graph.fx_dataflow import dataflow

        flow = dataflow(target)
        return PrintableGraphPacking.of(
            pack_graph(flow, capacity=capacity, seconds=seconds, on_progress=on_progress)
        )
    trace = target if isinstance(target, Trace) else read(target)
    reserved: tuple[SettingOutcome, ...] = ()
    is_of_cpu = trace.device.machine is Machine.CPU  # there PyTorch keeps no cache
    if not is_of_cpu:
        rival = "expandable_segments:True"
        reserved = compare_settings(trace, rival, memory=NO_LIMIT, on_progress=on_progress).outcomes
    packed = pack_run(
        read_requests(trace),
        reserved,
        least_certain(note for note in trace.notes if note.sizes),
        alignment=CPU_ALIGNMENT if is_of_cpu else ALIGNMENT,
        capacity=capacity,
        seconds=seconds,
        on_progress=on_progress,
    )
    return PrintableRunPacking.of(packed)


def pack_table(
    path: Path,
    capacity: int | None = None,
    *,
    seconds: float = 10.0,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Packing:
    """Pack the buffers of a table, as ``pack`` does those of a run; its columns: ``packing/csv_table.py``.

    Raises:
        FileFormatError: the file is no such table.
        UsageError: no such time.
    """
    return best_packing.pack(read_buffers(path), capacity, seconds=seconds, on_progress=on_progress)


def diagnose() -> tuple[Check, ...]:
    """Look at everything memfit needs, and say of each whether it is here and what would mend it."""
    return checks()
