"""What the page must know of a run beside its moments and blocks: kinds and colours, steps, where to look."""

from dataclasses import dataclass

import numpy as np

from memfit.analysis.breakdown import CATEGORY_NAMES, ROUNDING, category_provenance, peak_event
from memfit.analysis.breakdown import EARLIER as EARLIER_NAME
from memfit.analysis.location import location_at
from memfit.analysis.secondary_peaks import secondary_peaks
from memfit.records import Action, Category, DryRun, MemoryPeak, Phase, Provenance, Timeline, Trace, worst
from memfit.report.html.block_columns import EARLIER, Numbers
from memfit.report.html.drawn_moments import Drawing

_COLOURS = {
    Category.PARAMETER: ("#0072b2", False),
    Category.BUFFER: ("#0072b2", True),
    Category.OPTIMIZER_STATE: ("#56b4e9", False),
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
"""The timeline from the bottom: what stays, then what comes and goes; and whether it is hatched.

Source: Okabe and Ito, Color Universal Design (2008); kinds that share a colour differ by hatching.
"""


@dataclass(frozen=True, slots=True)
class Layer:
    """A kind of bytes, as it is stacked."""

    name: str
    sure: Provenance
    colour: str
    hatched: bool


@dataclass(frozen=True, slots=True)
class PageFacts:
    """What is told of a run as a whole. Moments count what is drawn: see ``moments``."""

    layers: tuple[Layer, ...]
    """From the bottom; rounding is the last."""
    phases: tuple[Phase, ...]
    shortcuts: tuple[int, ...]
    """The moments of ``shortcuts``."""
    failures: tuple[tuple[int, int], ...]
    """Moments at which an allocation failed, and the bytes that were asked for."""
    old: int
    """How many blocks, the first ones, are older than the history."""
    moments: int
    blocks: int
    """How many are drawn one by one."""
    together: int
    """How many are not."""
    room: int
    """Bytes of the device for what PyTorch reserves; 0 if it is not known."""


def facts(trace: Trace, picture: Drawing, near: tuple[MemoryPeak, ...], summary: DryRun) -> PageFacts:
    """Tell what the page must know.

    Args:
        trace: what was recorded.
        picture: what is drawn of it.
        near: its ``shortcuts``.
        summary: of the run: the device's figures.
    """

    def moments(events: list[int]) -> tuple[int, ...]:
        return tuple(np.searchsorted(picture.events, events).tolist())

    failed = np.flatnonzero(trace.events.action == Action.OOM)
    device = summary.device
    return PageFacts(
        layers=_layers(trace, picture),
        phases=tuple(Phase),
        shortcuts=moments([one.event for one in near]),
        failures=tuple(zip(moments(failed.tolist()), trace.events.size[failed].tolist(), strict=True)),
        old=picture.old,
        moments=len(picture.events),
        blocks=len(picture.blocks),
        together=picture.together,
        room=max(0, device.total.bytes - device.context.bytes - device.in_use),
    )


def _layers(trace: Trace, picture: Drawing) -> tuple[Layer, ...]:
    sure = category_provenance(trace)
    layers = [Layer(CATEGORY_NAMES[one], sure[one], *paint) for one, paint in _COLOURS.items()]
    if picture.old:
        layers.append(Layer(EARLIER_NAME, Provenance.ASSUMED, "#4d4d4d", hatched=True))
    return (*layers, Layer(ROUNDING, worst(*sure.values()), "#8c8c8c", hatched=True))


def layers_of(categories: Numbers) -> Numbers:
    """Return the place among layers of each category, as blocks have it."""
    return np.argsort([*_COLOURS, EARLIER])[categories]


def shortcuts(trace: Trace, line: Timeline) -> tuple[MemoryPeak, ...]:
    """Return the moments to look at: the peak, those just below it, and the most of each phase.

    A phase that one of the others is in has no moment of its own.
    """
    if not len(line.allocated):
        return ()
    found = [_at(trace, line, int(np.argmax(line.allocated))), *secondary_peaks(trace, line)]
    seen = {trace.labels[label].phase for label in np.unique(trace.events.label) if label >= 0}
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
        if phase in seen and phase not in {one.place.phase for one in found}:
            found.append(_at(trace, line, peak_event(trace, line, phase)))
    return tuple(found)


def _at(trace: Trace, line: Timeline, event: int) -> MemoryPeak:
    return MemoryPeak(event, location_at(trace, event), int(line.allocated[event]))
