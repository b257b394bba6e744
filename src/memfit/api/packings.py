"""Plan offsets for the buffers of a run or a graph: ``pack``."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, overload

from memfit.allocator.requests import allocator_requests_of_trace
from memfit.analysis.allocator_comparison import compare_allocator_settings
from memfit.analysis.event_locations import worst_provenance_of_notes
from memfit.api.traces import read
from memfit.devices import NO_LIMIT
from memfit.packing.graph_packing import GraphPacking, pack_graph
from memfit.packing.run_packing import RunPacking, pack_run_memory
from memfit.records import Trace

if TYPE_CHECKING:
    import torch


@overload
def pack(
    target: Trace | str | Path,
    capacity: int | None = None,
    *,
    seconds: float = 10.0,
    on_progress: Callable[[str], None] = ...,
) -> RunPacking: ...
@overload
def pack(
    target: "torch.fx.GraphModule",
    capacity: int | None = None,
    *,
    seconds: float = 10.0,
    on_progress: Callable[[str], None] = ...,
) -> GraphPacking: ...
def pack(
    target: "Trace | str | Path | torch.fx.GraphModule",
    capacity: int | None = None,
    *,
    seconds: float = 10.0,
    on_progress: Callable[[str], None] = lambda _: None,
) -> RunPacking | GraphPacking:
    """Find the least memory a run or a graph needs if every buffer gets a planned offset.

    Args:
        target: a trace, or the path of a trace or of a memory snapshot written by PyTorch; or a graph whose
            input sizes are known, from ``torch.export``, ``make_fx`` or AOTAutograd.
        capacity: stop once the packing is within this many bytes; None searches for the smallest packing.
        seconds: approximate time limit.
        on_progress: called with the name of the packer that runs.

    Returns:
        The size of the packing, the most that is live at once, and each buffer's offset; for a run, also what
        PyTorch's allocator reserves; for a graph, also which of its values share memory. A graph's packing
        excludes its inputs and parameters, and memory that operations allocate and free internally.

    Raises:
        FileFormatError: the file is neither of them, or does not hold the sizes that were requested.
        TargetError: memfit does not know an operation of the graph; the message names it.
        UsageError: the time limit is invalid, or there is nothing to pack.
        MemfitError: the packers could not be compiled.

    >>> found = pack("run.memfit")  # doctest: +SKIP
    >>> found.height, found.live  # doctest: +SKIP
    (6424867328, 6424867328)

    >>> import torch
    >>> model, inputs = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), (torch.ones(4, 8),)
    >>> graph = torch.export.export(model, inputs).run_decompositions({}).graph_module
    >>> [(alias_set.names, alias_set.size) for alias_set in pack(graph).sets if not alias_set.given]
    [(('linear',), 128), (('relu',), 128)]
    """
    if not isinstance(target, Trace | str | Path):
        from memfit.graph.fx_dataflow import dataflow_of_fx_graph

        flow = dataflow_of_fx_graph(target)
        return pack_graph(flow, capacity=capacity, seconds=seconds, on_progress=on_progress)
    trace = target if isinstance(target, Trace) else read(target)
    reserved = compare_allocator_settings(
        trace, "expandable_segments:True", memory=NO_LIMIT, on_progress=on_progress
    ).outcomes
    return pack_run_memory(
        allocator_requests_of_trace(trace),
        reserved,
        worst_provenance_of_notes(note for note in trace.notes if note.sizes),
        capacity=capacity,
        seconds=seconds,
        on_progress=on_progress,
    )
