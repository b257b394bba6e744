"""The summary of a dry run or a recording, on the terminal.

Text from a trace is printed with its control characters escaped, so that a module or file name can neither
colour the terminal nor move its cursor.
"""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memfit.records import (
    DryRun,
    MachineKind,
    Provenance,
    Shortened,
    Stage,
    StageUse,
    worst_provenance,
)
from memfit.records.command_as_typed import command_as_typed
from memfit.report.escape_control_characters import escaped
from memfit.report.places_in_words import location_in_words, short_path
from memfit.report.terminal.advice import advice_lines, steps_run_in_words
from memfit.report.terminal.layout import ReportTable, TableCell, TableRow, plain_table, share_as_bar
from memfit.report.terminal.longest_batch import longest_batch_lines
from memfit.report.terminal.notes import note_lines
from memfit.report.terminal.rank_table import peak_range_line, rank_table
from memfit.report.terminal.step_time import step_time_lines
from memfit.report.terminal.verdict import is_pytorch_snapshot, verdict_of_run, why_no_more_advice
from memfit.units import MIB, format_bytes, format_gib, unit_for_table

MACHINES = {
    MachineKind.GHOST: "ghost: a stand-in CUDA runtime. PyTorch's allocations are real; nothing is computed, "
    "no GPU is used.",
    MachineKind.CARD: "recorded on this GPU. Memory outside PyTorch's allocator was read while "
    "the script ran.",
    MachineKind.REHEARSAL: "REHEARSAL: memfit's ghost stood in for the GPU. Nothing was measured on a GPU.",
}


def print_summary(result: DryRun, console: Console, *, hints: bool = True, notes: bool = False) -> None:
    """Print the verdict, the table from allocated to process, growth, notes and advice.

    Args:
        result: what to print.
        console: where to print it.
        hints: whether it names options of the command line that answer what it leaves open.
        notes: whether it lists every note.
    """
    console.print(verdict_of_run(result, hints=hints).text)
    console.print(what_ran_on_what(result), style="dim")
    console.print()
    if result.ranks:
        console.print(rank_table(result.ranks).in_terminal())
        console.print()
        console.print(f"Rank {result.ranks[0].rank}:")
    if result.stages:
        console.print(stage_table(result).in_terminal())
        for text in warnings_of_run_stages(result):
            style = "dim" if text.startswith(_SHORTENED) else "yellow"
            console.print(Text(escaped(text), style=style))
        console.print()
    console.print(f"Peak in: {location_in_words(result.peak_place)}")
    console.print(_peak_term_table(result, console.width))
    for line in (
        *_below_table(result),
        *step_time_lines(result.step_time, result.step_time_unknown),
        *note_lines(result, full=notes, hints=hints),
    ):
        console.print(line)
    if result.advice is not None:
        for line in advice_lines(result, why_no_more_advice(result)):
            console.print(line)
    if result.device.machine in MACHINES:
        console.print(MACHINES[result.device.machine], style="dim")


def what_ran_on_what(result: DryRun) -> Text:
    """Return what ran, and on what."""
    if is_pytorch_snapshot(result):
        return Text("a memory snapshot written by PyTorch: without device, phases and categories")
    parts = [
        escaped(" ".join(command_as_typed(result.command)[:1])),
        escaped(result.device.name),
        f"torch {escaped(result.versions.get('torch', '?'))}",
        str(result.rank or ""),
        f"{result.device.machine}, {steps_run_in_words(result)}",
    ]
    if result.device.in_use:
        parts.append(f"{format_gib(result.device.in_use)} in use by others")
    return Text(" · ".join(part for part in parts if part))


def _below_table(result: DryRun) -> Iterator[Text | str]:
    """Yield what the table's rows do not add up to: ranges, memory of the host, growth and batches."""
    if result.range is not None:
        yield peak_range_line(result.range)
    yield from _host_memory(result)
    if (grown := growth_in_words(result)).plain:
        yield grown
    yield from longest_batch_lines(result)


def _host_memory(result: DryRun) -> Iterator[Text]:
    """Yield a line on the host memory of the rank, and of all ranks of its machine."""
    kinds = {"Pinned host memory": result.pinned, "Optimizers in other host memory": result.unpinned}
    total = 0
    for kind, figure in kinds.items():
        if figure is not None and figure.bytes >= MIB:  # item() pins a number of 4 bytes
            why = f", {figure.source}" * (figure.provenance is not Provenance.MEASURED)
            yield Text(f"{kind}: {format_bytes(figure.bytes)} ({figure.provenance}{why}).")
            total += figure.bytes
    nproc = (result.rank and result.rank.nproc) or 1
    if total and nproc > 1:
        yield Text(f"Host memory of {nproc} such ranks, on one machine: {format_bytes(total * nproc)}.")


def growth_in_words(result: DryRun) -> Text:
    """Return whether memory grows from step to step; empty for a run that ran out, unless it leaks."""
    growth = result.growth
    if growth.leak:
        where = f", held by {escaped(short_path(growth.line))}" if growth.line else ""
        return Text(
            f"Still growing by {format_bytes(growth.bytes_per_step)} a step "
            f"after {result.steps} steps{where}.",
            style="yellow",
        )
    if result.ran_out:
        return Text()
    if growth.bytes_per_step:
        more = "more" if growth.bytes_per_step > 0 else "less"
        return Text(
            f"Not steady: the last step left {format_bytes(abs(growth.bytes_per_step))} {more} than the step "
            "before, none of it older than a step. Batches may vary in size, or an object is recreated."
        )
    if growth.steady_from is not None:
        # The first steady step may still allocate what stays, such as the optimizer's state.
        later = range(growth.steady_from + 1, result.steps + 1)
        steps = f"steps {later[0]} to {later[-1]} each" if len(later) > 1 else f"step {result.steps}"
        return Text(f"Steady after step {growth.steady_from}: {steps} left memory as it was.")
    seen = "are in this history" if result.steps > 1 else "completed"  # a watch drops older steps
    return Text(f"Fewer than two training steps {seen}, so growth is unknown.", style="dim")


