"""From the marks of a run to its stages: what the script was doing with its model, and what that needs.

marks     LOAD │ BATCH FORWARD BACKWARD BATCH FORWARD BACKWARD │ BATCH FORWARD EVALUATION LOADER_END │ SAVE
stage  loading │ training                                      │ evaluation                          │ saving

A passage begins with a forward, or with the batch that it is passed. Whether it evaluates follows from what
comes later: a backward through it, or none before the next batch.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memfit.analysis.event_locations import (
    script_line_of_event,
    script_location_at,
    step_end_events,
    worst_provenance_of_notes,
)
from memfit.analysis.loader_passes import LoaderPasses
from memfit.analysis.peak_outside_failed_attempts import (
    event_of_highest_level,
    events_outside_failed_attempts,
)
from memfit.records import (
    Action,
    Category,
    Figure,
    Mark,
    MarkKind,
    SaveKind,
    Stage,
    StageUse,
    Timeline,
    Trace,
    UntrainedForwardReason,
    worst_provenance,
)

_BEGINS_PASSAGE = (MarkKind.BATCH, MarkKind.FORWARD)
_ENDS_SAVING = (*_BEGINS_PASSAGE, MarkKind.LOADER_END, MarkKind.LOAD)
NEEDED_BY_TRAINING = (
    *(Category.WORKSPACE, Category.PARAMETER, Category.BUFFER, Category.GRADIENT, Category.OPTIMIZER_STATE),
)
_LEAVES = (Stage.EVALUATION, Stage.SAVING)


@dataclass(frozen=True, slots=True)
class StageSpan:
    """Events from ``begin`` up to ``end`` in one stage."""

    begin: int
    end: int
    stage: Stage


def memory_use_by_stage(trace: Trace, line: Timeline, failure: int | None = None) -> tuple[StageUse, ...]:
    """Return what each stage uses, in the order in which the script enters them.

    Args:
        trace: of a run that was not ended after a few steps.
        line: its timeline.
        failure: the failed allocation that the answer is about; None if there is none.

    Returns:
        Nothing for a run whose marks do not tell stages apart, or whose trace starts in the middle of it.
    """
    if _starts_late(trace):
        return ()
    spans = stage_spans(trace)
    answered = events_outside_failed_attempts(trace, line)
    uses = (
        _use(trace, line, answered, failure, [span for span in spans if span.stage is stage])
        for stage in dict.fromkeys(span.stage for span in spans)
    )
    return tuple(use for use in uses if use is not None)


def _use(
    trace: Trace,
    line: Timeline,
    answered: npt.NDArray[np.bool_],
    failure: int | None,
    spans: Sequence[StageSpan],
) -> StageUse | None:
    """Return what a stage uses; None if nothing of it counts."""
    own, entered = _events(trace, spans)
    inside = (own | entered) & answered
    if not inside.any():
        return None
    peak = event_of_highest_level(line.allocated, inside)
    reserved = int(line.reserved[inside].max())
    sure = worst_provenance_of_notes(note for note in trace.notes if note.sizes)
    outside = trace.device.outside
    stage = spans[0].stage
    ran_out = failure is not None and bool(own[failure])
    place = script_location_at(trace, failure if failure is not None and ran_out else peak)
    leaves, leaves_line = _left(trace, line, spans) if stage in _LEAVES else (0, "")
    return StageUse(
        stage=stage,
        times=len(spans),
        allocated=int(line.allocated[peak]),
        reserved=reserved,
        process=Figure(
            reserved + outside.bytes, worst_provenance(sure, outside.provenance), "reserved + CUDA context"
        ),
        place=place if own[peak] or ran_out else None,
        ran_out=ran_out,
        leaves=leaves,
        leaves_line=leaves_line,
        gradients=stage is Stage.EVALUATION and _records_gradients(trace.marks),
    )


def _records_gradients(marks: Sequence[Mark]) -> bool:
    """Return whether a forward of an evaluation does."""
    return any(
        passage.kind in (None, UntrainedForwardReason.EVAL_MODE) and stage is Stage.EVALUATION
        for passage, stage in _judged_passages(marks, LoaderPasses())
    )


def stage_of_event(trace: Trace, event: int) -> str:
    """Return the stage of an event; empty for a run whose marks do not tell stages apart."""
    return next((str(span.stage) for span in stage_spans(trace) if span.begin <= event < span.end), "")


def events_in_stage(trace: Trace, stage: Stage) -> npt.NDArray[np.bool_]:
    """Return which events show what the script holds in a stage: its own, and the one before it enters it."""
    own, entered = _events(trace, [span for span in stage_spans(trace) if span.stage is stage])
    return own | entered


def _events(trace: Trace, spans: Sequence[StageSpan]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return which events spans have, and which are the last before one of them."""
    own, entered = np.zeros(len(trace.events), np.bool_), np.zeros(len(trace.events), np.bool_)
    for span in spans:
        own[span.begin : span.end] = True
        entered[max(span.begin - 1, 0)] = True
    return own, entered


