"""Compare the memory of a run with a baseline: the peaks, their terms, and each module's share of them.

A layer that grows by 2 % may be a thousandth of the peak. So each figure is measured against itself: a
module's parameters grew if they grew by more than the tolerance of what they were. Two rules keep a gate
quiet about changes that do not matter:

* terms and modules count only if the peak of allocated bytes changed in the same direction: a module that is
  renamed, or whose tensors are allocated elsewhere, costs nothing;
* a change below a hundred-thousandth of the peak does not count.
"""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from memfit.allocator.timeline import memory_timeline
from memfit.analysis.attribution import attribute_allocations
from memfit.analysis.breakdown import CATEGORY_NAMES
from memfit.analysis.peak_outside_failed_attempts import peak_event_outside_failed_attempts
from memfit.records import (
    Category,
    CheckedFigure,
    CheckVerdict,
    DryRun,
    Figure,
    MemoryBaseline,
    MemoryCheck,
    Provenance,
    Trace,
)
from memfit.units import format_bytes

_PEAKS = ("allocated", "reserved", "process")
_OUTSIDE = ("CUDA context", "NCCL")
_LASTING = ("parameters", "buffers", "optimizer state", "CUDA context", "NCCL")
"""Terms that do not depend on the moment within a training step."""
_NEGLIGIBLE = 1e-5
"""Share of the peak."""


def memory_baseline_of_run(trace: Trace, found: DryRun) -> MemoryBaseline:
    """Return what a run held at its peak."""
    figures = {term.name: term.figure.bytes for term in found.terms}
    terms = (*CATEGORY_NAMES.values(), *_OUTSIDE)
    return MemoryBaseline(
        command=found.command,
        gpu=found.device.name,
        memory=found.device.total.bytes,
        steps=found.steps,
        versions=dict(found.versions),
        phase=found.peak_place.phase,
        module=found.peak_place.module,
        peak={name: figures[name] for name in _PEAKS},
        terms={name: figures[name] for name in terms if figures.get(name)},
        modules=_held_by_modules(trace),
    )


def _held_by_modules(trace: Trace) -> dict[str, dict[str, int]]:
    """Return the requested bytes at the peak of a run, by module and category."""
    line = memory_timeline(trace)
    held = attribute_allocations(trace, line)
    alive = held.alive(peak_event_outside_failed_attempts(trace, line))
    kinds = len(Category)
    keys, index = np.unique(
        held.module[alive].astype(np.int64) * kinds + held.category[alive], return_inverse=True
    )
    sizes = np.zeros(len(keys), np.int64)
    np.add.at(sizes, index, held.requested[alive])
    found: dict[str, dict[str, int]] = {}
    for key, size in zip(keys.tolist(), sizes.tolist(), strict=True):
        found.setdefault(held.modules[key // kinds], {})[CATEGORY_NAMES[Category(key % kinds)]] = size
    return {module: found[module] for module in sorted(found)}


def compare_with_baseline(
    baseline: MemoryBaseline,
    run: MemoryBaseline,
    found: DryRun,
    needs: Figure,
    tolerance: float,
    *,
    fits: bool,
) -> MemoryCheck:
    """Compare a run with a baseline.

    Args:
        baseline: of an earlier run.
        run: of this run.
        found: the summary of this run.
        needs: bytes of the process.
        tolerance: share of each figure by which it may change.
        fits: whether the run fits its GPU.
    """
    sure = {term.name: term.figure.provenance for term in found.terms}
    moved = (baseline.phase, baseline.module) != (run.phase, run.module)
    peaks = tuple(_changes(baseline.peak, run.peak, sure))
    parts = [*_largest_first(_changes(baseline.terms, run.terms, sure))]
    parts += _largest_first(_module_changes(baseline.modules, run.modules, sure))
    parts = [one for one in parts if not moved or one.name in _LASTING]
    least = _NEGLIGIBLE * run.peak["allocated"]

    def beyond(sign: int) -> tuple[CheckedFigure, ...]:
        """Return what changed too much in one direction."""
        counts = sign * (run.peak["allocated"] - baseline.peak["allocated"]) > 0
        floors = [(one, 0.0) for one in peaks] + [(one, least) for one in parts if counts]
        return tuple(one for one, floor in floors if sign * one.change > max(tolerance * one.before, floor))

    grew, fell = beyond(1), beyond(-1)
    verdict = CheckVerdict.GREW if grew else CheckVerdict.FELL if fell else CheckVerdict.SAME
    return MemoryCheck(
        verdict=verdict if fits else CheckVerdict.NO_FIT,
        tolerance=tolerance,
        run=run,
        needs=needs,
        peaks=peaks,
        grew=grew,
        fell=fell,
        differences=tuple(_differences(baseline, run, moved=moved)),
    )


def _changes(
    before: Mapping[str, int],
    after: Mapping[str, int],
    sure: Mapping[str, Provenance],
    module: str | None = None,
) -> Iterator[CheckedFigure]:
    """Yield each figure of two runs; with a module, its terms."""
    for name in dict.fromkeys([*before, *after]):
        provenance = sure.get(name, Provenance.ASSUMED)
        figures = before.get(name, 0), after.get(name, 0)
        yield CheckedFigure(name, module, *figures, provenance)


def _module_changes(
    before: Mapping[str, Mapping[str, int]],
    after: Mapping[str, Mapping[str, int]],
    sure: Mapping[str, Provenance],
) -> Iterator[CheckedFigure]:
    for module in dict.fromkeys([*before, *after]):
        yield from _changes(before.get(module, {}), after.get(module, {}), sure, module)


def _largest_first(figures: Iterable[CheckedFigure]) -> list[CheckedFigure]:
    return sorted(figures, key=lambda one: -abs(one.change))


def _differences(before: MemoryBaseline, now: MemoryBaseline, *, moved: bool) -> Iterator[str]:
    """Yield what else differs between two runs."""
    pairs = {
        "GPU": (before.gpu, now.gpu),
        "GPU memory": (format_bytes(before.memory), format_bytes(now.memory)),
        "Training steps": (str(before.steps), str(now.steps)),
        "Arguments": (" ".join(before.command[1:]), " ".join(now.command[1:])),
    }
    for name in dict.fromkeys([*before.versions, *now.versions]):
        pairs[name] = (before.versions.get(name, "unknown"), now.versions.get(name, "unknown"))
    for what, (was, is_now) in pairs.items():
        if was != is_now:
            yield f"{what}: {was or 'none'} in the baseline, {is_now or 'none'} in this run."
    if moved:
        places = [" of ".join(filter(None, (one.phase, one.module))) for one in (before, now)]
        yield (
            f"The peak has moved from {places[0]} to {places[1]}. Of terms and modules, only parameters, "
            "buffers and optimizer state are compared."
        )
