"""Facts about a run besides its moments and blocks: categories and their colours, shortcuts, failures."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from memfit.analysis.block_columns import EARLIER, Numbers
from memfit.analysis.breakdown import CATEGORY_NAMES, ROUNDING, category_provenance, peak_event
from memfit.analysis.breakdown import EARLIER as EARLIER_NAME
from memfit.analysis.location import location_at
from memfit.analysis.overall_peak import failed_allocations, overall_peak
from memfit.analysis.run_stages import stage_spans
from memfit.analysis.secondary_peaks import secondary_peaks
from memfit.records import Category, DryRun, MemoryPeak, Phase, Provenance, Stage, Timeline, Trace, worst
from memfit.report.html.drawn_moments import Drawing

_COLOURS = {
    Category.PARAMETER: ("#0072b2", False),
    Category.BUFFER: ("#0072b2", True),
    Category.OPTIMIZER_STATE: ("#56b4e9", False),
    Category.COPY: ("#56b4e9", True),
    Category.HELD: ("#d55e00", True),
    Category.GRADIENT: ("#cc79a7", False),
    Category.INPUT: ("#009e73", True),
    Category.ACTIVATION: ("#009e73", False),
    Category.RECOMPUTED: ("#e69f00", True),
    Category.OUTPUT: ("#d55e00", False),
    Category.WORKSPACE: ("#f0e442", False),
    Category.COMMUNICATION: ("#f0e442", True),
    Category.TEMPORARY: ("#e69f00", False),
    Category.UNKNOWN: ("#8c8c8c", False),
}
"""Colour of each category and whether it is hatched, from the bottom of the timeline: lasting memory first.

Source: Okabe and Ito, Color Universal Design (2008); categories that share a colour differ by hatching.
"""


@dataclass(frozen=True, slots=True)
class Layer:
    """A category of memory in the stacked timeline."""

    name: str
    provenance: Provenance
    colour: str
    hatched: bool


@dataclass(frozen=True, slots=True)
class Failure:
    """An allocation that failed."""

    at: int
    """Its moment."""
    needed: int
    """Bytes that it requested from the device."""
    available: int
    """Bytes that the device had free."""


@dataclass(frozen=True, slots=True)
class PageFacts:
    """Facts about the whole run. Moments are indices into the drawn moments: see ``drawn_moments.py``."""

    layers: tuple[Layer, ...]
    """From the bottom of the stack; rounding comes last."""
    phases: tuple[Phase, ...]
    shortcuts: tuple[int, ...]
    """The moments to look at: see the function ``shortcuts``."""
    failures: tuple[Failure, ...]
    """Allocations that failed."""
    old: int
    """Number of blocks older than the history; they come first."""
    moments: int
    blocks: int
    """Number of blocks that are drawn individually."""
    together: int
    """Number of blocks that are drawn together."""
    room: int
    """Device memory available to PyTorch's allocator, in bytes; 0 if unknown."""


def facts(trace: Trace, picture: Drawing, near: tuple[MemoryPeak, ...], summary: DryRun) -> PageFacts:
    """Collect the facts for the page.

    Args:
        trace: what was recorded.
        picture: what is drawn of it.
        near: its ``shortcuts``.
        summary: the summary of the run, for the figures of the device.
    """

    def moments(events: list[int]) -> tuple[int, ...]:
        return tuple(np.searchsorted(picture.events, events).tolist())

    failed = failed_allocations(trace)
    device = summary.device
    return PageFacts(
        layers=_layers(trace, picture),
        phases=tuple(Phase),
        shortcuts=moments([one.event for one in near]),
        failures=tuple(
            map(
                Failure,
                moments(failed.tolist()),
                *(column[failed].tolist() for column in (trace.events.size, trace.events.address)),
            )
        ),
        old=picture.old,
        moments=len(picture.events),
        blocks=len(picture.blocks),
        together=picture.together,
        room=max(0, device.total.bytes - device.outside.bytes - device.in_use),
    )


def _layers(trace: Trace, picture: Drawing) -> tuple[Layer, ...]:
    provenances = category_provenance(trace)
    layers = [Layer(CATEGORY_NAMES[one], provenances[one], *paint) for one, paint in _COLOURS.items()]
    if picture.old:
        layers.append(Layer(EARLIER_NAME, Provenance.ASSUMED, "#4d4d4d", hatched=True))
    return (*layers, Layer(ROUNDING, worst(*provenances.values()), "#8c8c8c", hatched=True))


def layers_of(categories: Numbers) -> Numbers:
    """Return the layer index of each category in a column of blocks."""
    return np.argsort([*_COLOURS, EARLIER])[categories]


def shortcuts(trace: Trace, line: Timeline) -> tuple[MemoryPeak, ...]:
    """Return the moments to look at: the peak, those just below it, and the peak of each phase and stage.

    A phase or stage that already contains one of these moments gets none of its own.
    """
    if not len(line.allocated):
        return ()
    found = [_at(trace, line, overall_peak(trace, line)), *secondary_peaks(trace, line)]
    seen = {trace.labels[label].phase for label in np.unique(trace.events.label) if label >= 0}
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
        if phase in seen and phase not in {one.place.phase for one in found}:
            found.append(_at(trace, line, peak_event(trace, line, phase)))
    found += (_at(trace, line, peak_event(trace, line, stage)) for stage in _stages_without(trace, found))
    return tuple(found)


def _stages_without(trace: Trace, found: Sequence[MemoryPeak]) -> Iterator[Stage]:
    """Yield the stages of a run, but for its setup, that contain none of some moments."""
    spans = stage_spans(trace)
    for stage in dict.fromkeys(span.stage for span in spans if span.stage is not Stage.SETUP):
        own = [span for span in spans if span.stage is stage]
        if not any(span.begin <= one.event < span.end for span in own for one in found):
            yield stage


def _at(trace: Trace, line: Timeline, event: int) -> MemoryPeak:
    return MemoryPeak(event, location_at(trace, event), int(line.allocated[event]))
