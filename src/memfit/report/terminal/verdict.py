"""Whether a run fits, what it needs, and why it may not: the verdict of a summary, as data and as text."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from rich.text import Text

from memfit.analysis.side_stream_peak_range import AT_ONCE
from memfit.analysis.trial_result import (
    MOST_STAND_INS,
    STAND_INS_READ,
    missing_updates_as_clause,
    stand_in_in_words,
    why_run_failed,
)
from memfit.records import ChildProcess, DryRun, MachineKind, OutOfMemory, RangeCause, ScriptEnd
from memfit.report.escape_control_characters import escaped
from memfit.report.places_in_words import location_in_words, short_path
from memfit.report.terminal.advice import steps_run_in_words
from memfit.units import MIB, format_bytes, format_gib
from memfit.user_lines import innermost_line_of_place


@dataclass(frozen=True, slots=True)
class VerdictLines:
    """The answer of a command: a line with its figures, and what is said below."""

    word: str
    """``FITS SO FAR``."""
    figures: tuple[str, ...]
    """``needs 8.50 GiB of 80.00 GiB``, ``leaves 71.50 GiB``."""
    colour: str = ""
    """Of the line, in the terminal; empty for none."""
    after: str = ""
    """What happened before: ``after 2 caught out-of-memory errors``."""
    lines: tuple[str, ...] = ()
    """Sentences about it."""

    @property
    def text(self) -> Text:
        """What the terminal shows."""
        text = Text(self.word, style=f"bold {self.colour}".strip())
        line = "   ".join((f" {self.after}" * bool(self.after), *self.figures))
        text.append(line, style="not bold" * bool(self.colour))
        return text.append("".join(f"\n{line}" for line in self.lines), style="not bold default")


def verdict_of_run(result: DryRun, *, hints: bool = True) -> VerdictLines:
    """Return whether a run fits, and what it needs or where memory ran out.

    Args:
        result: the run.
        hints: whether to name options of the command line that answer what it leaves open.
    """
    if is_pytorch_snapshot(result):
        return VerdictLines("SNAPSHOT", (f"{format_gib(result.peak_reserved)} reserved at most",))
    if result.verdict in ("fits", "tight"):
        return VerdictLines(
            result.verdict.upper() + " SO FAR" * result.is_partial,
            _memory_needed_and_taken(result),
            "green" if result.verdict == "fits" else "yellow",
            _after_caught(result),
            (*_uncertain(result), *_bound(result, hints=hints), *_covers(result, hints=hints)),
        )
    if result.verdict != "unknown":
        return _failure(result, hints=hints)
    failed = _failed(result.end)
    *before, last = _memory_needed_and_taken(result) if failed else (_memory_needed(result),)
    covered = "up to where it ended" if failed else "without children"
    if result.end.missing_updates:
        covered = "without the missing updates"
    elif not failed and not result.children:
        covered = "at least"
    return VerdictLines(
        "INCOMPLETE",
        (*before, f"{last} {covered}"),
        "yellow",
        lines=(
            *_bound(result, hints=hints),
            *_why_incomplete(result, hints=hints),
            *map(_child, result.children),
        ),
    )


def _failed(end: ScriptEnd) -> bool:
    """Return whether a script failed or was interrupted, other than for want of memory."""
    return end.reason in ("exception", "interrupted") or end.gave_up


def _why_incomplete(result: DryRun, *, hints: bool) -> Iterator[str]:
    """Yield how the script failed or which updates it did not make, and the stand-ins that may be why."""
    end = result.end
    if end.missing_updates:
        yield f"{end.missing_updates}: the figures lack what these updates need."
        if end.reason == "time":
            yield "memfit stopped the script when its time was up."
        if result.shortened:
            yield (
                "Passes over loaders are shorter in this run: if the optimizer steps after more batches, "
                "pass more --batches."
            )
    elif _failed(end):
        yield f"The {'resumed ' * result.resumed}script ended with {_ended(end)}"
    elif result.untried is not None and not result.children:
        yield (
            "The script may need more if GPU work on side streams finishes late. The second run, which "
            f"measures that, did not complete: {escaped(why_run_failed(result.untried))}."
        )
    if end.stand_ins:
        yield f"{STAND_INS_READ}:"
    yield from _stand_ins(end, hints=hints)


def _stand_ins(end: ScriptEnd, *, hints: bool) -> Iterator[str]:
    """Yield the first of the values that a script read, and where."""
    for read in end.stand_ins[:MOST_STAND_INS]:
        shown = replace(read, where=short_path(read.where), instead=read.instead * hints)
        yield f"  {escaped(stand_in_in_words(shown))}"


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
    return f"after {errors}" + f" ({where})" * bool(where)


def _covers(result: DryRun, *, hints: bool) -> Iterator[str]:
    """Yield which part of the script the answer covers."""
    end, shortened = result.end, ", shortened" * bool(result.shortened)
    if end.stopped:
        yield _covers_of_stopped(result, hints=hints)
    else:
        covered, has = ("branches that ran", "have") if end.stand_ins else ("whole run", "has")
        steps = f": {steps_run_in_words(result)}" if result.steps else f", which {has} no training step"
        yield f"This result covers the {covered}{shortened}{steps}."
    if end.stand_ins:
        branches = "On a GPU, the script may take other branches: it decides by GPU values."
        yield f"{branches} The ghost computes none, and returned:"
        yield from _stand_ins(end, hints=hints)


def _covers_of_stopped(result: DryRun, *, hints: bool) -> str:
    if result.end.reason == "time":
        steps = steps_run_in_words(result)
        text = f"This result covers {steps}: memfit stopped the script when its time was up."
        return f"{text} To run more, pass --seconds N." if hints else text
    later = f"later parts, such as evaluation{' or larger batches' * (not result.longest)}"
    if result.end.evaluation:
        where = escaped(short_path(result.end.evaluation))
        later = f"the eval() in {where}, perhaps an evaluation, and other later parts"
    text = f"This result covers {steps_run_in_words(result)}. Not run: {later}; they may need more."
    return f"{text} To run more, pass --to-end or --steps N." if hints else text


def _uncertain(result: DryRun) -> Iterator[str]:
    """Yield why a tight fit may fail."""
    if result.verdict != "tight":
        return
    again = "run out of memory once more" if result.caught else "not fit"
    yield (
        f"The run may {again}: the size of the CUDA context is assumed. The real size may be up to "
        f"{format_bytes(result.uncertainty)} larger. To measure it on your GPU, run memfit doctor --context."
    )


def why_no_more_advice(result: DryRun) -> str:
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
    if end.missing_updates:
        return f"{what}: {again}{missing_updates_as_clause(end)}."
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


def _bound(result: DryRun, *, hints: bool) -> Iterator[str]:
    """Yield which size makes the figures upper bounds, if they are."""
    if result.bound is None:
        return
    where = result.bound.where
    amount = format_bytes(result.bound.bytes)
    follows = f"; about {amount} of the peak depends on it" if result.bound.bytes else ""
    text = (
        f"At most: the size of {escaped(result.bound.operator)} depends on GPU values, and is assumed to "
        f"be the largest possible{follows} ({escaped(short_path(where))})."
    )
    key = innermost_line_of_place(where) or result.bound.operator
    options = f" --values {escaped(key)}=… sets it; --values count=1 gives the least of all such sizes."
    yield text + options * hints


def _failure(result: DryRun, *, hints: bool) -> VerdictLines:
    """Return how memory ran out."""
    word, colour = result.verdict.upper(), "yellow" if result.verdict == "may not fit" else "red"
    failure = result.out_of_memory
    if failure is None and result.range is not None:
        return VerdictLines(word, (_memory_shortage(result),), colour)
    if failure is None and result.end.reason != "out of memory":
        why = "NCCL takes the memory that is missing after PyTorch has reserved its own."
        return VerdictLines(word, (_memory_needed(result),), colour, lines=(why,))
    if failure is None:  # the script raised the error itself
        where = f"  {escaped(short_path(result.end.where))}" if result.end.where else ""
        return VerdictLines(word, (f"{escaped(_first_line(result.end.exception))}{where}",), colour)
    asked = f"{format_bytes(failure.requested)} requested, {format_bytes(failure.free)} free"
    lines = (
        f"Ran out in: {location_in_words(failure.place)}",
        f"{asked}{_fragmented(result, failure)}.",
        *_bound(result, hints=hints),
        " ".join(_remarks(result, failure, hints=hints)),
    )
    return VerdictLines(word, (_memory_shortage(result),), colour, lines=tuple(filter(None, lines)))


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
        if end.missing_updates:
            why = f"in a second run, with unlimited memory, {escaped(why_run_failed(end))}."
        why = escaped(_first_line(end.exception)) if end.reason == "refused" else why
        yield f"How much memory the script needs in total is unknown: {why}"
    if hints and result.advice is None and not result.stages:
        run = "run again" if result.device.machine is MachineKind.GHOST else "use memfit dry-run"
        yield f"To find changes that make the script fit, {run} with --advise."


def is_pytorch_snapshot(result: DryRun) -> bool:
    """Return whether this is a memory snapshot written by PyTorch, which names no device."""
    return not result.device.total.bytes


# ---- figures ----------------------------------------------------------------------------------------------


def _memory_needed_and_taken(result: DryRun) -> tuple[str, ...]:
    """Return what the run needs, what it takes on this GPU if that is more, and what it leaves."""
    room = result.device.total.bytes - result.device.in_use
    least, most = _process_bytes_range(result)
    if result.caught:  # its attempts fill the GPU, whatever its size
        cached = result.peak_reserved - result.peak_allocated
        return f"takes {_of_gpu(result, least, most)}", f"{format_gib(cached)} of it only cached"
    left = (
        f"at least {format_gib(room - most)}"
        if result.bound
        else _format_gib_range(room - most, room - least)
    )
    as_much = _memory_needed(result) == f"needs {_of_gpu(result, least, most)}"
    takes = "" if as_much else f", takes {_amount(result, least, most)}"
    return f"{_memory_needed(result)}{takes}", f"leaves {left}"


def _memory_needed(result: DryRun) -> str:
    """Return what the run needs, of what this GPU has."""
    if result.needs is None:
        return f"needs {_of_gpu(result, *_process_bytes_range(result))}"
    ends = [each.bytes for each in (result.needs, result.needs_without_workspaces) if each is not None]
    at_most = "at most " * (_races(result) and not result.bound)
    return f"needs {at_most}{_of_gpu(result, min(ends), max(ends))}"


def _races(result: DryRun) -> bool:
    return result.range is not None and RangeCause.STREAMS in result.range.causes


def _of_gpu(result: DryRun, least: int, most: int) -> str:
    return f"{_amount(result, least, most)} of {format_gib(result.device.total.bytes)}"


def _amount(result: DryRun, least: int, most: int) -> str:
    """Return between which figures the process and others are."""
    least, most = (end + result.device.in_use for end in (least, most))
    return f"at most {format_gib(most)}" if result.bound else _format_gib_range(least, most)


def _process_bytes_range(result: DryRun) -> tuple[int, int]:
    """Return the process's bytes on this GPU, least and most: the same if they are no range."""
    process = result.peak_process.bytes
    return (
        (process, process)
        if result.range is None
        else (result.range.process.least, result.range.process.most)
    )


