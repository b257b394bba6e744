"""What sets the number of samples in a script's batches; other numbers, and batches in parts.

In parts (*micro-batches*), a batch has several forwards and backwards, and an update sums their gradients:
it sees as many samples as before. With smaller batches, it sees fewer.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from memfit.records import (
    Change,
    DividedBatches,
    LoaderBatchSize,
    PlanRun,
    ScriptOption,
    ScriptOptionPurpose,
    StepOperations,
    Term,
    Trace,
)

ASSUMED = "assumed: the loss is a mean over samples that do not depend on each other"
SEEN = "two recorded steps show no samples that depend on each other"
"""In place of ``ASSUMED`` where that is so."""


def find_batch_size_setting(trace: Trace) -> ScriptOption | LoaderBatchSize | None:
    """Return what sets the number of samples in a batch of a script; None if memfit found nothing."""
    return _option(trace, ScriptOptionPurpose.BATCH_SIZE) or trace.loader


def batch_size_of_setting(setting: ScriptOption | LoaderBatchSize) -> int:
    """Return the number of samples in a batch."""
    return setting.value if isinstance(setting, ScriptOption) else setting.size


def batch_size_change(setting: ScriptOption | LoaderBatchSize, size: int) -> Change:
    """Return the change that gives batches another number of samples, and nothing else."""
    now = batch_size_of_setting(setting)
    if isinstance(setting, ScriptOption):
        change = Change(arguments=setting.with_value(size))
        how = " ".join(change.arguments)
    else:
        change = Change(loader=replace(setting, size=size), where=setting.line)
        how = f"DataLoader(batch_size={size})"
        if setting.library:
            how = f"a batch size of {size} for the DataLoader that {setting.library} creates"
    return replace(
        change,
        words=(f"batch size {size} instead of {now}",),
        how=(f"{how}, now {now}",),
        costs=f"each update sees {size} sample{'s' * (size != 1)} instead of {now}",
        batch_size=size,
    )


def smaller_batch_changes(trace: Trace) -> list[Change]:
    """Return the ways to halve a script's batches, once or more, largest first: each update sees fewer."""
    setting = find_batch_size_setting(trace)
    if setting is None:
        return []
    size = batch_size_of_setting(setting)
    return [batch_size_change(setting, size >> times) for times in range(1, size.bit_length())]


def batch_division_changes(
    trace: Trace, *, draws: bool, loop_draws: bool = False, by_options: bool = True
) -> list[Change]:
    """Return the ways to divide a script's batches into equal parts, largest parts first.

    By the script's own option if it has one: for the batches in an update, or for ``memfit.Engine``'s parts.

    Args:
        trace: of the script.
        draws: whether a step draws random numbers.
        loop_draws: whether it does outside of the model's calls, such as noise of the size of the batch. Then
            no option sums gradients: the loop would draw other numbers, which slices leave as they are.
        by_options: whether such options are used.
    """
    setting = find_batch_size_setting(trace)
    if setting is None:
        return []
    has_options = by_options and isinstance(setting, ScriptOption)
    accumulation = (
        _option(trace, ScriptOptionPurpose.ACCUMULATION) if has_options and not loop_draws else None
    )
    parts = _option(trace, ScriptOptionPurpose.PARTS) if has_options else None
    own = accumulation is not None or parts is not None
    ways = []
    for smaller in smaller_batch_changes(trace):
        count, rest = divmod(batch_size_of_setting(setting), smaller.batch_size)
        if rest:
            continue
        arguments, loader, (how,) = smaller.arguments, smaller.loader, smaller.how
        if parts is not None:  # batches stay whole, until an engine divides them
            arguments, loader = parts.with_value(count), None
            how = f"{' '.join(arguments)}, now {parts.value}"
        elif accumulation is not None:
            arguments += accumulation.with_value(count * accumulation.value)
            how = f"{' '.join(arguments)}, now {smaller.batch_size * count} and {accumulation.value}"
        divided = DividedBatches(
            count,
            smaller.batch_size,
            how,
            smaller.where,
            arguments,
            loader,
            draws=draws,
            by_option=own,
            by_engine=parts is not None,
        )
        ways.append(
            replace(
                smaller,
                plan={"accumulation": {"parts_per_batch": count}} if parts or not own else {},  # Engine's
                micro_batches=divided,
                arguments=arguments,
                loader=loader,
                words=(f"{count} micro-batches of {smaller.batch_size}",),
                how=(how, *divided.in_loop),
                costs=f"{count} forwards and backwards for each batch ({ASSUMED})",
            )
        )
    return ways


def slice_changes(trace: Trace, step: StepOperations | None) -> list[Change]:
    """Return the ways to divide batches inside the model's call, where nothing sets their size: few first.

    Args:
        trace: of the script.
        step: what it ran; the rows of the model's first input are its samples.
    """
    inputs = None if step is None or step.samples is None else step.samples.shapes
    rows = inputs[0][0] if inputs and inputs[0] else 0
    if find_batch_size_setting(trace) is not None:
        return []
    counts = [1 << times for times in range(1, rows.bit_length())]
    return [
        Change({"batch_slices": {"count": count}}, words=(f"{count} slices of each batch",))
        for count in counts
    ]


