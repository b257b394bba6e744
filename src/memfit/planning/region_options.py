"""Ways to checkpoint a module: which operations' results are kept, what that holds, and what it costs.

keep everything that autograd saves       no time        the plain step
keep the matrix products                  a little
keep its inputs                           its forward    full checkpointing
keep its inputs, recompute it in parts    more           full checkpointing holds less at a time
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from memfit.records import ModuleCall, Operation, StepOperations

Seconds = Callable[[Operation], float]
Copy = Callable[[int], float]
LEAST_OFFLOADED = 1 << 20
"""Bytes: ``memfit.Offload`` leaves smaller storages on the device."""
MOST = 16
"""Options of a module at most."""


@dataclass(frozen=True, slots=True)
class RegionOption:
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
    for name, operation in _named(step, call):
        size = total_bytes(step, operation.creates)
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


def option_of(
    step: StepOperations,
    call: ModuleCall,
    save_ops: tuple[str, ...],
    seconds: Seconds,
    copy: Copy | None = None,
    dispatch: float = 0.0,
) -> RegionOption:
    """Return what a call holds and costs if the module is checkpointed and keeps some operations' results.

    Args:
        step: the plain step.
        call: one of the module's.
        save_ops: the operations whose results it keeps.
        seconds: how long an operation takes.
        copy: how long it takes to copy bytes to the host and back, if the module's inputs wait there.
        dispatch: seconds for asking whether an operation's results are kept, as its forward does, and again
            when it is recomputed.
    """
    keeps = {storage for storage in call.reads if step.storages[storage]}
    again, offloaded = 0.0, 0
    if copy is not None:
        moved = {storage for storage in keeps if step.storages[storage] >= LEAST_OFFLOADED}
        keeps -= moved
        offloaded = total_bytes(step, moved)
        again = copy(offloaded)
    saved = frozenset(save_ops)
    if saved:
        again += dispatch * (call.end - call.first + min(call.last_saved, call.end) - call.first)
    for name, operation in _named(step, call):
        if name in saved:
            keeps.update(operation.creates)
        else:
            again += seconds(operation)
    return RegionOption(save_ops, frozenset(keeps), again, offloaded)


def worth_trying(
    step: StepOperations, options: Iterable[RegionOption], plain: frozenset[int]
) -> list[RegionOption]:
    """Return the options that hold less than plain training, without those that another beats in both."""
    best: list[RegionOption] = []
    limit = total_bytes(step, plain)
    for option in sorted(options, key=lambda each: (each.seconds, total_bytes(step, each.keeps))):
        if (size := total_bytes(step, option.keeps)) < limit:
            best.append(option)
            limit = size
    return best


def _named(step: StepOperations, call: ModuleCall) -> Iterable[tuple[str, Operation]]:
    """Yield a call's operations with their names in ``save_ops``, up to the last that must run again."""
    seen: Counter[str] = Counter()
    for operation in step.forward[call.first : min(call.last_saved, call.end)]:
        yield f"{operation.name}:{seen[operation.name]}", operation
        seen[operation.name] += 1


def total_bytes(step: StepOperations, storages: Iterable[int]) -> int:
    """Return the bytes of some storages of a step."""
    return sum(step.storages[storage] for storage in storages)