def _in_mib(amount: int) -> str:
    return f"{amount / MIB:,.0f} MiB"


def _format_gib_range(least: int, most: int, shown: Callable[[int], str] = format_gib) -> str:
    """Return "1.50 to 1.75 GiB"; one figure where both read alike."""
    low, high = shown(least), shown(most)
    return high if low == high else f"{low.split()[0]} to {high}"


def _memory_shortage(result: DryRun) -> str:
    """Return what the run needs in all, if that is known, beside what the GPU has."""
    has, others, bare = result.device.total.bytes, result.device.in_use, result.needs_without_workspaces
    if result.needs is None:
        return f"on a GPU of {format_gib(has)}"
    most = result.needs.bytes + others
    differing = (shown for shown in (format_gib, _in_mib) if shown(most) != shown(has))
    shown = next(differing, lambda amount: f"{amount:,} B")
    if result.bound or _races(result):
        amount = f"at most {shown(most)}"
    elif bare is None:
        amount = "at least " * (result.needs.source == AT_ONCE) + shown(most)
    elif shown(bare.bytes + others) == shown(has):  # the GPU on which it failed is the lower end
        amount = f"up to {shown(most)}"
    else:
        amount = _format_gib_range(bare.bytes + others, most, shown)
    return f"needs {amount}; this GPU has {shown(has)}"
