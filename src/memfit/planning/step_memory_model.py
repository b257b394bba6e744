"""What a training step holds at each moment, as a function of the activations that it keeps.

forward    segment 0   segment 1   ...   segment n     consecutive operations of one module
backward   segment n   ...   segment 1   segment 0

bytes while the backward of segment g runs  =  activations kept from segments 0 to g
                                            +  what g needs besides, as seen in the plain step
                                            +  what a checkpointed region around g has recomputed so far
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from memfit.records import ModuleCall, StepOperations


@dataclass(frozen=True, slots=True)
class StepMemoryModel:
    """A plain step in segments."""

    step: StepOperations
    starts: tuple[int, ...]
    """The first operation of each segment."""
    segment_of: tuple[int, ...]
    """By storage: the segment that created it; -1 if it exists anyway, or the backward created it."""
    last_read: tuple[int, ...]
    """By storage: the last operation of the forward that reads it; -1 if none does."""
    besides: tuple[int, ...]
    """By segment: bytes at most, during its forward or its backward, besides what is kept from it and from
    those before."""

    @classmethod
    def of(cls, step: StepOperations) -> "StepMemoryModel":
        """Return the model of a step in which nothing was checkpointed."""
        starts: list[int] = []
        highest: list[int] = []
        segment_of_operation: list[int] = []
        segment_of, last_read = [-1] * len(step.storages), [-1] * len(step.storages)
        for number, operation in enumerate(step.forward):
            if not number or operation.call != step.forward[number - 1].call:
                starts.append(number)
                highest.append(0)
            segment = len(starts) - 1
            segment_of_operation.append(segment)
            highest[segment] = max(highest[segment], operation.allocated)
            for storage in operation.creates:
                segment_of[storage] = segment
            for storage in operation.reads:
                last_read[storage] = number
        segment = len(starts) - 1
        for operation in step.backward:
            if operation.source >= 0:
                segment = segment_of_operation[operation.source]
            highest[segment] = max(highest[segment], operation.allocated)
        kept = [0] * len(starts)
        for storage in {storage for call in step.calls for storage in call.saves}:
            if segment_of[storage] >= 0:
                kept[segment_of[storage]] += step.storages[storage]
        held, besides = 0, []
        for most, more in zip(highest, kept, strict=True):
            held += more
            besides.append(most - held)
        return cls(step, tuple(starts), tuple(segment_of), tuple(last_read), tuple(besides))

    @property
    def peak(self) -> int:
        """Bytes of the plain step at its peak, counted from its beginning."""
        return max(operation.allocated for operation in (*self.step.forward, *self.step.backward))

    def segments(self, first: int, end: int) -> range:
        """Return the segments of the operations from ``first`` to before ``end``."""
        return range(bisect_left(self.starts, first), bisect_left(self.starts, end))


def calls_inside(calls: Sequence[ModuleCall]) -> list[list[int]]:
    """Return, for each call, the calls made in it, itself included."""
    inside: list[list[int]] = [[] for _ in calls]
    for number in range(len(calls)):
        outer = number
        while outer >= 0:
            inside[outer].append(number)
            outer = calls[outer].parent
    return inside
