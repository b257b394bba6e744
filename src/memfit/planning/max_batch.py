"""The largest batch size with which a script fits a budget: it fits there, and runs out at the next.

as written ──> next size ──> run with the budget's memory ──> fits? ──> next size, ... ──> n, n + 1
                                 │ no
                                 └──> run with unlimited memory: what it needs
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from memfit.analysis.dry_run_result import dry_run_of_trace
from memfit.analysis.needed_memory import process_bytes_on_smallest_gpu
from memfit.analysis.peak_outside_failed_attempts import failed_allocation_events
from memfit.analysis.side_stream_peak_range import may_side_streams_change_peak
from memfit.analysis.trial_result import RunTrial, TrialResult, why_run_failed
from memfit.errors import TargetError, UsageError
from memfit.planning.batch_size_changes import (
    BatchSizeRun,
    batch_size_change,
    batch_size_of_setting,
    bytes_independent_of_batch,
    find_batch_size_setting,
    next_batch_size,
)
from memfit.records import (
    BatchLimit,
    BatchRun,
    Change,
    DeviceUse,
    DryRun,
    Figure,
    LoaderBatchSize,
    MaxBatch,
    Provenance,
    ScriptEnd,
    ScriptOption,
    ScriptOptionPurpose,
    StepTime,
    Trace,
    worst_provenance,
)
from memfit.units import format_bytes

_MOST_SIZES = 32
"""Sizes that are run at most."""
_LARGEST_SIZE = 1 << 24
"""The largest size looked for where the number of samples is not known."""
_FLAT_OVER = 512
"""How many times the smallest size the largest must be before a peak that is the same counts as constant."""


@dataclass(frozen=True, slots=True)
class MaxBatchScript:
    """A script to find the largest batch size of."""

    limited: RunTrial
    """With the memory of the budget."""
    unlimited: RunTrial
    arguments: Sequence[str]
    """The script's own."""
    device: DeviceUse
    """Its memory is the budget."""


@dataclass(frozen=True, slots=True)
class _Measured:
    run: BatchRun
    found: DryRun
    """Of the run that the figures are from."""
    raced: bool


def find_max_batch(script: MaxBatchScript, *, multiple: int = 1, option: str = "") -> MaxBatch:
    """Return the largest batch size with which a script fits.

    Args:
        script: the script.
        multiple: look for multiples of it only.
        option: the script's option that sets the batch size, as it is written; empty to find out.

    Raises:
        UsageError: memfit does not know what sets the batch size.
        TargetError: the script fails, for another reason than the budget.
    """
    trace, first = _measured(script, Change(), 0)
    setting = _named(option, trace, script.arguments) if option else find_batch_size_setting(trace)
    if setting is None:
        raise UsageError(
            "memfit found no option of the script and no DataLoader that sets the batch size. If the script "
            "has such an option, name it: --option --samples. If it has none, give it one."
        )
    now, samples = batch_size_of_setting(setting), _samples(setting, trace.loader)
    sizes = range(multiple, (_LARGEST_SIZE if samples is None else samples) + 1, multiple)
    measured = {now: replace(first, run=replace(first.run, size=now))}
    while (size := _next_size(measured, sizes, script.device)) is not None:
        if len(measured) == _MOST_SIZES or _is_flat([one.run for one in measured.values()]):
            break
        change = batch_size_change(setting, size)
        measured[size] = _measured(script, change, size)[1]
    runs = tuple(measured[number].run for number in sorted(measured))
    largest = max((run.size for run in runs if run.fits and not run.size % multiple), default=None)
    change_to = None if largest in (None, now) else batch_size_change(setting, largest)
    shown = measured[runs[0].size if largest is None else largest]
    return MaxBatch(
        device=replace(script.device, nccl=trace.device.nccl),
        runs=runs,
        as_written=now,
        largest=largest,
        fastest=_fastest([run for run in runs if run.fits and not run.size % multiple]),
        limit=_limit(runs, sizes, samples, largest),
        multiple=multiple,
        how="" if change_to is None else change_to.how[0],
        where="" if change_to is None else change_to.where,
        per_sample=_per_sample(runs, largest),
        remarks=tuple(_remarks(shown, first.run, runs, script.device)),
        command=trace.command,
        versions=trace.versions,
    )


