"""What a script needs under every plan: memory that no change which memfit may make removes.

    at the end of an update    parameters, buffers, cuBLAS's workspaces
                               + gradients, or the largest one where the backward updates
                               + the optimizer's state, or one parameter's where it waits on the host
    while an operation runs    parameters, buffers, cuBLAS's workspaces
                               + the optimizer's state, unless it waits on the host
                               + its arguments and results, over the most parts of a batch

The floor is the larger of the two, beside the CUDA context. Sizes are those of the run as written: a quarter
of the state where it may have 8 bits, and half where 16 bits are allowed.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from memfit.allocator.timeline import memory_timeline
from memfit.analysis.attribution import attribute_allocations
from memfit.analysis.breakdown import CATEGORY_NAMES
from memfit.analysis.event_locations import phase_of_events, worst_provenance_of_notes
from memfit.analysis.trial_result import TrialResult
from memfit.planning.module_checkpoint_options import bytes_of_storages
from memfit.planning.optimizer_state_changes import (
    IN_8_BITS,
    has_8_bit_state,
    makes_updates_in_backward,
    offloads_state,
)
from memfit.records import (
    Category,
    Change,
    Figure,
    Operation,
    Phase,
    Provenance,
    StepOperations,
    Term,
    Trace,
    worst_provenance,
)

_ALIGNED = 512
"""Bytes: PyTorch's allocator rounds each request up to a multiple (kMinBlockSize, c10/cuda)."""
_FIXED = (Category.PARAMETER, Category.BUFFER, Category.WORKSPACE)
_UPDATED = (Category.GRADIENT, Category.OPTIMIZER_STATE)
_Parameter = tuple[str, str]
"""Its module, and its name there."""


@dataclass(frozen=True, slots=True)
class MemoryFloor:
    """The least that a script needs under plans of a kind."""

    needs: Figure
    """Bytes of the process."""
    terms: tuple[Term, ...]
    """They sum to that."""

    def bytes_of(self, name: str) -> int:
        """Return the bytes of a term; 0 if there is none."""
        return sum(term.figure.bytes for term in self.terms if term.name == name)


class MemoryFloors:
    """The floors of a script's plans.

    Args:
        plain: its run as written, on one GPU or as one rank.
        parts: into which its batches may be divided at most.
    """

    def __init__(self, plain: TrialResult, parts: int) -> None:
        self.parts = parts
        self._trace = plain.trace
        self._operation = _largest(plain.operations)

    @cached_property
    def _held(self) -> dict[Category, Counter[_Parameter]]:
        """By category and parameter: bytes at the end of the last update.

        Parameters that share an allocation count as one; buffers and workspaces have names of their own.
        """
        trace = self._trace
        found = {kind: Counter[_Parameter]() for kind in (*_FIXED, *_UPDATED)}
        line = memory_timeline(trace)
        attribution = attribute_allocations(trace, line)
        updating = _updating(trace)
        for index in attribution.alive(int(updating[-1])) if len(updating) else ():
            kind = Category(trace.events.category[attribution.born[index]])  # as seen in a live object
            tensor = int(attribution.tensor[index])
            if kind in found and tensor >= 0:
                what = trace.tensors[tensor]
                name = what.name.partition(".")[0] if kind in _UPDATED else what.name
                found[kind][what.module, name] += _rounded(attribution.requested[index])
        return found

    def under(self, plan: Change) -> MemoryFloor:
        """Return the floor of a plan's precision and optimizer, whatever else it changes."""
        precision = plan.plan.get("precision")
        held = 1.0 if precision is None or precision.get("autocast", True) else 0.5
        fixed = {
            "parameters": self._sum(Category.PARAMETER, held),
            "buffers": self._sum(Category.BUFFER, held),
            "cuBLAS workspaces": self._sum(Category.WORKSPACE, 1.0),
        }
        state = held * (IN_8_BITS if has_8_bit_state(plan) else 1.0)
        computed = 1.0 if precision is None else 0.5
        ways = (self._in_update(plan, held, state), self._in_operation(plan, computed, state))
        most = fixed | max(ways, key=lambda way: sum(way.values()))
        return _floor(self._trace, most)

    def _in_update(self, plan: Change, held: float, left: float) -> dict[str, int]:
        """Return what an update needs beside what always exists.

        Args:
            plan: the plan.
            held: share of the gradients.
            left: share of the optimizer's state.
        """
        gradients, state = self._held[Category.GRADIENT], self._held[Category.OPTIMIZER_STATE]
        alone = {name: int(held * gradients[name]) for name in gradients | state}
        waiting = {name: int(left * state[name]) for name in gradients | state}
        if not makes_updates_in_backward(plan):
            found = {"gradients": sum(alone.values())}
        elif not offloads_state(plan):
            found = {"the largest gradient": max(alone.values(), default=0)}
        else:
            together = {name: alone[name] + waiting[name] for name in alone}
            name = max(together, key=together.__getitem__, default=("", ""))
            what = f"gradient and optimizer state of {'.'.join(filter(None, name))}"
            return {what: together.get(name, 0)}
        if offloads_state(plan):
            return found | {"the largest parameter's optimizer state": max(waiting.values(), default=0)}
        return found | {"optimizer state": sum(waiting.values())}

    def _in_operation(self, plan: Change, computed: float, left: float) -> dict[str, int]:
        """Return what the largest operation needs beside what always exists.

        Args:
            plan: the plan.
            computed: share of its arguments and results.
            left: share of the optimizer's state.
        """
        name, size = self._operation
        parts = 1 if makes_updates_in_backward(plan) else self.parts
        state = 0 if offloads_state(plan) else self._sum(Category.OPTIMIZER_STATE, left)
        return {"optimizer state": state, name: int(computed * size / parts)}

    def _sum(self, kind: Category, share: float) -> int:
        return int(share * self._held[kind].total())


