"""The summary of a dry run or a recording, on the terminal.

Text from a trace is printed with its control characters escaped, so that a module or file name can neither
colour the terminal nor move its cursor.
"""

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from memfit.records import (
    ChildProcess,
    DryRun,
    Machine,
    OutOfMemory,
    Provenance,
    ScriptEnd,
    ScriptLocation,
    Stage,
)
from memfit.records.job_target import typed
from memfit.report.escape import escaped
from memfit.report.short_path import short_path
from memfit.report.terminal.advice import advice_lines, steps_in_words
from memfit.report.terminal.longest_batch import longest_lines
from memfit.report.terminal.needs import needed, needs_and_takes, shortage, span, taken
from memfit.report.terminal.notes import note_lines
from memfit.report.terminal.ranks import range_line, rank_table
from memfit.report.terminal.run_stages import stage_parts
from memfit.report.terminal.term_table import term_table
from memfit.units import MIB, format_bytes, format_gib
from memfit.user_frame import innermost_line

MACHINES = {
    Machine.GHOST: "ghost: a stand-in CUDA runtime. PyTorch's allocations are real; nothing is computed, "
    "no GPU is used.",
    Machine.CARD: "recorded on this GPU. Memory outside PyTorch's allocator was read while the script ran.",
    Machine.REHEARSAL: "REHEARSAL: memfit's ghost stood in for the GPU. Nothing was measured on a GPU.",
    Machine.CPU: "CPU tensors that were allocated after memfit.arena() was called, as the arena logged them.",
}


def print_summary(result: DryRun, console: Console, *, hints: bool = True, notes: bool = False) -> None:
    """Print the verdict, the table from allocated to process, growth, notes and advice.

    Args:
        result: what to print.
        console: where to print it.
        hints: whether it names options of the command line that answer what it leaves open.
        notes: whether it lists every note.
    """
    console.print(verdict(result, hints=hints))
    console.print(subject(result), style="dim")
    console.print()
    if result.ranks:
        console.print(rank_table(result.ranks))
        console.print()
        console.print(f"Rank {result.ranks[0].rank}:")
    for part in stage_parts(result):
        console.print(part)
    console.print(_peak(result))
    console.print(term_table(result, console.width))
    for line in _below_table(result):
        console.print(line)
    for line in note_lines(result, full=notes, hints=hints):
        console.print(line)
    if result.advice is not None:
        for line in advice_lines(result, untried(result)):
            console.print(line)
    if result.device.machine in MACHINES:
        console.print(MACHINES[result.device.machine], style="dim")


def verdict(result: DryRun, *, hints: bool = True) -> Text:
    """Return whether the run fits, and what it needs or where memory ran out; ``hints`` as above."""
    if _is_snapshot(result):
        return Text(f"SNAPSHOT   {format_gib(result.peak_reserved)} reserved at most", style="bold")
    if result.verdict in ("fits", "tight"):
        text = Text(result.verdict.upper(), style=f"bold {'green' if result.verdict == 'fits' else 'yellow'}")
        text.append(" SO FAR" * result.is_partial)
        text.append(f"{_after_caught(result)}   {needs_and_takes(result)}", style="not bold")
        below = f"{_uncertain(result)}{_bound(result, hints=hints)}\n{_covers(result, hints=hints)}"
        return text.append(below, style="not bold default")
    if result.verdict == "unknown":
        text = Text("INCOMPLETE", style="bold yellow")
        failed = result.end.reason in ("exception", "interrupted") or result.end.gave_up
        needs = (
            f"{needs_and_takes(result)} up to where it ended"
            if failed
            else f"{needed(result)} without children"
        )
        text.append(f"   {needs}", style="not bold")
        lines = [f"The {'resumed ' * result.resumed}script ended with {_ended(result.end)}"] if failed else []
        lines += map(_child, result.children)
        more = _bound(result, hints=hints) + "".join(f"\n{line}" for line in lines)
        return text.append(more, style="not bold default")
    return _failure(result, hints=hints)


def _child(child: ChildProcess) -> str:
    """Return that a process which the script started used the GPU, what it held, and how it failed."""
    if child.peak is None and child.exception:
        why = escaped(_first_line(child.exception))
        return f"Not included: {escaped(child.name)}, which the script started: {why}."
    if child.peak is None:
        return (
            f"Not included: {escaped(child.name)}, which the script started, loads PyTorch where memfit "
            "cannot follow it (python -I, environment variables of its own, or another Python). "
            "To measure it, dry-run it by itself."
        )
    failed = f", and failed: {escaped(_first_line(child.exception))}" if child.exception else ""
    return (
        f"Not included: {escaped(child.name)}, which the script started, also used the GPU (at least "
        f"{format_gib(child.peak.bytes)}){failed}. To measure it, dry-run it by itself."
    )