def _measured(script: MaxBatchScript, change: Change, size: int) -> tuple[Trace, _Measured]:
    """Run the script with the budget's memory and, if that is not enough, with unlimited memory.

    Args:
        script: the script.
        change: what gives it the batch size.
        size: the batch size; 0 for the script as written.
    """
    what = f"batch size {size}" if size else "as written"
    needs = Figure(0, Provenance.EXACT)  # the most of both runs
    for late in (False, True):
        tried = replace(change, finish_late=late)
        result = script.limited(tried, what)
        fits = isinstance(result, TrialResult) and not len(failed_allocation_events(result.trace))
        if not fits:
            result = script.unlimited(tried, f"{what}, with unlimited memory")
        if isinstance(result, ScriptEnd):
            more = ". If the batch size must be a multiple of a number, give that number to --multiple."
            why = f"{why_run_failed(result)}{'' if change == Change() else more}"
            raise TargetError(f"memfit ran the script {'with ' * bool(size)}{what}: {why}")
        trace, found = result.trace, dry_run_of_trace(result.trace)
        fails_at = 0 if fits else script.device.total.bytes
        one = process_bytes_on_smallest_gpu(trace, found, trace.device, fails_at=fails_at)
        needs = max(needs, one, key=lambda figure: figure.bytes)
        if not fits or not may_side_streams_change_peak(trace):
            break
    run = BatchRun(
        size=size,
        fits=fits,
        needs=needs,
        allocated=next(term.figure for term in found.terms if term.name == "allocated"),
        steps=found.steps,
        place=found.peak_place,
        step_time=found.step_time,
    )
    return trace, _Measured(run, found, raced=late)


def _named(option: str, trace: Trace, arguments: Sequence[str]) -> ScriptOption:
    """Return the option that the user named, with its value.

    Raises:
        UsageError: its value is not known.
    """
    for argument, following in pairwise([*arguments, ""]):
        name, inline, value = argument.partition("=")
        number = value if inline else following
        if name == option.removesuffix("=") and number.isdecimal() and int(number):
            return ScriptOption(ScriptOptionPurpose.BATCH_SIZE, (option,), int(number))
    known = next((one for one in trace.options if option in one.words), None)
    if known is None or known.purpose is not ScriptOptionPurpose.BATCH_SIZE:
        raise UsageError(
            f"--option {option}: memfit does not know its value. Write it after the script, as in "
            f"train.py {option}{'' if option.endswith('=') else ' '}8."
        )
    return known


def _samples(setting: ScriptOption | LoaderBatchSize, loader: LoaderBatchSize | None) -> int | None:
    """Return how many samples the loader has whose batch size is set; None if that is not known."""
    if loader is None or loader.size != batch_size_of_setting(setting):
        return None
    return loader.samples


def _next_size(measured: Mapping[int, _Measured], sizes: range, device: DeviceUse) -> int | None:
    """Return the size to run next; sizes that are no multiple tell only where to begin."""
    first, *others = measured.values()
    known = [one.run for one in others]
    if not others or first.run.size in sizes:
        known.append(first.run)
    outside = device.outside.bytes
    failed = min((run for run in known if not run.fits), key=lambda run: run.size, default=None)
    unused = 0 if failed is None else failed.needs.bytes - outside - failed.allocated.bytes

    def on_the_line(run: BatchRun) -> int:
        """Return what a run needs without the cache that PyTorch keeps only where there is room for it."""
        least = run.allocated.bytes + outside + unused
        return min(least, run.needs.bytes) if run.fits else run.needs.bytes

    return next_batch_size(
        [BatchSizeRun(run.size, on_the_line(run), run.fits) for run in known],
        sizes,
        device.total.bytes - device.in_use,
        fixed=bytes_independent_of_batch(first.found.terms) + outside,
        proven=True,
    )


def _is_flat(runs: Sequence[BatchRun]) -> bool:
    """Return whether the peak was the same for sizes far apart."""
    sizes = [run.size for run in runs]
    return _same_peak(runs) and max(sizes) >= _FLAT_OVER * min(sizes)


