"""What prints each result: for the commands, for ``print``, and for notebooks."""

import io
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console

from memfit.packing.graph_packing import GraphPacking
from memfit.packing.run_packing import RunPacking
from memfit.records import (
    AllocatorComparison,
    DryRun,
    Explanation,
    GpusFor,
    MaxBatch,
    MemoryCheck,
    RunDifference,
    ScriptPlan,
    StrategyComparison,
    Verification,
)
from memfit.report.estimate_result import Estimate, print_estimate
from memfit.report.terminal.allocator_comparison import print_allocator_comparison
from memfit.report.terminal.arena_report import ArenaReport, print_arena_report
from memfit.report.terminal.explanation import print_explanation
from memfit.report.terminal.gpus import print_gpus_for
from memfit.report.terminal.max_batch import print_max_batch
from memfit.report.terminal.packing_sizes import (
    PackingSizes,
    print_graph_packing,
    print_packing,
    print_run_packing,
)
from memfit.report.terminal.run_differences import print_memory_check, print_run_difference
from memfit.report.terminal.script_plan import print_plan
from memfit.report.terminal.strategy_comparison import print_strategy_comparison
from memfit.report.terminal.summary import print_summary
from memfit.report.terminal.verification import print_verification

_WIDTH = 100  # columns; the output may not be a terminal
_PRINTERS: Mapping[type, Callable[..., None]] = {
    AllocatorComparison: print_allocator_comparison,
    ArenaReport: print_arena_report,
    DryRun: print_summary,
    Estimate: print_estimate,
    Explanation: print_explanation,
    GpusFor: print_gpus_for,
    GraphPacking: print_graph_packing,
    MaxBatch: print_max_batch,
    MemoryCheck: print_memory_check,
    PackingSizes: print_packing,
    RunDifference: print_run_difference,
    RunPacking: print_run_packing,
    ScriptPlan: print_plan,
    StrategyComparison: print_strategy_comparison,
    Verification: print_verification,
}


def print_result(result: Any, console: Console, **options: Any) -> None:
    """Print a result. Options are the keyword arguments of what prints its kind."""
    _PRINTERS[type(result)](result, console, **options)


def printed_text_of_result(result: Any) -> str:
    """Return what is printed of a result."""
    text = io.StringIO()
    # force_jupyter=False: in a notebook rich would display each line instead of writing it to the file.
    console = Console(
        file=text, width=_WIDTH, highlight=False, markup=False, emoji=False, force_jupyter=False
    )
    print_result(result, console)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
