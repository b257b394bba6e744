"""Where streams race: what a run needs if the work of side streams finishes late.

Memory that a side stream uses (``Tensor.record_stream``) is free again once the GPU has done that work. On
the ghost it is done at once, which gives the least that a run can take. A second run, in which the work of a
stream is done only when the host waits for it, gives the most. What the script needs is less: where memory is
short, PyTorch itself waits for the work that still uses freed blocks.
"""

import operator
from dataclasses import replace

import numpy as np

from memfit.records import (
    Action,
    DryRun,
    Figure,
    Note,
    PeakRange,
    Provenance,
    RangeCause,
    ScriptEnd,
    Term,
    Trace,
    worst_provenance,
)

AT_ONCE = "if GPU work on side streams is done at once"
"""Source of a figure: the least that is needed."""


def may_side_streams_change_peak(trace: Trace) -> bool:
    """Return whether the moment at which memory is free again may depend on the GPU.

    That is so if the script allocated on several streams, if a block was freed later than the script released
    it, or if a collective held a tensor that the script had dropped. Not found: a script that allocates on
    one stream alone, and whose every such block was freed before anything else happened.
    """
    if trace.device.race:
        return True
    action, address = trace.events.action, trace.events.address
    if len(np.unique(trace.events.stream[action == Action.ALLOC])) > 1:
        return True
    requested = np.flatnonzero(action[:-1] == Action.FREE_REQUESTED)
    completed = requested + 1
    at_once = (action[completed] == Action.FREE_COMPLETED) & (address[completed] == address[requested])
    return not bool(np.all(at_once))


def with_side_stream_range(early: DryRun, late: DryRun) -> DryRun:
    """Return the answer of two runs whose side streams finish early and late: the late one, with the range.

    Args:
        early: the run whose work is done at once.
        late: the run whose work is done late, on the device of ``early``; ``needs``, if it is known, is the
            most of both runs.
    """
    at_once, finished_late = (
        (found.peak_allocated, found.peak_reserved, found.peak_process.bytes) for found in (early, late)
    )
    if all(map(operator.le, finished_late, at_once)):
        return early
    # The allocator may fit blocks better if some are free later: a figure may be the other way round.
    known = [found.range for found in (early, late) if found.range is not None]
    racing = replace(PeakRange.exactly(*at_once), causes=(RangeCause.STREAMS,))
    either = PeakRange.around(racing, PeakRange.exactly(*finished_late), *known)
    text = (
        "Streams race: memory that a side stream or a collective uses is free again when the GPU has done "
        "that work. The figures assume that this is not before the script waits for it, or the step ends. On "
        "a GPU with less than the run takes, PyTorch waits for that work, and releases its cache: this takes "
        "time."
    )
    needs = either.process.most if late.needs is None else late.needs.bytes
    left = late.device.total.bytes - late.device.in_use - needs
    verdict = "may not fit" if left < 0 else "tight" if left < late.uncertainty else "fits"
    unsure = {"cached, not allocated", "reserved", "process"}
    if either.allocated.most > either.allocated.least:
        unsure |= {term.name for term in late.terms} - {"CUDA context", "NCCL"}
    return replace(
        late,
        terms=tuple(_assumed(term) if term.name in unsure else term for term in late.terms),
        verdict=verdict if early.verdict in ("fits", "tight") else early.verdict,
        needs=late.needs and _assumed_figure(late.needs),
        range=either,
        notes=(*late.notes, Note(Provenance.ASSUMED, text, sizes=True)),
    )


def without_late_run(early: DryRun, end: ScriptEnd) -> DryRun:
    """Return the answer of a run whose side streams finish early, where the run that finishes late failed.

    The early run alone gives the least that the script can need, from which no fit follows.
    """
    return replace(early, verdict="unknown", untried=end) if early.verdict in ("fits", "tight") else early


def _assumed(term: Term) -> Term:
    """Return a term whose bytes depend on when work is done."""
    return replace(term, figure=_assumed_figure(term.figure))


def _assumed_figure(figure: Figure) -> Figure:
    return replace(figure, provenance=worst_provenance(figure.provenance, Provenance.ASSUMED))
