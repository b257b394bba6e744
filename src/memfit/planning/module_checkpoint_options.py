"""Ways to checkpoint a module: which operations' results are kept, what that holds, and what it costs.

keep everything that autograd saves       no time        the plain step
keep the matrix products                  a little
keep its inputs                           its forward    full checkpointing
keep its inputs, recompute it in parts    more           full checkpointing holds less at a time
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice

from memfit.planning.step_memory_model import StepMemoryModel
from memfit.records import HostUnits, ModuleCall, Operation, StepOperations

Seconds = Callable[[Operation], float]
Copy = Callable[[int], float]
LEAST_OFFLOADED = 1 << 20
"""Bytes: ``memfit.Offload`` leaves smaller storages on the device."""
FREE = HostUnits()
"""Of a host that is ahead of the GPU."""
MOST = 16
"""Options of a module at most."""


@dataclass(frozen=True, slots=True)
class ModuleCheckpointOption:
    """One way to checkpoint a module, in one of its calls."""

    save_ops: tuple[str, ...]
    """As in ``memfit.Checkpointing``, like ``split_at``."""
    keeps: frozenset[int]
    """Storages kept from its forward to its backward."""
    seconds: float
    """Of the operations that run again, and of copies to the host and back."""
    offloaded: int = 0
    """Bytes of inputs that wait on the host."""
    split_at: tuple[str, ...] = ()


def save_ops_to_try(
    step: StepOperations, call: ModuleCall, seconds: Seconds, changed: frozenset[int]
) -> list[tuple[str, ...]]:
    """Return sets of operations that may be worth keeping in a module: those that save most time per byte.

    The sets grow: from none to all that can be kept. Torch's selective checkpointing runs every operation
    again that it does not keep, so that the best set of a size is a knapsack, which this order solves within
    a fraction of a percent.

    Operations that draw random numbers are kept all or none: one that is kept draws nothing again, and the
    next one that runs again would draw other numbers.

    Args:
        step: the plain step.
        call: one of the module's.
        seconds: how long an operation takes.
        changed: storages that are changed in place later, whose contents cannot be kept.
    """
    candidates: list[tuple[float, int, tuple[str, ...]]] = []
    drawing: list[tuple[float, int, str]] = []
    all_can_be_kept = True
    for name, operation in _rerun_operations(step, call):
        size = bytes_of_storages(step, operation.creates)
        can_be_kept = bool(size) and changed.isdisjoint(operation.creates)
        if operation.random:
            drawing.append((seconds(operation), size, name))
            all_can_be_kept &= can_be_kept
        elif can_be_kept:
            candidates.append((seconds(operation), size, (name,)))
    if drawing and all_can_be_kept:
        names = tuple(name for _, _, name in drawing)
        candidates.append((sum(time for time, _, _ in drawing), sum(size for _, size, _ in drawing), names))
    candidates.sort(key=lambda each: each[0] / each[1], reverse=True)
    sets: list[tuple[str, ...]] = [()]
    for _, _, names in candidates:
        sets.append((*sets[-1], *names))
    every = -(-len(sets) // MOST)
    return sets[::every]


def module_checkpoint_option(
    step: StepOperations,
    call: ModuleCall,
    save_ops: tuple[str, ...],
    seconds: Seconds,
    copy: Copy | None = None,
    host: HostUnits = FREE,
) -> ModuleCheckpointOption:
    """Return what a call holds and costs if the module is checkpointed and keeps some operations' results.

    Args:
        step: the plain step.
        call: one of the module's.
        save_ops: the operations whose results it keeps.
        seconds: how long an operation takes.
        copy: how long it takes to copy bytes to the host and back, if the module's inputs wait there.
        host: seconds of one region, of a tensor saved in it, and of asking whether an operation's results are
            kept, as its forward does, and again when it is recomputed.
    """
    keeps = {storage for storage in call.reads if step.storages[storage]}
    again, offloaded = 0.0, 0
    if copy is not None:
        moved = {storage for storage in keeps if step.storages[storage] >= LEAST_OFFLOADED}
        keeps -= moved
        offloaded = bytes_of_storages(step, moved)
        again = copy(offloaded)
    saved = frozenset(save_ops)
    again += host.checkpointed_regions + host.replayed_tensors * (call.end_save - call.first_save)
    if saved:
        again += host.watched_operations * (
            call.end - call.first + min(call.last_saved, call.end) - call.first
        )
    for name, operation in _rerun_operations(step, call):
        if name in saved:
            keeps.update(operation.creates)
        else:
            again += seconds(operation)
    return ModuleCheckpointOption(save_ops, frozenset(keeps), again, offloaded)


def useful_checkpoint_options(
    step: StepOperations, options: Iterable[ModuleCheckpointOption], plain: frozenset[int]
) -> list[ModuleCheckpointOption]:
    """Return the options that hold less than plain training, without those that another beats in both."""
    best: list[ModuleCheckpointOption] = []
    limit = bytes_of_storages(step, plain)
    for option in sorted(options, key=lambda each: (each.seconds, bytes_of_storages(step, each.keeps))):
        if (size := bytes_of_storages(step, option.keeps)) < limit:
            best.append(option)
            limit = size
    return best


def named_operations(step: StepOperations, call: ModuleCall) -> Iterator[tuple[str, Operation]]:
    """Yield a call's operations with their names in ``save_ops``."""
    seen: Counter[str] = Counter()
    for operation in step.forward[call.first : call.end]:
        yield f"{operation.name}:{seen[operation.name]}", operation
        seen[operation.name] += 1


