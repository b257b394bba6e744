"""Compare the allocator's events on a card with those on the ghost.

The comparison lists requests that occurred only on the card, above all cuDNN's workspaces, with their bytes
and the operations that requested them.
"""

from collections import Counter
from dataclasses import dataclass

from memfit.records import Action, Trace

_COMPARED = {Action.ALLOC, Action.FREE_REQUESTED, Action.SEGMENT_ALLOC, Action.SEGMENT_FREE}
MOST = 40  # rows kept for each side


@dataclass(frozen=True)
class Request:
    """Allocations of one size by one operation."""

    phase: str
    module: str
    op: str
    bytes: int
    """Requested bytes of each allocation."""
    count: int


@dataclass(frozen=True)
class Difference:
    """The differences between a job's run on the card and on the ghost."""

    card_events: int
    ghost_events: int
    identical: bool
    """Whether both runs have the same events with the same sizes in the same order."""
    first: str
    """Description of the first difference; empty if there is none."""
    only_card: tuple[Request, ...]
    """Requests of the card alone, the largest first, at most ``MOST``."""
    only_ghost: tuple[Request, ...]
    """Requests of the ghost alone, likewise."""


def difference(card: Trace, ghost: Trace) -> Difference:
    """Compare two traces: the sequence of events, and the allocations by operation."""
    sequences = _sequence(card), _sequence(ghost)
    at = _first_difference(*sequences)
    on_card, on_ghost = _requests(card), _requests(ghost)
    return Difference(
        card_events=len(sequences[0]),
        ghost_events=len(sequences[1]),
        identical=at is None,
        first="" if at is None else f"event {at}: card {_describe(card, at)}, ghost {_describe(ghost, at)}",
        only_card=_largest(on_card - on_ghost),
        only_ghost=_largest(on_ghost - on_card),
    )


def _positions(trace: Trace) -> list[int]:
    return [at for at, action in enumerate(trace.events.action.tolist()) if action in _COMPARED]


def _sequence(trace: Trace) -> list[tuple[int, int]]:
    actions, sizes = trace.events.action.tolist(), trace.events.size.tolist()
    return [(actions[at], sizes[at]) for at in _positions(trace)]


def _first_difference(card: list[tuple[int, int]], ghost: list[tuple[int, int]]) -> int | None:
    for at, (one, other) in enumerate(zip(card, ghost, strict=False)):
        if one != other:
            return at
    return None if len(card) == len(ghost) else min(len(card), len(ghost))


def _describe(trace: Trace, at: int) -> str:
    positions = _positions(trace)
    if at >= len(positions):
        return "has ended"
    event = positions[at]
    phase, module, op = _where(trace, event)
    action = Action(int(trace.events.action[event])).name.lower()
    return f"{action} {int(trace.events.size[event]):,} B ({' '.join(filter(None, (phase, module, op)))})"


def _where(trace: Trace, event: int) -> tuple[str, str, str]:
    index = int(trace.events.label[event])
    if index < 0:
        return "", "", ""
    label = trace.labels[index]
    return str(label.phase), label.module, label.op


def _requests(trace: Trace) -> Counter[tuple[str, str, str, int]]:
    events = trace.events
    return Counter(
        (*_where(trace, at), int(events.size[at]))
        for at, action in enumerate(events.action.tolist())
        if action == Action.ALLOC
    )


def _largest(counted: Counter[tuple[str, str, str, int]]) -> tuple[Request, ...]:
    ranked = sorted(counted.items(), key=lambda item: (-item[0][3], item[0]))
    return tuple(Request(*key, count) for key, count in ranked[:MOST])