_LEFT = MIB
"""Bytes left behind from which on they are worth a line: PyTorch rounds up small tensors."""
_SHORTENED = "Shortened:"


def stage_table(result: DryRun) -> ReportTable:
    """Return a row for each stage, the worst one marked; file names are as in the trace."""
    unit = unit_for_table(result.peak_reserved)
    numbers = ("times", "allocated", "process")
    rows = []
    for use in result.stages:
        cells = (
            TableCell(use.name),
            TableCell(f"{use.times:,}"),
            *(TableCell(unit.format(size), size) for size in (use.allocated, use.process.bytes)),
            TableCell(escaped(_stage_place(use))),
        )
        rows.append(TableRow(cells, marked=use is result.worst_stage))
    return ReportTable(("stage", *numbers, "most allocated in"), numbers, rows)


def _stage_place(use: StageUse) -> str:
    """Return where a stage allocated most. Outside of training steps, phases of steps say nothing."""
    place = use.place
    if place is None:
        return "no more than before"
    phase = place.phase if use.stage in (Stage.TRAINING, Stage.EVALUATION) else ""
    function = f" in {place.function}" if place.function and not place.module else ""
    parts = [phase, place.module, f"{short_path(place.line)}{function}"]
    return "ran out of memory: " * use.ran_out + " · ".join(part for part in parts if part)


def warnings_of_run_stages(result: DryRun) -> Iterator[str]:
    """Yield what is amiss in stages, and what was shortened; file names are as in the trace."""
    for use in result.stages:
        if use.gradients:
            yield (
                f"The {use.name} records gradients, and so keeps activations: run it under torch.no_grad()."
            )
        if use.leaves >= _LEFT:
            yield _leaves(use)
    if result.leaks_in_short_passes and not result.ran_out:
        left = (result.device.total.bytes - result.peak_process.bytes) // result.growth.bytes_per_step
        yield (
            "Memory grows from step to step, and the script makes more steps than were run. Estimated from "
            f"these, memory runs out about {max(0, left):,} steps later."
        )
    resumed = {use.stage for use in result.stages if use.resumed}
    if resumed and Stage.TRAINING not in resumed:
        yield (
            "The resumed run trained nothing, so its training is unknown: have it train on, for example for "
            "more epochs."
        )
    if result.shortened and result.end.reason == "exception":
        yield (
            "Passes over loaders are shorter in this run. If the script counts batches in another way, pass "
            "more --batches, or --to-end instead of --whole."
        )
    if result.shortened:
        yield f"{_SHORTENED} {'; '.join(map(_shortened, result.shortened))}."


def _leaves(use: StageUse) -> str:
    where = f", most of it allocated in {short_path(use.leaves_line)}" * bool(use.leaves_line)
    return f"The {use.stage} leaves {format_bytes(use.leaves)} behind that training then runs beside{where}."


def _shortened(each: Shortened) -> str:
    if each.is_option:
        of = f"{each.of:,}" if each.of is not None else "no limit"
        return f"{each.where} {each.to:,} of {of}"
    of = f"{each.of:,}" if each.of is not None else "an unknown number of"
    return f"{each.to:,} of {of} batches ({short_path(each.where) or 'a loader of a library'})"


_WITH_BARS, _WITH_SHARES = 80, 56  # terminal columns from which on they are shown


def _peak_term_table(result: DryRun, width: int) -> Table:
    """Return the terms of the peak; below them, what two tools would show of it.

    nvidia-smi lists a process. The first version of ``nvmlDeviceGetMemoryInfo`` counts all that is used on
    the card: by this process, by others, and by the driver. The second version leaves the driver's part out.
    """
    total = max(result.peak_process.bytes, 1)
    unit = unit_for_table(result.peak_reserved)
    table = plain_table("wrrll")
    table.columns[-1].style = "dim"
    for term in result.terms:
        total_row = term.is_total
        if not total_row and unit.rounds_to_zero(term.figure.bytes):
            continue
        name = Text(("── " if total_row else "  ") + term.name, style="bold" * total_row)
        share = term.figure.bytes / total
        table.add_row(
            name,
            unit.format(term.figure.bytes),
            "" if total_row or width < _WITH_SHARES else f"{100 * share:.0f} %",
            "" if total_row or width < _WITH_BARS else share_as_bar(share),
            term.figure.provenance,
        )
    shown = f"{-(-result.peak_process.bytes // MIB):,} MiB"
    table.add_row(Text("   in nvidia-smi"), shown, "", "", result.peak_process.provenance)
    if (driver := result.device.driver) is not None:
        whole_card = result.peak_process.bytes + driver.bytes + result.device.in_use
        shown = f"{-(-whole_card // MIB):,} MiB"
        sure = worst_provenance(result.peak_process.provenance, driver.provenance)
        table.add_row(Text("   in NVML's v1"), shown, "", "", sure)
    return table