def _same_peak(runs: Sequence[BatchRun]) -> bool:
    return len(runs) > 1 and len({run.allocated.bytes for run in runs}) == 1


def _limit(runs: Sequence[BatchRun], sizes: range, samples: int | None, largest: int | None) -> BatchLimit:
    if largest is None or any(run.size > largest and not run.fits for run in runs):
        return BatchLimit.MEMORY
    if _is_flat(runs):
        return BatchLimit.FLAT
    return BatchLimit.RUNS if largest + sizes.step in sizes or samples is None else BatchLimit.DATA


_CLEARLY = 1.05
"""How many times as many samples in a second count as faster. Of published steps of one script, most have a
ratio that is predicted to within 0.05 (docs/time.md)."""


def _fastest(fitting: Sequence[BatchRun]) -> int | None:
    """Return the size with the most samples in a second; the largest, unless they are clearly more.

    What makes all of a card's kernels slower or faster concerns both sizes: one is faster if it is so at both
    ends of the intervals.

    Args:
        fitting: runs in ascending order.
    """
    rates = [_samples_per_second(run.step_time) for run in fitting]
    if not rates or not all(map(all, rates)):
        return None
    best = max(range(len(rates)), key=lambda number: rates[number][0])
    middle, *ends = (mine / largest for mine, largest in zip(rates[best], rates[-1], strict=True))
    return fitting[best if middle > _CLEARLY and min(ends) > 1 else -1].size


def _samples_per_second(time: StepTime | None) -> tuple[float, float, float]:
    """Return the rate as predicted, and at both ends of the interval; zeros if it is not known."""
    if time is None or time.samples is None:
        return 0.0, 0.0, 0.0
    return time.samples / time.seconds, time.samples / time.low, time.samples / time.high


def _per_sample(runs: Sequence[BatchRun], largest: int | None) -> Figure | None:
    """Return the bytes of one more sample, from the smallest batch and the first that does not fit.

    None if they are the same, or their peaks are not in the same place.
    """
    last = next((run for run in runs if not run.fits and run.size > (largest or 0)), runs[-1])
    place = (last.place.phase, last.place.module)
    before = next((run for run in runs if (run.place.phase, run.place.module) == place), last)
    if last.allocated.bytes <= before.allocated.bytes:
        return None
    sure = worst_provenance(last.allocated.provenance, before.allocated.provenance)
    more = last.allocated.bytes - before.allocated.bytes
    source = f"allocated, between batch sizes {before.size} and {last.size}"
    return Figure(more // (last.size - before.size), sure, source)


def _remarks(shown: _Measured, first: BatchRun, runs: Sequence[BatchRun], device: DeviceUse) -> Iterator[str]:
    """Yield what a reader must know besides."""
    run, found = shown.run, shown.found
    if _same_peak(runs):
        yield "The peak does not depend on the batch size: it was the same in every run."
    if failed := [str(one.size) for one in runs if one.size < run.size and not one.fits]:
        yield (
            f"Memory does not grow steadily with the batch: {', '.join(failed)} ran out of memory, although "
            f"{run.size} fits."
        )
    if run.steps < first.steps:
        yield (
            f"With batch size {run.size}, the script completed {run.steps} training "
            f"step{'s' * (run.steps != 1)} instead of {first.steps}: it has no more data."
        )
    spare = device.total.bytes - device.in_use - run.needs.bytes
    if run.fits and spare < found.uncertainty:
        more = format_bytes(found.uncertainty)
        yield (
            f"The CUDA context is assumed, and may take up to {more} more. To leave room for that, give "
            f"--in-use {more.replace(' ', '')}; to measure it on a card, run memfit doctor --context."
        )
    if found.bounds:
        yield (
            f"Sizes that depend on GPU values are the largest possible ({found.bounds[0].operator}, "
            f"{found.bounds[0].where}): larger batches may fit."
        )
    if found.children:
        yield "The script starts other processes that use the GPU; their memory is not counted."
    if shown.raced:
        yield "Streams race: the figures assume that the work on side streams is done as late as possible."
    if found.step_time_unknown:
        yield f"No time of a step: {found.step_time_unknown}."