def _rerun_operations(step: StepOperations, call: ModuleCall) -> Iterator[tuple[str, Operation]]:
    """Yield those of a call's operations up to the last that must run again, with their names."""
    return islice(named_operations(step, call), max(0, call.last_saved - call.first))


def bytes_of_storages(step: StepOperations, storages: Iterable[int]) -> int:
    """Return the bytes of some storages of a step."""
    return sum(step.storages[storage] for storage in storages)


_MOST_SPLITS = 2
_MOST_PLACES = 16
"""Submodules at which a module may be split: others are left out evenly."""
_WORTH = 0.95
"""Of the most that a module holds at a time: a split must lower it below this share."""


@dataclass(frozen=True, slots=True)
class ModuleCallPart:
    """One part of a module's call."""

    first: int
    """Its first operation in ``forward``, and ``end``, the one after its last."""
    end: int
    saved: frozenset[int]
    """The storages that autograd saves in it."""
    last_saved: int
    """The first operation that need not run again to recompute them; the call's first if it saves none."""


def parts_of_module_call(
    step: StepOperations, call: ModuleCall, inner: Sequence[int], split_at: Sequence[str] = ()
) -> list[ModuleCallPart]:
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
        ModuleCallPart(
            first,
            end,
            frozenset(step.saved[first_save:end_save]),
            step.saved_at[end_save - 1] if end_save > first_save else call.first,
        )
        for (first, first_save), (end, end_save) in zip(begins, ends, strict=True)
    ]


def bytes_recomputed_in_segments(
    memory: StepMemoryModel, parts: Sequence[ModuleCallPart], kept: frozenset[int]
) -> dict[int, int]:
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
            held += bytes_of_storages(memory.step, made.get(segment, ()))
            found[segment] = held
        if segments:
            found[segments[-1]] = max(held, _on_the_way(memory, parts[0].first, part, kept))
    return found


def _on_the_way(memory: StepMemoryModel, first: int, part: ModuleCallPart, kept: frozenset[int]) -> int:
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


def module_checkpoint_option_in_parts(
    step: StepOperations,
    call: ModuleCall,
    inner: Sequence[int],
    split_at: tuple[str, ...],
    seconds: Seconds,
    copy: Copy | None = None,
    host: HostUnits = FREE,
) -> ModuleCheckpointOption:
    """Return what a call holds and costs if it keeps its inputs, and is recomputed in parts.

    The arguments are those of ``parts_of_module_call`` and of ``module_checkpoint_option``.
    """
    whole = module_checkpoint_option(step, call, (), seconds, copy, host)
    parts = parts_of_module_call(step, call, inner, split_at)
    again = sum(sum(map(seconds, step.forward[call.first : part.last_saved])) for part in parts[:-1])
    if copy is not None:
        again += (len(parts) - 1) * copy(whole.offloaded) / 2  # each part fetches the inputs
    return replace(whole, seconds=whole.seconds + again, split_at=split_at)


def module_call_splits_to_try(
    memory: StepMemoryModel, call: ModuleCall, inner: Sequence[int]
) -> list[tuple[str, ...]]:
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
        parts = parts_of_module_call(memory.step, call, inner, split_at)
        held = bytes_recomputed_in_segments(memory, parts, kept)
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
