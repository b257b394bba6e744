"""A script under several strategies, on the terminal: a row for each, and what to write to get it."""

import json
import shlex
from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memfit.analysis.strategy_comparison import AS_IN
from memfit.records import ComparedRun, StrategyComparison
from memfit.records.command_as_typed import command_as_typed
from memfit.report.escape_control_characters import escaped
from memfit.report.terminal.layout import plain_table, share_as_bar, subject_in_words
from memfit.report.terminal.plan_instructions import (
    code_before_sharding,
    launch_instruction,
    own_sharding_instruction,
    sharded_optimizer_code,
)
from memfit.report.terminal.rank_table import format_byte_range
from memfit.units import format_gib, format_seconds, unit_for_table

_SHARDED, _OPTIMIZER = "memfit.Sharding(", "memfit.OptimizerState("

_BAR = 0.5  # of the longest bar of other tables
_UNKNOWN = "\N{EN DASH}"


def print_strategy_comparison(result: StrategyComparison, console: Console) -> None:
    """Print a row for each set of strategies, why some have no figures, and what to write."""
    subject = subject_in_words(result.command, result.device.name, versions=result.versions)
    console.print(Text(f"{subject} · {format_gib(result.device.total.bytes)} a GPU", style="dim"))
    console.print(what_rows_cover(result))
    console.print()
    console.print(_table(result))
    for line in (*comparison_remarks(result), *instructions_of_comparison(result)):
        console.print(line)
    console.print(EXPLANATION, style="dim")


EXPLANATION = (
    "Each row is a run of the script on the ghost. allocated and reserved are the allocator's peaks with "
    "unlimited memory; process is the smallest GPU that runs it, with the CUDA context and NCCL, which are "
    "assumed."
)


def comparison_remarks(result: StrategyComparison) -> Iterator[str]:
    """Yield what the rows do not say: why some have no figures, and what the times are based on."""
    if result.interrupted:
        yield "Interrupted: the other strategies were not tried."
    for reason in dict.fromkeys(run.reason for run in result.runs if run.reason):
        names = ", ".join(run.name for run in result.runs if run.reason == reason)
        yield f"Not possible: {names}: {escaped(reason.partition('. ')[0].rstrip('.'))}."
    if result.rule:
        yield f"time: of a training step, and relative to as written ({result.rule})."
    if result.draws and any("BatchSlices" in code for run in result.runs if run.peak for code in run.plan):
        yield "Slices draw random numbers, such as those of dropout, one by one: others than the whole batch."


def what_rows_cover(result: StrategyComparison) -> str:
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
    peaks = [run.peak for run in result.runs if run.peak is not None]
    unit = unit_for_table(max(peak.reserved.most for peak in peaks))
    most = max(peak.process.most for peak in peaks)
    several = result.world_size > 1
    headings = ("strategies", "process", "", "allocated", "reserved", "time", "results")
    table = plain_table("lrlrrrlrw" if several else "lrlrrrlw", *headings, *["rank"] * several, "verdict")
    for run in result.runs:
        if run.peak is None:
            table.add_row(run.name, Text(_UNKNOWN, style="dim"))
            continue
        table.add_row(
            run.name,
            format_byte_range(run.peak.process, unit),
            Text(share_as_bar(_BAR * run.peak.process.most / most), style="dim"),
            f"{format_byte_range(run.peak.allocated, unit)} {run.provenance:<9}",
            format_byte_range(run.peak.reserved, unit),
            step_time_in_words(run),
            run.equality,
            *["" if run.rank is None else str(run.rank)] * several,
            Text(run.verdict, style="" if run.verdict == "fits" else "bold yellow"),
        )
    return table


def step_time_in_words(run: ComparedRun) -> str:
    """Return the time of a row, or that it is not known."""
    if run.time is None:
        return _UNKNOWN
    seconds = "" if run.step_time is None else f"{format_seconds(run.step_time.seconds)} "
    return f"{seconds}{run.time:.2f}x"


def instructions_of_comparison(result: StrategyComparison) -> Iterator[str]:
    """Yield the code of each row, and where it and the options of the script's own sharding belong."""
    for own in result.sharding_calls:
        if own.options or own.others:
            yield f"\nTo train with an option of {own.name}, {own_sharding_instruction(own, 'it')}"
    applied = [run for run in result.runs if run.models]
    yield from _as_it_is(result, applied)
    rows = [run for run in applied if not run.name.startswith(AS_IN)]
    if plans := {run.name: plan for run in rows if (plan := _plan(run, result))}:
        yield from _in_the_script(result, plans)


def _as_it_is(result: StrategyComparison, applied: list[ComparedRun]) -> Iterator[str]:
    """Yield how to train the unmodified script with what a row has."""
    script = escaped(shlex.join(command_as_typed(result.command)))
    for run in applied:
        if run.name.startswith(AS_IN):
            file = escaped(shlex.quote(run.name.removeprefix(AS_IN)))
            yield f"\nTo train the script as it is: memfit train --plan {file} {script}"
        elif run.settings and "sharding" not in run.settings:
            settings = escaped(json.dumps(run.settings))
            yield f"\nTo train the script as it is, with a row's settings in a file such as {settings}:"
            yield f"    memfit train --plan row.json {script}"
            return


def _in_the_script(result: StrategyComparison, plans: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Yield the code of each row, and where it belongs."""
    models = escaped(", ".join(next(run.models for run in result.runs if run.models)))
    sharded = any(code.startswith(_SHARDED) for run in result.runs if run.models for code in run.plan)
    yield "\nTo train with the plan of a row, write:"
    if sharded and not result.distributed:
        yield from code_before_sharding()
    yield f"    model = memfit.apply(model, PLAN)  # before the optimizer is created: {models}"
    if any(code.startswith(_OPTIMIZER) for plan in plans.values() for code in plan):
        yield "    memfit.apply(model, PLAN, optimizer=optimizer)  # after that, if PLAN has OptimizerState"
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
