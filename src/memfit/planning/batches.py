"""What sets the number of samples in a script's batches; other numbers, and batches in parts.

In parts (*micro-batches*), a batch has several forwards and backwards, and an update sums their gradients:
it sees as many samples as before. With smaller batches, it sees fewer.
"""

from collections.abc import Iterator
from dataclasses import replace

from memfit.records import Change, DividedBatches, LoaderBatchSize, OptionPurpose, ScriptOption, Trace

ASSUMED = "assumed: the loss is a mean over samples that do not depend on each other"
SEEN = "two recorded steps show no samples that depend on each other"
"""In place of ``ASSUMED`` where that is so."""


def batch_setting(trace: Trace) -> ScriptOption | LoaderBatchSize | None:
    """Return what sets the number of samples in a batch of a script; None if memfit found nothing."""
    return _option(trace, OptionPurpose.BATCH_SIZE) or trace.loader


def batch_size(setting: ScriptOption | LoaderBatchSize) -> int:
    """Return the number of samples in a batch."""
    return setting.value if isinstance(setting, ScriptOption) else setting.size


def with_batch_size(setting: ScriptOption | LoaderBatchSize, size: int) -> Change:
    """Return the change that gives batches another number of samples, and nothing else."""
    now = batch_size(setting)
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


def smaller_batches(trace: Trace) -> list[Change]:
    """Return the ways to halve a script's batches, once or more, largest first: each update sees fewer."""
    setting = batch_setting(trace)
    return (
        [] if setting is None else [with_batch_size(setting, size) for size in _halved(batch_size(setting))]
    )


def divisions(trace: Trace, *, draws: bool) -> list[Change]:
    """Return the ways to divide a script's batches into equal parts, largest parts first.

    Args:
        trace: of the script.
        draws: whether a step draws random numbers.
    """
    setting = batch_setting(trace)
    if setting is None:
        return []
    accumulation = _option(trace, OptionPurpose.ACCUMULATION) if isinstance(setting, ScriptOption) else None
    parts = _option(trace, OptionPurpose.PARTS) if isinstance(setting, ScriptOption) else None
    whole = batch_size(setting)
    return [
        _division(with_batch_size(setting, size), whole // size, accumulation, parts, draws=draws)
        for size in _halved(whole)
        if whole % size == 0
    ]


def why_indivisible(trace: Trace) -> str:
    """Return why a script's batches cannot be divided, as a clause."""
    if batch_setting(trace) is not None:
        return "a batch has one sample"
    return "memfit found no option and no DataLoader that sets the batch size"


def _option(trace: Trace, purpose: OptionPurpose) -> ScriptOption | None:
    return next((option for option in trace.options if option.purpose is purpose), None)


def _halved(size: int) -> Iterator[int]:
    while size := size // 2:
        yield size


def _division(
    smaller: Change,
    count: int,
    accumulation: ScriptOption | None,
    parts: ScriptOption | None,
    *,
    draws: bool,
) -> Change:
    """Return the change to parts of a batch, by the script's own option if it has one.

    Args:
        smaller: the change to batches that are as small as a part.
        count: of parts.
        accumulation: the script's option for the number of batches in an update.
        parts: its option for the number of parts into which ``memfit.Engine`` divides a batch.
        draws: whether a step draws random numbers.
    """
    arguments, size, (how,) = smaller.arguments, smaller.batch_size, smaller.how
    loader = smaller.loader
    own = accumulation is not None or parts is not None
    if parts is not None:  # batches stay whole, until an engine divides them
        arguments, loader = parts.with_value(count), None
        how = f"{' '.join(arguments)}, now {parts.value}"
    elif accumulation is not None:
        arguments += accumulation.with_value(count * accumulation.value)
        how = f"{' '.join(arguments)}, now {size * count} and {accumulation.value}"
    divided = DividedBatches(
        count,
        size,
        how,
        smaller.where,
        arguments,
        loader,
        draws=draws,
        by_option=own,
        by_engine=parts is not None,
    )
    return replace(
        smaller,
        plan={"accumulation": {"parts_per_batch": count}} if parts or not own else {},  # Engine's
        micro_batches=divided,
        arguments=arguments,
        loader=loader,
        words=(f"{count} micro-batches of {size}",),
        how=(how, *divided.in_loop),
        costs=f"{count} forwards and backwards for each batch ({ASSUMED})",
    )


def as_small_batches(division: Change) -> Change:
    """Return the change to batches that are as small as a part: each of them has an update."""
    return replace(division, plan={}, micro_batches=None)
