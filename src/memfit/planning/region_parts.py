"""Where to split a checkpointed module, so that less of what it recomputes exists at a time.

module                ── a ── b ── c ──>
whole                 backward begins with all that a, b and c save
split at c            backward begins with what c saves; then a and b run again, and what they save exists
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from memfit.planning.memory_model import MemoryModel
from memfit.planning.region_options import Copy, RegionOption, Seconds, option_of, total_bytes
from memfit.records import ModuleCall, StepOperations

_MOST_SPLITS = 2
_MOST_PLACES = 16
"""Submodules at which a module may be split: others are left out evenly."""
_WORTH = 0.95
"""Of the most that a module holds at a time: a split must lower it below this share."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a module's call."""

    first: int
    """Its first operation in ``forward``, and ``end``, the one after its last."""
    end: int
    saved: frozenset[int]
    """The storages that autograd saves in it."""
    last_saved: int
    """The first operation that need not run again to recompute them; the call's first if it saves none."""


def parts_of(
    step: StepOperations, call: ModuleCall, inner: Sequence[int], split_at: Sequence[str] = ()
) -> list[Part]:
    """Return the parts of a call, in order.

    Args:
        step: the plain step.
        call: the call.
        inner: the calls made in it, itself included.
        split_at: submodules at whose first call another part begins.
    """
    begins = [(call.first, call.first_save)]
    for name in split_at:
        found = next((each for each in inner if step.calls[each].module == f"{call.module}.{name}"), None)
        if found is not None:
            begins.append((step.calls[found].first, step.calls[found].first_save))
    begins.sort()
    ends = [*begins[1:], (call.end, call.end_save)]
    return [
        Part(
            first,
            end,
            frozenset(step.saved[first_save:end_save]),
            step.saved_at[end_save - 1] if end_save > first_save else call.first,
        )
        for (first, first_save), (end, end_save) in zip(begins, ends, strict=True)
    ]


def recomputed(memory: MemoryModel, parts: Sequence[Part], kept: frozenset[int]) -> dict[int, int]:
    """Return the bytes that have been recomputed when the backward reaches each segment of a call.

    Args:
        memory: the plain step.
        parts: of the call.
        kept: storages that are kept from the forward, or not from this call.
    """
    found: dict[int, int] = {}
    region = memory.segments(parts[0].first, parts[-1].end)
    later: frozenset[int] = frozenset()
    for part in reversed(parts):
        made: dict[int, list[int]] = {}
        segments = memory.segments(part.first, part.end)
        # What this part creates and only later ones save does not exist any more, but ``besides`` assumes it.
        later |= part.saved
        for storage in later - kept:
            creator = memory.segment_of[storage]
            if creator in region:
                made.setdefault(max(creator, segments.start), []).append(storage)
        held = 0
        for segment in segments:
            held += total_bytes(memory.step, made.get(segment, ()))
            found[segment] = held
        if segments:
            found[segments[-1]] = max(held, _on_the_way(memory, parts[0].first, part, kept))
    return found


def _on_the_way(memory: MemoryModel, first: int, part: Part, kept: frozenset[int]) -> int:
    """Return the most bytes that exist at a time while the parts before one run again.

    What nothing saves is freed after the last operation that reads it.
    """
    alive = most = 0
    freed: dict[int, int] = defaultdict(int)
    for number in range(first, part.first):
        for storage in memory.step.forward[number].creates:
            if storage not in kept:
                alive += memory.step.storages[storage]
                if storage not in part.saved:
                    freed[max(memory.last_read[storage], number)] += memory.step.storages[storage]
        most = max(most, alive)
        alive -= freed.pop(number, 0)
    return most


def option_in_parts(
    step: StepOperations,
    call: ModuleCall,
    inner: Sequence[int],
    split_at: tuple[str, ...],
    seconds: Seconds,
    copy: Copy | None = None,
) -> RegionOption:
    """Return what a call holds and costs if it keeps its inputs, and is recomputed in parts.

    The arguments are those of ``parts_of`` and of ``option_of``.
    """
    whole = option_of(step, call, (), seconds, copy)
    parts = parts_of(step, call, inner, split_at)
    again = sum(sum(map(seconds, step.forward[call.first : part.last_saved])) for part in parts[:-1])
    if copy is not None:
        again += (len(parts) - 1) * copy(whole.offloaded) / 2  # each part fetches the inputs
    return replace(whole, seconds=whole.seconds + again, split_at=split_at)


def splits_to_try(memory: MemoryModel, call: ModuleCall, inner: Sequence[int]) -> list[tuple[str, ...]]:
    """Return where a call is split best: in one place, and in more as long as that lowers what it holds.

    Args:
        memory: the plain step.
        call: the call.
        inner: the calls made in it, itself included.
    """
    places: dict[int, str] = {}
    for number in inner[1:]:
        other = memory.step.calls[number]
        inside = other.module.startswith(f"{call.module}.")
        if inside and call.first_save < other.first_save < call.end_save:
            places.setdefault(other.first_save, other.module.removeprefix(f"{call.module}."))
    names = list(dict.fromkeys(places.values()))
    names = names[:: -(-len(names) // _MOST_PLACES) or 1]
    kept = frozenset(call.reads)

    def most(split_at: tuple[str, ...]) -> int:
        parts = parts_of(memory.step, call, inner, split_at)
        held = recomputed(memory, parts, kept)
        return max(held[segment] + memory.besides[segment] for segment in held)

    found: list[tuple[str, ...]] = []
    least = most(())
    for count in range(1, _MOST_SPLITS + 1):
        ways = [(most(split_at), split_at) for split_at in combinations(names, count)]
        if not ways or min(ways)[0] >= _WORTH * least:
            break
        least, split_at = min(ways)
        found.append(split_at)
    return found
