"""Changes that make a run fit, or lower its peak: the fewest first, then the cheapest; each has been tried.

trace ──> candidates ──> rerun or replay ──> enough? ──> advice
              ^                               │ none
              └── on top of what saved most <─┘

The caller decides whether a script is rerun: a trace from elsewhere names a script that the user did not ask
memfit to run.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from memfit.analysis.advice_attempt import MOST_RUNS, AdviceAttempt, Trials
from memfit.analysis.advice_candidates import AdviceCandidate, candidates
from memfit.analysis.batch_size_search import largest_that_fits
from memfit.analysis.needed_memory import process_bytes, smallest_process
from memfit.analysis.overall_peak import failed_allocations
from memfit.analysis.script_change import RunScript, ScriptChange, TrialResult, ran_to_completion
from memfit.analysis.summary import summarize
from memfit.ctrl_c import INTERRUPTED
from memfit.devices import NO_LIMIT
from memfit.errors import MemfitError
from memfit.records import Advice, DeviceUse, DryRun, Figure, OptionPurpose, ScriptEnd, Trace, worst
from memfit.units import format_bytes

_UNLIMITED = "with unlimited memory"
_MOST = 3
_WORTH = 0.01
"""Share of what a run needs that a change must save."""
_NEARLY = 0.9
"""Share of the largest saving from which a cheaper change is the better base of a combination."""


def find_total(found: DryRun, run: RunScript) -> DryRun:
    """Find what a run that does not fit needs in total, by a rerun with unlimited memory.

    Args:
        found: the summary of the unchanged run.
        run: reruns the script with unlimited memory.

    Returns:
        The summary with ``in_all``, or with ``untried`` if the rerun did not complete; unchanged if it fits
        or the user interrupted it.
    """
    if not _needs_more(found):
        return found
    try:
        unlimited = run(ScriptChange(), _UNLIMITED)
    except KeyboardInterrupt:
        return replace(found, untried=ScriptEnd("interrupted", INTERRUPTED))
    unlimited = _if_enough(unlimited)
    if not isinstance(unlimited, TrialResult):
        return replace(found, untried=unlimited)
    total = summarize(unlimited.trace)
    in_all = smallest_process(unlimited.trace, total, found.device, fails_at=found.device.total.bytes)
    return replace(found, in_all=in_all, bounds=total.bounds or found.bounds)


def _if_enough(unlimited: TrialResult | ScriptEnd | None) -> TrialResult | ScriptEnd | None:
    """Return a run with unlimited memory, unless even that was too little for a request."""
    if isinstance(unlimited, TrialResult) and len(failed_allocations(unlimited.trace)):
        return ScriptEnd("refused", 1, f"the script ran out of memory even with {format_bytes(NO_LIMIT)}.")
    return unlimited


def find_advice(trace: Trace, found: DryRun, run: RunScript = lambda _change, _what: None) -> DryRun:
    """Find changes that make a run fit; if it fits already, those that lower the memory it needs.

    Args:
        trace: of the unchanged run.
        found: its summary.
        run: reruns the script; by default nothing is run, and only allocator settings are tried.

    Returns:
        The summary with ``advice``, ``advice_remarks``, ``in_all`` and ``untried``; with what was found so
        far if the user interrupts.
    """
    answer = replace(found, advice=())
    try:
        for more in _advised(trace, answer, run):
            answer = more
    except KeyboardInterrupt:
        return replace(answer, untried=ScriptEnd("interrupted", INTERRUPTED))
    except MemfitError as error:  # no history to replay, or an allocator that is not PyTorch's
        return replace(answer, untried=ScriptEnd("refused", error.exit_code, str(error)))
    return answer


def _needs_more(found: DryRun) -> bool:
    """Return whether a run with unlimited memory tells what the script needs."""
    return found.ran_out and found.end.reason != "interrupted"


def _advised(trace: Trace, answer: DryRun, run: RunScript) -> Iterator[DryRun]:
    """Yield the answer again whenever it grows."""
    first: TrialResult | ScriptEnd | None = TrialResult(trace) if ran_to_completion(trace.end) else trace.end
    if _needs_more(answer) or answer.caught:  # what the script did after it caught an error needs less
        first = _if_enough(run(ScriptChange(), _UNLIMITED))
    if not isinstance(first, TrialResult):
        yield replace(answer, untried=first)
        return
    room = max(trace.device.total.bytes - answer.uncertainty, 0)  # a fit that may fail is not enough
    fails = answer.ran_out or bool(answer.caught)
    trials = Trials(first, run, trace.device.total.bytes, room, fails=fails)
    search = _Search(trials, trace.device, room)
    bounds = summarize(first.trace).bounds if answer.ran_out else ()
    answer = replace(
        answer, in_all=process_bytes(search.unchanged.needs, trace.device), bounds=bounds or answer.bounds
    )
    yield answer
    for best in search.best():
        yield replace(
            answer,
            advice=tuple(map(search.advice, best)),
            advice_remarks=tuple(search.remarks()),
            untried=search.trials.failed,
        )


class _Search:
    """Looks for the smallest sets of changes that are enough.

    Args:
        trials: makes the runs.
        device: the device to fit.
        room: bytes of it that the process and others may take.
    """

    def __init__(self, trials: Trials, device: DeviceUse, room: int) -> None:
        self.trials = trials
        self.unchanged = trials.unchanged()
        self._device = device
        self._room = room - device.outside.bytes - device.in_use
        self._fails = self.unchanged.fits is False

    def best(self) -> Iterator[list[AdviceAttempt]]:
        """Yield the best sets so far, whenever a change has been tried.

        Sets that are enough come first, the smallest and then the cheapest first, without the others. If none
        is enough, those that save most come first. If the script fits unchanged, all sets are enough.
        """
        found: list[AdviceAttempt] = []
        base: AdviceAttempt | None = self.unchanged
        enough: list[AdviceAttempt] = []
        while base is not None:
            bases: list[AdviceAttempt] = []
            for group in candidates(base.facts, base.made):
                found += (helped := list(self._on_top_of(base, group)))
                if group[0].kind != OptionPurpose.BATCH_SIZE:  # how small depends on what else is changed
                    bases += helped
                enough = sorted((one for one in found if one.fits is not False), key=_changes)
                yield (enough or sorted(found, key=_size))[:_MOST]
                if len(enough) == _MOST:
                    return
            base = self._next_base(bases) if self._fails and not enough else None

    def _next_base(self, bases: list[AdviceAttempt]) -> AdviceAttempt | None:
        """Return the cheapest of the attempts that save about as much as the best; None without any."""
        most = max((_saved(self.unchanged, one) for one in bases), default=0)
        return next((one for one in bases if _saved(self.unchanged, one) >= _NEARLY * most), None)

    def _on_top_of(self, base: AdviceAttempt, group: tuple[AdviceCandidate, ...]) -> Iterator[AdviceAttempt]:
        """Yield the first of the alternatives that helps; of smaller batches, the largest that fits."""
        tries: Iterable[AdviceAttempt | None]
        if group[0].kind == OptionPurpose.BATCH_SIZE:
            tries = [largest_that_fits(base, group, self.trials, self._room)] if self._fails else []
        else:
            tries = (self.trials.attempt((*base.made, one)) for one in group)
        for then in tries:
            if then is not None and self._helps(then, base):
                yield self._without_idle(then)
                return

    def _helps(self, then: AdviceAttempt, base: AdviceAttempt) -> bool:
        worth = _saved(base, then) >= _WORTH * process_bytes(self.unchanged.needs, self._device).bytes
        return worth or bool(then.fits and not base.fits)

    def _without_idle(self, then: AdviceAttempt) -> AdviceAttempt:
        """Return a set that is enough without the changes that it does not need."""
        for one in then.made[:-1] if then.fits else ():  # without the last, it is not enough
            fewer = self.trials.attempt(tuple(other for other in then.made if other is not one))
            if fewer is not None and fewer.fits:
                return self._without_idle(fewer)
        return then

    def advice(self, tried: AdviceAttempt) -> Advice:
        """Return a set of changes as advice."""
        before, after = self.unchanged.needs, tried.needs
        how = [one.how for one in tried.made if one.how]
        if tried.change.strategies:
            plan = ", ".join(one.code for one in tried.change.strategies)
            models = f"{'each of ' * (len(tried.models) > 1)}{', '.join(tried.models)}"
            if all("(plan: " in model for model in tried.models) and tried.models:  # a second plan is refused
                how.append(f"add {plan} to the plan of {models}")
            else:
                how.append(f"import memfit; memfit.apply(model, [{plan}])  # after creating {models}")
        return Advice(
            changes=tuple(one.what for one in tried.made),
            how=tuple(how),
            where=next((one.where for one in tried.made if one.where), ""),
            costs="; ".join(one.costs or self._costs(tried) for one in tried.made),
            saves=Figure(before.bytes - after.bytes, worst(before.provenance, after.provenance)),
            needs=process_bytes(after, self._device),
            fits=tried.fits,
        )

    def _costs(self, tried: AdviceAttempt) -> str:
        """Return the cost of allocator settings as text."""
        without = self.trials.attempt(tuple(one for one in tried.made if not one.change.conf))
        before, after = without.seconds if without else None, tried.seconds
        if before is None or after is None:
            return "an unknown amount of time: fewer than two steps completed"
        if after <= before:
            return "no time in a steady step"
        return f"{1000 * (after - before):.1f} ms per step (assumed) in driver calls"

    def remarks(self) -> Iterator[str]:
        """Yield what a reader of the advice must know besides, sentence by sentence."""
        if (sample := self._sample()) is not None:
            yield f"One sample of a batch takes {format_bytes(sample.bytes)} ({sample.provenance})."
        if self._fails and self.trials.reruns and not self.unchanged.facts.batch_size:
            yield (
                "memfit did not try a smaller batch: it found no option of the script and no DataLoader that "
                "sets the batch size. Try it yourself: write a smaller batch size into the script."
            )
        if self.trials.refused:
            yield f"memfit stopped after {MOST_RUNS} runs; other combinations may save more."

    def _sample(self) -> Figure | None:
        """Return the bytes that one more sample takes, from the run and the last one with a smaller batch."""
        for one in reversed(self.unchanged.facts.smaller_batches):
            smaller = self.trials.known((one,))
            if smaller is not None and not one.accumulates:  # accumulation keeps gradients, too
                before, after = self.unchanged.reserved, smaller.reserved
                samples = self.unchanged.facts.batch_size - one.batch_size
                sure = worst(before.provenance, after.provenance)
                return Figure((before.bytes - after.bytes) // samples, sure)
        return None


def _size(attempt: AdviceAttempt) -> int:
    return attempt.needs.bytes


def _saved(before: AdviceAttempt, then: AdviceAttempt) -> int:
    return before.needs.bytes - then.needs.bytes


def _changes(attempt: AdviceAttempt) -> int:
    return len(attempt.made)