def stage_spans(trace: Trace) -> list[StageSpan]:
    """Return the stages of a run, in order; none if its marks do not tell them apart.

    The events before the first mark are the setup, unless the trace starts in the middle of the run.
    Neighbouring spans differ.
    """
    marks = trace.marks
    if not any(map(_is_of_stages, marks)):
        return []
    spans = stage_spans_between(marks, len(trace.events), ran_out=trace.end.reason == "out of memory")
    return spans[1:] if _starts_late(trace) else spans


def _starts_late(trace: Trace) -> bool:
    return bool(np.any(trace.events.action == Action.EARLIER))


def stage_spans_between(
    marks: Sequence[Mark],
    end: int,
    *,
    ran_out: bool,
    stage: Stage = Stage.SETUP,
    passes: LoaderPasses | None = None,
) -> list[StageSpan]:
    """Return the stages between position 0 and a later one, in order. Neighbouring spans differ.

    Args:
        marks: those between the two.
        end: the later position.
        ran_out: whether memory ran out at the end.
        stage: the one before the first mark.
        passes: the passes over loaders before the first mark; they go on. None if there are none.
    """
    begins = [(0, stage), *_stage_begins(marks, stage, passes or LoaderPasses(), ran_out=ran_out)]
    begins = [next(group) for _, group in itertools.groupby(begins, key=lambda each: each[1])]
    ends = [position for position, _ in begins[1:]] + [end]
    return [StageSpan(begin, end, stage) for (begin, stage), end in zip(begins, ends, strict=True)]


def _is_of_stages(mark: Mark) -> bool:
    """Return whether only a run with marks of stages has such a mark."""
    alone = (MarkKind.EVALUATION, MarkKind.BATCH, MarkKind.LOAD)
    return mark.kind in alone or (mark.kind is MarkKind.SAVE and mark.index != SaveKind.STATE)


def _stage_begins(
    marks: Sequence[Mark], passage: Stage, passes: LoaderPasses, *, ran_out: bool
) -> Iterator[tuple[int, Stage]]:
    """Yield the positions at which stages begin; a stage may begin that is already in force."""
    stage_of = {passage.begin: stage for passage, stage in _judged_passages(marks, passes)}
    writes = _writes(marks, ran_out=ran_out)
    for index, mark in enumerate(marks):
        passage = stage_of.get(index, passage)
        if mark.kind is MarkKind.LOAD:
            yield mark.position, Stage.LOADING
        elif writes[index] and _is_saving(mark) and passage is not Stage.SETUP:
            yield mark.position, Stage.SAVING
        elif mark.kind in _ENDS_SAVING:
            yield mark.position, passage


def _is_saving(mark: Mark) -> bool:
    """Return whether the thread that trains saves something, if that is written to a file."""
    return mark.kind is MarkKind.SAVE and mark.index != SaveKind.FILE_BESIDE


def _writes(marks: Sequence[Mark], *, ran_out: bool) -> list[bool]:
    """Return, for each mark, whether a file is written with it or after it, before the next batch or forward.

    A script that ran out of memory with the copy of a state_dict would have written one.
    """
    found, writes = [], ran_out
    for mark in reversed(marks):
        if mark.kind in _ENDS_SAVING:
            writes = False
        elif mark.kind is MarkKind.SAVE and mark.index != SaveKind.STATE:
            writes = True
        found.append(writes)
    return found[::-1]


@dataclass(slots=True)
class _Passage:
    begin: int
    """Its first mark, ``forward`` that of its forward."""
    forward: int
    of_pass: int
    """The pass over a loader that it is part of; -1 outside of one."""
    kind: int | None = None
    """As in ``UntrainedForwardReason``."""
    trains: bool = False
    """Whether a backward follows before the next passage."""
    before_batch: bool = False
    """Whether a backward follows before the next batch."""