def _after_caught(result: DryRun) -> str:
    """Return how many out-of-memory errors the script caught, and where the first was raised."""
    if not result.caught or result.out_of_memory is None:
        return ""
    errors = f"{result.caught} caught out-of-memory error{'s' * (result.caught != 1)}"
    where = escaped(short_path(result.out_of_memory.place.line))
    return f" after {errors}" + f" ({where})" * bool(where)


def _covers(result: DryRun, *, hints: bool) -> str:
    """Return which part of the script the answer covers."""
    if not result.end.stopped:
        steps = f": {steps_in_words(result)}" * bool(result.steps)
        return f"This result covers the whole run{', shortened' * bool(result.shortened)}{steps}."
    if result.end.reason == "time":
        text = f"This result covers {steps_in_words(result)}: memfit stopped the script when its time was up."
        return f"{text} To run more, pass --seconds N." if hints else text
    later = f"later parts, such as evaluation{' or larger batches' * (not result.longest)}"
    if result.end.evaluation:
        where = escaped(short_path(result.end.evaluation))
        later = f"the eval() in {where}, perhaps an evaluation, and other later parts"
    text = f"This result covers {steps_in_words(result)}. Not run: {later}; they may need more."
    return f"{text} To run more, pass --to-end or --steps N." if hints else text


def _uncertain(result: DryRun) -> str:
    """Return, on a line of its own, why a tight fit may fail; empty otherwise."""
    if result.verdict != "tight":
        return ""
    again = "run out of memory once more" if result.caught else "not fit"
    return (
        f"\nThe run may {again}: the size of the CUDA context is assumed. The real size may be up to "
        f"{format_bytes(result.uncertainty)} larger. To measure it on your GPU, run memfit doctor --context."
    )


def untried(result: DryRun) -> str:
    """Return why there is no more advice; empty if everything was tried."""
    end = result.untried
    if end is None:
        return ""
    what = "No more advice" if result.advice else "No advice"
    if end.reason == "interrupted":
        return f"{what}: interrupted."
    if end.reason == "refused":
        return f"{what}: {escaped(_first_line(end.exception))}"
    again = "" if end == result.end else "when run again without input, "
    return f"{what}: {again}the script ended with {_ended(end)}"


def _ended(end: ScriptEnd) -> str:
    """Return what a script ended with, and where."""
    parts = [f"exit code {end.exit_code}"] if end.gave_up or not end.exception else []
    parts += [escaped(_first_line(end.exception))] if end.exception else []
    return ": ".join(parts) + f"  {escaped(short_path(end.where))}" * bool(end.where)


