"""Runs with a peak as given, and the advice for them when a rerun with a change has another."""

from dataclasses import replace

from memfit.analysis.dry_run_result import dry_run_of_trace
from memfit.analysis.trial_result import TrialResult
from memfit.planning.advice import find_advice
from memfit.records import (
    Action,
    Category,
    DeviceUse,
    EventLabel,
    Figure,
    Phase,
    Provenance,
    ScriptEnd,
    ScriptOption,
    ScriptOptionPurpose,
    Trace,
)
from support.traces import BASE, Event, freed, segment, trace_of

MIB = 1 << 20
CONTEXT = Figure(100 * MIB, Provenance.ASSUMED, "a table")
MEASURED = replace(CONTEXT, provenance=Provenance.MEASURED)
STEPS = ScriptEnd("steps", 0)
FAILED = ScriptEnd("exception", 1, "FileExistsError: outdir", "train.py:3")
LABELS = (EventLabel(Phase.BACKWARD, "", "", -1), EventLabel(Phase.OPTIMIZER, "", "", -1))


def device(total):
    """Return a device with ``total`` MiB."""
    return DeviceUse("A100-80GB", Figure(total * MIB, Provenance.EXACT), CONTEXT, 0)


def trace(  # noqa: PLR0913 - each test sets one or two
    size,
    *,
    phase=0,
    category=Category.ACTIVATION,
    cached=0,
    released=False,
    fragmented=False,
    oom=False,
    end=STEPS,
    total=80 << 10,
    conf="",
    options=(),
    loader=None,
):
    """Return a run that holds ``size`` MiB at its peak.

    Before the peak, the allocator has ``cached`` MiB in blocks too small for it; it keeps them, or releases
    them if ``released``, and cannot release them if they are ``fragmented``: a block of 2 MiB stays there.
    """
    history, segments = [], []
    for index, mib in enumerate((cached, size)):
        if mib:
            address, block = BASE + (index << 40), mib * MIB
            segments.append(segment(address, block))
            history.append(Event(Action.SEGMENT_ALLOC, address, block, label=phase))
            history.append(Event(Action.ALLOC, address, block, label=phase, category=category))
            history += freed(address, block, label=phase) if index == 0 else []
        if fragmented and index == 0:
            history.append(Event(Action.ALLOC, address, 2 * MIB, label=phase, category=category))
        if released and index == 0:
            history.append(Event(Action.SEGMENT_FREE, address, block, label=phase))
            segments.clear()
    history += [Event(Action.OOM, 0, 1 << 30, label=phase)] * oom
    settings = {"conf": conf, "environment": conf}
    return trace_of(
        history,
        segments,
        labels=LABELS,
        device=device(total),
        end=end,
        settings=settings,
        options=tuple(options),
        loader=loader,
    )


def in_words(change):
    """Return a change in the words of ``advice_for``."""
    words = [*sorted(change.strategies), *["fused"] * change.fused, *change.arguments]
    words += [f"loader={change.loader.size}"] if change.loader else []
    return " ".join(words + [f"x{change.updates_held_back}"] * (change.updates_held_back > 1))


def advice_for(first, results, *, caught=0, **more):
    """Return the answer and the changes tried.

    Args:
        first: the unchanged run.
        results: what a rerun with each change results in: a trace, the MiB at its peak, its end, or an
            interrupt. An empty change is the run with unlimited memory.
        caught: number of errors that the unchanged run caught.
        more: further fields of the traces that are made for the numbers in ``results``.
    """
    tried = []

    def run(change, _what):
        tried.append(in_words(change))
        result = results[tried[-1]]
        if result is KeyboardInterrupt:
            raise result
        result = trace(result, **more) if isinstance(result, int) else result
        return TrialResult(result, ("Net",)) if isinstance(result, Trace) else result

    answer = find_advice(first, replace(dry_run_of_trace(first), caught=caught), run)
    return answer, tried


def rows(answer):
    """Return each piece of advice: changes, MiB saved, MiB then needed, whether the run fits."""
    return [
        (" + ".join(piece.changes), piece.saves.bytes // MIB, piece.needs.bytes // MIB, piece.fits)
        for piece in answer.advice
    ]


CHECKPOINT, OFFLOAD = "checkpoint the repeated blocks", "offload activations"
CHECKPOINTING = ScriptOption(ScriptOptionPurpose.CHECKPOINTING, ("--grad-checkpointing",), 0)
BF16 = ScriptOption(ScriptOptionPurpose.LOW_PRECISION, ("--mixed_precision", "bf16"), 0)


def too_large(total, context=MEASURED, **more):
    """Return a run that fails on a device of ``total`` MiB; the context is measured, and takes 100 MiB."""
    failed = trace(200, oom=True, end=ScriptEnd("out of memory", 1), total=total, **more)
    return replace(failed, device=replace(failed.device, context=context))