def _judged_passages(marks: Sequence[Mark], passes: LoaderPasses) -> list[tuple[_Passage, Stage]]:
    """Return the passages of a run, the last one first, each with its stage."""
    passages, ended = _passages(marks, passes)
    found: list[tuple[_Passage, Stage]] = []
    eval_mode_trains = False  # a backward follows before the model is in training mode
    for passage in reversed(passages):
        if passage.kind is None:
            eval_mode_trains = False
            evaluates = not passage.trains and passage.of_pass in ended - passes.trained
        elif passage.kind == UntrainedForwardReason.EVAL_MODE:
            eval_mode_trains |= passage.trains
            evaluates = not eval_mode_trains
        else:
            evaluates = passage.kind == UntrainedForwardReason.EVALUATES or not passage.before_batch
        found.append((passage, Stage.EVALUATION if evaluates else Stage.TRAINING))
    return found


def _passages(marks: Sequence[Mark], passes: LoaderPasses) -> tuple[list[_Passage], set[int]]:
    """Return the passages of a run, and which of its passes over loaders ended."""
    passages: list[_Passage] = []
    passes.begin()
    for index, mark in enumerate(marks):
        if mark.kind is MarkKind.BATCH:
            passes.read(mark.index, index)
        elif mark.kind is MarkKind.LOADER_END:
            passes.end(mark.index)
        elif mark.kind is MarkKind.FORWARD:
            current = passes.current
            passages.append(_Passage(passes.forward(index), index, current))
        elif mark.kind is MarkKind.EVALUATION and passages:
            if mark.index != UntrainedForwardReason.NO_PARAMETERS:
                passages[-1].kind = mark.index
            elif passages[-1].begin == passages[-1].forward:  # it is part of the one before
                passages.pop()
        elif mark.kind is MarkKind.BACKWARD and passages:
            passages[-1].trains = True
            passes.backward()
        elif mark.kind is MarkKind.LOAD or _is_saving(mark):
            passes.checkpoint()
    batches = Counter(passage.of_pass for passage in passages if passage.begin != passage.forward)
    ended = passes.ended | {each for each in passes.open if batches[each] > 1}  # or the script failed in them
    _look_ahead(passages, marks)
    return passages, ended


def _look_ahead(passages: Sequence[_Passage], marks: Sequence[Mark]) -> None:
    """Say of each passage whether a backward follows before the next batch, checkpoint or end of a loader."""
    follows = False
    last = len(marks)
    for passage in reversed(passages):
        for index in range(last - 1, passage.forward - 1, -1):
            if marks[index].kind is MarkKind.BACKWARD:
                follows = True
            elif marks[index].kind in (MarkKind.BATCH, MarkKind.LOADER_END) or (
                marks[index].kind is MarkKind.SAVE and marks[index].index == SaveKind.FILE
            ):
                follows = False
        passage.before_batch = follows
        last = passage.forward


def _left(trace: Trace, line: Timeline, spans: Sequence[StageSpan]) -> tuple[int, str]:
    """Return the most bytes that one span leaves behind, and the line that allocated most of them.

    What training needs is not counted: workspaces, and the model and optimizer that a script may make here.
    """
    ends = step_end_events(trace)
    born = (trace.events.action == Action.ALLOC) & ~np.isin(trace.events.category, NEEDED_BY_TRAINING)
    most, where = 0, ""
    for span in spans:
        later = int(np.searchsorted(ends, span.end, side="right"))
        if later == len(ends):
            break  # no training step follows: the script may be about to end
        own = np.flatnonzero(born[span.begin : span.end]) + span.begin
        own = own[line.freed_by[own] >= ends[later]]
        if (size := int(line.block_size[own].sum())) > most:
            most, where = size, _line_of_most(trace, line, own)
    return most, where


def _line_of_most(trace: Trace, line: Timeline, events: npt.NDArray[np.int64]) -> str:
    sizes: dict[str, int] = {}
    for event in events.tolist():
        at = script_line_of_event(trace, event)
        sizes[at] = sizes.get(at, 0) + int(line.block_size[event])
    return max(sizes, key=lambda at: sizes[at], default="")