def _first_line(text: str) -> str:
    """Return the first line of an exception, joined with the next one if it names the type alone."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    count = 2 if lines[:1] and lines[0].endswith(":") else 1
    first = " ".join(lines[:count])
    return f"{first} ..." if lines[count:] else first


def _bound(result: DryRun, *, hints: bool) -> str:
    """Return, on a line of its own, which size makes the figures upper bounds; empty if they are none."""
    if result.bound is None:
        return ""
    where = result.bound.where
    amount = format_bytes(result.bound.bytes)
    follows = f"; about {amount} of the peak depends on it" if result.bound.bytes else ""
    text = (
        f"\nAt most: the size of {escaped(result.bound.operator)} depends on GPU values, and is assumed to "
        f"be the largest possible{follows} ({escaped(short_path(where))})."
    )
    key = innermost_line(where) or result.bound.operator
    options = f" --values {escaped(key)}=… sets it; --values count=1 gives the least of all such sizes."
    return text + options * hints


def _failure(result: DryRun, *, hints: bool) -> Text:
    text = Text(
        result.verdict.upper(), style="bold yellow" if result.verdict == "may not fit" else "bold red"
    )
    failure = result.out_of_memory
    if failure is None and result.range is not None:
        has = format_gib(result.device.total.bytes - result.device.in_use)
        return text.append(f"   needs {span(*taken(result))}; this GPU has {has}", style="not bold")
    if failure is None and result.end.reason != "out of memory":
        why = "NCCL takes the memory that is missing after PyTorch has reserved its own."
        return text.append(f"   {needed(result)}\n{why}", style="not bold")
    if failure is None:  # the script raised the error itself
        where = f"  {escaped(short_path(result.end.where))}" if result.end.where else ""
        return text.append(f"   {escaped(_first_line(result.end.exception))}{where}", style="not bold")
    text.append(f"   {shortage(result)}", style="not bold")
    asked = f"{format_bytes(failure.requested)} requested, {format_bytes(failure.free)} free"
    lines = (
        f"Ran out in: {in_words(failure.place)}",
        f"{asked}{_fragmented(result, failure)}.",
        _bound(result, hints=hints).strip(),
        " ".join(_remarks(result, failure, hints=hints)),
    )
    return text.append("".join(f"\n{line}" for line in lines if line), style="not bold default")


def _fragmented(result: DryRun, failure: OutOfMemory) -> str:
    """Return that PyTorch had as much memory as is missing, but not for this request; empty if it had not."""
    missing = failure.shortfall
    if result.needs is not None:  # requests that would have followed may need more
        missing = max(missing, result.needs.bytes + result.device.in_use - result.device.total.bytes)
    if not failure.shortfall or failure.cached < missing:
        return ""
    more = format_bytes(failure.cached)
    return f"; PyTorch caches {more} more, in blocks that this request cannot use (fragmentation)"


def _remarks(result: DryRun, failure: OutOfMemory, *, hints: bool) -> Iterator[str]:
    if result.end.reason != "out of memory":
        yield "The script caught the error and continued."
    elif not failure.shortfall:
        yield (
            "The device had free memory, but the process reached its limit: the script or "
            "PYTORCH_ALLOC_CONF sets a memory fraction."
        )
    if result.needs_without_workspaces is not None and not result.bound:
        yield (
            "How much is enough depends on the workspaces of convolutions: where memory is short, PyTorch "
            "takes engines with smaller ones. A dry run with more memory tells."
        )
    if result.needs is None and result.untried is not None:
        end = result.untried
        why = "a second run, with unlimited memory, did not complete."
        why = escaped(_first_line(end.exception)) if end.reason == "refused" else why
        yield f"How much memory the script needs in total is unknown: {why}"
    if hints and result.advice is None and not result.stages:
        run = "run again" if result.device.machine is Machine.GHOST else "use memfit dry-run"
        yield f"To find changes that make the script fit, {run} with --advise."


def _is_snapshot(result: DryRun) -> bool:
    return not result.device.total.bytes


def subject(result: DryRun) -> Text:
    """Return what ran, and on what."""
    if _is_snapshot(result):
        return Text("a memory snapshot written by PyTorch: without device, phases and categories")
    parts = [
        escaped(" ".join(typed(result.command)[:1])),
        escaped(result.device.name),
        f"torch {escaped(result.versions.get('torch', '?'))}",
        str(result.rank or ""),
        f"{result.device.machine}, {steps_in_words(result)}",
    ]
    if result.device.in_use:
        parts.append(f"{format_gib(result.device.in_use)} in use by others")
    return Text(" · ".join(part for part in parts if part))


def in_words(place: ScriptLocation) -> str:
    """Return where the script was, in one line; outside modules, with the function."""
    function = f" in {escaped(place.function)}" if place.function and not place.module else ""
    trains = not place.stage or place.stage.startswith(Stage.TRAINING)  # elsewhere, a step has no meaning
    step = f"step {place.step}" if place.step and trains else ""
    parts = [
        place.stage,
        step,
        place.phase if trains or place.module else "",
        escaped(place.module),
        escaped(place.op),
        f"{escaped(short_path(place.line))}{function}",
    ]
    return " · ".join(part for part in parts if part)


def _peak(result: DryRun) -> Text:
    return Text(f"Peak in: {in_words(result.peak_place)}")


def _below_table(result: DryRun) -> Iterator[Text | str]:
    """Yield what the table's rows do not add up to: ranges, memory of the host, growth and batches."""
    if result.range is not None:
        yield range_line(result.range)
    if (pinned := result.pinned) is not None and pinned.bytes >= MIB:  # item() pins a number of 4 bytes
        why = f", {pinned.source}" * (pinned.provenance is not Provenance.MEASURED)
        yield Text(f"Pinned host memory: {format_bytes(pinned.bytes)} ({pinned.provenance}{why}).")
    if (grown := growth(result)).plain:
        yield grown
    yield from longest_lines(result)


def growth(result: DryRun) -> Text:
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
