"""A script under several strategies, on the terminal: a row for each, and what to write to get it."""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memfit.records import ComparedRun, StrategyComparison
from memfit.report.escape_control_characters import escaped
from memfit.report.places_in_words import location_in_cell
from memfit.report.terminal.layout import plain_table, subject_in_words
from memfit.report.terminal.plan_instructions import (
    code_before_sharding,
    launch_instruction,
    own_sharding_instruction,
    sharded_optimizer_code,
)
from memfit.report.terminal.rank_table import format_byte_range
from memfit.units import format_gib, unit_for_table

_SHARDED = "memfit.Sharding("


def print_strategy_comparison(result: StrategyComparison, console: Console) -> None:
    """Print a row for each set of strategies, why some have no figures, and what to write."""
    subject = subject_in_words(result.command, result.device.name, versions=result.versions)
    console.print(Text(f"{subject} · {format_gib(result.device.total.bytes)} a GPU", style="dim"))
    console.print(_covers(result))
    console.print()
    console.print(_table(result))
    if result.interrupted:
        console.print("Interrupted: the other strategies were not tried.")
    for reason in dict.fromkeys(run.reason for run in result.runs if run.reason):
        names = ", ".join(run.name for run in result.runs if run.reason == reason)
        console.print(f"Not possible: {names}: {escaped(reason)}")
    for line in (*_options_to_write(result), *_to_write(result)):
        console.print(line)
    console.print(
        "Each row is a run of the script on the ghost with unlimited memory. process is what it then needs, "
        "with the CUDA context and NCCL, which are assumed.",
        style="dim",
    )


def _covers(result: StrategyComparison) -> str:
    """Return what the rows are of."""
    if result.world_size == 1:
        return "On one GPU:"
    if result.distributed:
        return f"On {result.world_size:,} GPUs, as the script trains on them; the rank that needs most:"
    return (
        f"On {result.world_size:,} GPUs: the rank that needs most. The ranks share each batch of the "
        "script's."
    )


def _table(result: StrategyComparison) -> Table:
    unit = unit_for_table(max(run.peak.reserved.most for run in result.runs if run.peak is not None))
    several = result.world_size > 1
    headings = ("strategies", "allocated", "process", "change", *["rank"] * several, "verdict", "peak in")
    table = plain_table("lrrrrww" if several else "lrrrww", *headings)
    for run in result.runs:
        rank = ["" if run.rank is None else str(run.rank)] if several else []
        if run.peak is None or run.place is None:
            table.add_row(run.name, "", "", "", *rank, Text("not possible", style="dim"), "")
            continue
        table.add_row(
            run.name,
            f"{format_byte_range(run.peak.allocated, unit)} {run.provenance:<9}",
            format_byte_range(run.peak.process, unit),
            "" if not run.change else unit.number(run.change, "+"),
            *rank,
            Text(run.verdict, style="" if run.verdict == "fits" else "bold yellow"),
            location_in_cell(run.place),
        )
    return table


def _options_to_write(result: StrategyComparison) -> Iterator[str]:
    """Yield where the options of the script's own sharding belong."""
    for own in result.sharding_calls:
        if own.options or own.others:
            yield f"\nTo train with an option of {own.name}, {own_sharding_instruction(own, 'it')}"


def _to_write(result: StrategyComparison) -> Iterator[str]:
    """Yield the code of each row, and where it belongs."""
    plans = {run.name: plan for run in result.runs if run.models and (plan := _plan(run, result))}
    if not plans:
        return
    models = escaped(", ".join(next(run.models for run in result.runs if run.models)))
    sharded = any(code.startswith(_SHARDED) for run in result.runs if run.models for code in run.plan)
    yield "\nTo train with the plan of a row, write:"
    if sharded and not result.distributed:
        yield from code_before_sharding()
    yield f"    model = memfit.apply(model, PLAN)  # before the optimizer is created: {models}"
    if sharded and any("zero1" in code for run in result.runs for code in run.plan):
        yield sharded_optimizer_code("  # for ZeRO-1 only")
    if sharded and not result.distributed:
        yield launch_instruction(result.nproc)
    yield "PLAN is:"
    width = max(map(len, plans))
    for name, plan in plans.items():
        yield f"    {name:<{width}}  [{', '.join(plan)}]"
    if not any("ffload" in code for run in result.runs if run.models for code in run.plan):
        return
    yield (
        "Offload keeps activations, or the inputs of checkpointed blocks, in host memory; with FSDP2, the "
        "shards of parameters, gradients and optimizer state."
    )


def _plan(run: ComparedRun, result: StrategyComparison) -> tuple[str, ...]:
    """Return the plan to apply: a model that the script itself shards gets the rest."""
    return tuple(code for code in run.plan if not (result.distributed and code.startswith(_SHARDED)))
