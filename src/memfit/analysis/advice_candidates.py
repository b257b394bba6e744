"""Changes that may lower the peak of a run: what they are called, how they are made, and what they cost."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from memfit.allocator.config import AllocatorConfig, environment_settings
from memfit.analysis.script_change import PlannedStrategy, ScriptChange
from memfit.records import DryRun, LoaderBatchSize, OptionPurpose, Phase, ScriptOption, Trace

_MUCH = 0.1
"""Share of activations at the peak from which saving them is worth some time."""
_EXPANDABLE = "expandable_segments:True"
_RECOMPUTING = "a second forward of these blocks"


@dataclass(frozen=True, slots=True)
class AdviceCandidate:
    """A change that may be worth trying."""

    kind: str
    """Of candidates of one kind, at most one is made."""
    change: ScriptChange
    what: str
    how: str = ""
    """What to write; empty for strategies, which share one call of ``memfit.apply``."""
    costs: str = ""
    """Empty if a replay determines it."""
    where: str = ""
    """``file:line`` to be changed, if known."""
    batch_size: int = 0
    """Samples in a batch, if that is what changes."""
    accumulates: bool = False
    """Whether an update sees as many samples as before, in several batches."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a run tells about changes to it."""

    found: DryRun
    options: tuple[ScriptOption, ...]
    batch_size: int
    """Samples in a batch; 0 if it is not known what sets their number."""
    smaller_batches: tuple[AdviceCandidate, ...]
    """Powers of two of the batch, largest first."""
    conf: str
    """``PYTORCH_ALLOC_CONF`` with expandable segments; empty if they are on already, or have no effect."""

    @classmethod
    def of(cls, trace: Trace, found: DryRun) -> "RunFacts":
        """Return the facts of a run, given its summary."""
        settings = trace.settings
        conf = ",".join(filter(None, (environment_settings(settings), _EXPANDABLE)))
        expandable = AllocatorConfig.read(settings).expandable_segments
        setting = batch_setting(trace)
        now = batch_size(setting) if setting is not None else 0
        return cls(found, trace.options, now, tuple(_smaller_batches(trace)), "" if expandable else conf)


def candidates(facts: RunFacts, made: tuple[AdviceCandidate, ...]) -> Iterator[tuple[AdviceCandidate, ...]]:
    """Yield changes that may lower the peak and are not made already, cheapest first.

    Args:
        facts: of a run.
        made: the changes under which it ran.

    Yields:
        Alternatives of one kind: smaller batches, largest first; otherwise in the order to try them in.
    """
    kinds = {candidate.kind for candidate in made}
    for group in _groups(facts):
        if group and group[0].kind not in kinds:
            yield group


def _groups(facts: RunFacts) -> Iterator[tuple[AdviceCandidate, ...]]:
    if facts.conf:
        change = ScriptChange(conf=facts.conf)
        yield (
            AdviceCandidate("settings", change, "expandable segments", f"PYTORCH_ALLOC_CONF={facts.conf}"),
        )
    if facts.found.peak_place.phase is Phase.OPTIMIZER:
        how, costs = (
            "fused=True when creating the optimizer",
            "no time, but results may differ in their last bits",
        )
        yield (AdviceCandidate("optimizer", ScriptChange(fused=True), "fused optimizer", how, costs),)
    yield facts.smaller_batches
    at_peak = {term.name: term.figure.bytes for term in facts.found.terms}
    if at_peak["activations"] > _MUCH * at_peak["allocated"]:
        yield tuple(_checkpointing(facts.options))
        yield tuple(
            _switch(option, option.words[-1].lstrip("-"), "lower precision: results differ")
            for option in facts.options
            if option.purpose is OptionPurpose.LOW_PRECISION and not option.value
        )
        costs = "host memory, and copies to the host and back"
        change = ScriptChange((PlannedStrategy("offload"),))
        yield (AdviceCandidate("offload", change, "offload activations", costs=costs),)