def memory_floor_of_updates(result: TrialResult) -> MemoryFloor:
    """Return what the updates of a run need, beside what the size of batches may have to do with."""
    trace = result.trace
    line, updating = memory_timeline(trace), _updating(trace)
    found: Counter[str] = Counter()
    if len(updating):
        attribution = attribute_allocations(trace, line)
        made_in_update = attribution.phase == list(Phase).index(Phase.OPTIMIZER)
        for index in attribution.alive(int(updating[line.allocated[updating].argmax()])):
            kind = Category(attribution.category[index])
            seen = trace.events.category[attribution.born[index]] == kind and attribution.tensor[index] >= 0
            if (kind in (*_FIXED, *_UPDATED) and seen) or (
                kind is Category.TEMPORARY and made_in_update[index]
            ):
                found[CATEGORY_NAMES[kind]] += _rounded(attribution.requested[index])
    return _floor(trace, found)


def _updating(trace: Trace) -> npt.NDArray[np.int64]:
    """Return the events of updates after the backward."""
    return np.flatnonzero(phase_of_events(trace) == list(Phase).index(Phase.OPTIMIZER))


def _rounded(size: int) -> int:
    return -(-int(size) // _ALIGNED) * _ALIGNED


def _floor(trace: Trace, held: Mapping[str, int]) -> MemoryFloor:
    outside = trace.device.outside
    sizes = worst_provenance_of_notes(note for note in trace.notes if note.sizes)
    sure = worst_provenance(Provenance.SIMULATED, sizes, outside.provenance)
    name = "CUDA context" if trace.device.nccl is None else "CUDA context and NCCL"
    terms = {name: outside.bytes, **held}
    return MemoryFloor(
        Figure(sum(terms.values()), sure),
        tuple(Term(name, Figure(size, sure)) for name, size in terms.items() if size),
    )


def _largest(step: StepOperations | None) -> tuple[str, int]:
    """Return the operation of a step with the largest arguments and results, and their bytes."""
    if step is None or step.compiled:
        return "", 0
    name, size = "", 0
    for operation in (*step.forward, *step.backward):
        if (own := _touched(step, operation)) > size:
            name, size = _named(step, operation), own
    return name, size


def _touched(step: StepOperations, operation: Operation) -> int:
    """Return the bytes that exist while an operation runs, whatever else does.

    A view may be all that is left of what it was a view of, so that arguments count as far as they are read.
    """
    made = bytes_of_storages(step, operation.creates)
    read = bytes_of_storages(step, {*operation.reads, *operation.writes}.difference(operation.creates))
    return made + min(read, max(0, operation.moved - made))


def _named(step: StepOperations, operation: Operation) -> str:
    call = step.forward[operation.source].call if operation.source >= 0 else operation.call
    where = f" of {step.calls[call].module}" if call >= 0 and step.calls[call].module else ""
    return f"{operation.name.rpartition('.')[0] or operation.name}{where}, the largest operation"