def why_batches_are_indivisible(trace: Trace) -> str:
    """Return why a script's batches cannot be divided, as a clause."""
    if find_batch_size_setting(trace) is not None:
        return "a batch has one sample"
    return "memfit found no option and no DataLoader that sets the batch size"


def _option(trace: Trace, purpose: ScriptOptionPurpose) -> ScriptOption | None:
    return next((option for option in trace.options if option.purpose is purpose), None)


def with_facts_on_samples(division: Change, assumed: str, dim: int | None) -> Change:
    """Return a division with what memfit assumes, and knows, about its samples, as in ``DividedBatches``."""
    if division.micro_batches is None:
        return division
    return replace(division, micro_batches=replace(division.micro_batches, assumed=assumed, dim=dim))


def smaller_batch_change_of_division(division: Change) -> Change:
    """Return the change to batches that are as small as a part: each of them has an update."""
    return replace(division, plan={}, micro_batches=None)


_FIXED = ("parameters", "gradients", "optimizer state", "buffers")
"""Terms of the summary that do not depend on the batch."""
_FARTHEST = 16
"""How many times the largest batch that fits the next one may be: a line is not trusted farther."""
_FLAT = 8
"""The same, where memory did not grow with the batch."""
_PATIENT = 6
"""Runs after which every other one halves what is left, whatever the line says."""


@dataclass(frozen=True, slots=True)
class BatchSizeRun:
    """What a run with a batch of some size needs."""

    size: int
    needs: int
    """Bytes."""
    fits: bool


def next_batch_size(
    runs: Sequence[BatchSizeRun], sizes: Sequence[int], room: int, *, fixed: int, proven: bool
) -> int | None:
    """Return the batch size to run next; None if the largest that fits is known.

    It lies above the largest size that fits and below the smallest that does not, where the line through
    two runs reaches the room.

    Args:
        runs: those made so far, at least one. Their sizes need not be among ``sizes``.
        sizes: what to choose from, in ascending order.
        room: bytes that a run may need.
        fixed: bytes that do not depend on the batch, for the first guess.
        proven: whether the next larger size must have run out of memory; otherwise the line's word is enough.

    >>> next_batch_size([BatchSizeRun(4, 500, True)], range(1, 1000), 1000, fixed=100, proven=True)
    9
    >>> runs = [BatchSizeRun(4, 500, True), BatchSizeRun(9, 950, True), BatchSizeRun(10, 1040, False)]
    >>> next_batch_size(runs, range(1, 1000), 1000, fixed=100, proven=True) is None
    True
    """
    low = max((run for run in runs if run.fits), key=attrgetter("size"), default=None)
    high = min(
        (run for run in runs if not run.fits and (low is None or run.size > low.size)),
        key=attrgetter("size"),
        default=None,
    )
    first = bisect_right(sizes, low.size) if low is not None else 0
    last = bisect_left(sizes, high.size) if high is not None else len(sizes)
    if first >= last:
        return None
    likely = bisect_right(sizes, _crossing(runs, low, high, room, fixed)) - 1
    if likely < first and low is not None and not proven:
        return None
    return sizes[min(max(likely, first), last - 1)]


def _crossing(
    runs: Sequence[BatchSizeRun], low: BatchSizeRun | None, high: BatchSizeRun | None, room: int, fixed: int
) -> float:
    """Return the size at which a run likely needs all of the room."""
    if low is not None and high is not None:
        if len(runs) >= _PATIENT and len(runs) % 2 == 0:
            return (low.size + high.size) / 2
        return _line(low, high, room, flat=(low.size + high.size) / 2)
    none = BatchSizeRun(0, fixed, fits=True)
    if low is not None:
        before = max((run for run in runs if run.size < low.size), key=attrgetter("size"), default=none)
        return min(_line(before, low, room, flat=_FLAT * low.size), _FARTHEST * low.size)
    smallest, *above = sorted(runs, key=attrgetter("size"))
    return _line(smallest, above[0], room, flat=0) if above else _line(none, smallest, room, flat=0)


def _line(one: BatchSizeRun, other: BatchSizeRun, room: int, *, flat: float) -> float:
    """Return where the line through two runs reaches the room; ``flat`` if it does not rise."""
    rise = other.needs - one.needs
    return one.size + (room - one.needs) * (other.size - one.size) / rise if rise > 0 else flat


def bytes_independent_of_batch(terms: Sequence[Term]) -> int:
    """Return the bytes at the peak of a run that do not depend on the batch."""
    return sum(term.figure.bytes for term in terms if term.name in _FIXED)


def process_bytes_independent_of_batch(run: PlanRun) -> int:
    """Return the bytes of the process at the peak of a run that do not depend on the batch."""
    return run.needs.bytes - run.reserved.bytes + bytes_independent_of_batch(run.terms)