def _checkpointing(options: tuple[ScriptOption, ...]) -> Iterator[AdviceCandidate]:
    """Yield the script's own option first; nothing if that is on."""
    own = [option for option in options if option.purpose is OptionPurpose.CHECKPOINTING]
    if any(option.value for option in own):
        return
    for option in own:
        yield _switch(option, "gradient checkpointing", _RECOMPUTING)
    change = ScriptChange((PlannedStrategy("checkpointing"),))
    yield AdviceCandidate(
        OptionPurpose.CHECKPOINTING, change, "checkpoint the repeated blocks", costs=_RECOMPUTING
    )


def _switch(option: ScriptOption, what: str, costs: str) -> AdviceCandidate:
    how = f"add {' '.join(option.words)} to the script's options"
    return AdviceCandidate(option.purpose, ScriptChange(arguments=option.words), what, how, costs)


def batch_setting(trace: Trace) -> ScriptOption | LoaderBatchSize | None:
    """Return what sets the number of samples in a batch of a script; None if memfit found nothing."""
    return _option(trace, OptionPurpose.BATCH_SIZE) or trace.loader


def batch_size(setting: ScriptOption | LoaderBatchSize) -> int:
    """Return the number of samples in a batch."""
    return setting.value if isinstance(setting, ScriptOption) else setting.size


def with_batch_size(setting: ScriptOption | LoaderBatchSize, size: int) -> AdviceCandidate:
    """Return the change that gives batches another number of samples, and nothing else."""
    now = batch_size(setting)
    plain = AdviceCandidate(
        OptionPurpose.BATCH_SIZE,
        ScriptChange(),
        f"batch size {size} instead of {now}",
        costs=f"each update sees {size} sample{'s' * (size != 1)} instead of {now}",
        batch_size=size,
    )
    if isinstance(setting, LoaderBatchSize):
        return _by_loader(plain, setting)
    words = setting.with_value(size)
    return replace(plain, change=ScriptChange(arguments=words), how=f"{' '.join(words)}, now {now}")


def _option(trace: Trace, purpose: OptionPurpose) -> ScriptOption | None:
    return next((option for option in trace.options if option.purpose is purpose), None)


def _smaller_batches(trace: Trace) -> Iterator[AdviceCandidate]:
    setting = batch_setting(trace)
    if setting is None:
        return
    now = batch_size(setting)
    for size in (now >> power for power in range(1, now.bit_length())):
        plain = with_batch_size(setting, size)
        accumulation = _option(trace, OptionPurpose.ACCUMULATION)
        if isinstance(setting, ScriptOption) and accumulation is not None:
            yield _accumulating(plain, setting, accumulation)
        else:
            yield plain


def _by_loader(plain: AdviceCandidate, loader: LoaderBatchSize) -> AdviceCandidate:
    """Return the candidate with another batch size of the script's loader."""
    size = plain.batch_size
    how = f"DataLoader(batch_size={size})"
    if loader.library:
        how = f"a batch size of {size} for the DataLoader that {loader.library} creates"
    change = ScriptChange(loader=replace(loader, size=size))
    return replace(plain, change=change, how=f"{how}, now {loader.size}", where=loader.line)


def _accumulating(plain: AdviceCandidate, own: ScriptOption, accumulation: ScriptOption) -> AdviceCandidate:
    """Return the candidate with more batches per update, so that its samples stay the same, if they can."""
    steps, rest = divmod(own.value * accumulation.value, plain.batch_size)
    if rest:
        return plain
    words = (*plain.change.arguments, *accumulation.with_value(steps))
    return replace(
        plain,
        change=ScriptChange(arguments=words),
        how=f"{' '.join(words)}, now {own.value} and {accumulation.value}",
        costs=f"{steps} batches per update instead of {accumulation.value}, with as many samples in total",
        accumulates=True,
    )
