"""Ways to recompute the tensors of a model one by one: whose results are kept, and what that costs.

A way is a set of operations. Sets grow from none to all, those first that save most time per byte; and
likewise with the inputs of blocks, or of their parts, kept in any case. Each way's peak follows from the
plain step, operation by operation.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from memfit.planning.contents import Contents, ContentsInBackward, kept_contents, names_in_save_ops
from memfit.planning.memory_model import MemoryModel
from memfit.planning.region_options import Seconds, total_bytes
from memfit.records import LEAST_RECOMPUTED, StepOperations

_SETS = 24
"""Sets to try in one order, for each depth of the modules whose inputs are kept."""
_COLLECTIVES = ("c10d.", "_c10d_functional.", "fsdp.")


@dataclass(frozen=True, slots=True)
class TensorOption:
    """One way to recompute the tensors of a model."""

    save_ops: tuple[str, ...]
    """As in ``memfit.Checkpointing``."""
    seconds: float
    """Of the operations that run again."""
    peak: int
    """Bytes of the step at its peak, counted from its beginning."""


def tensor_options(memory: MemoryModel, seconds: Seconds, dispatch: float = 0.0) -> list[TensorOption]:
    """Return ways to recompute a model's tensors one by one, without those that another beats.

    There are none if a step calls the model more than once, or exchanges tensors among ranks in its forward,
    as FSDP does: it frees the parameters that it gathers.

    Args:
        memory: the plain step.
        seconds: how long an operation takes.
        dispatch: seconds for noting an operation.
    """
    step = memory.step
    if not step.calls or sum(call.parent < 0 for call in step.calls) > 1:
        return []
    if any(operation.name.startswith(_COLLECTIVES) for operation in step.forward):
        return []
    contents = Contents.of(step, step.calls[0])
    sets = [
        names
        for always in _inputs(step)
        for is_spread in (False, True)
        for names in _kept_sets(step, always, seconds, is_spread=is_spread)
    ]
    plain = ContentsInBackward(step, contents, [True] * len(contents.all), seconds).run(step.calls[0])
    found = [_option(memory, names, seconds, contents, plain) for names in dict.fromkeys(sets)]
    noting = dispatch * (step.calls[0].end - step.calls[0].first)
    found = [replace(option, seconds=option.seconds + noting) for option in found]
    best: list[TensorOption] = []
    for option in sorted(found, key=lambda each: (each.seconds, each.peak)):
        if option.peak < min((each.peak for each in best), default=memory.peak):
            best.append(option)
    return best


def _option(
    memory: MemoryModel,
    save_ops: tuple[str, ...],
    seconds: Seconds,
    contents: Contents,
    plain: Mapping[int, int],
) -> TensorOption:
    step, call = memory.step, memory.step.calls[0]
    backward = ContentsInBackward(
        step, contents, kept_contents(step, call, frozenset(save_ops), contents), seconds
    )
    held = backward.run(call)
    more = {number: size - plain[number] for number, size in held.items()}
    peak, source = 0, call.end
    for operation in step.backward:
        source = operation.source if operation.source >= 0 else source
        peak = max(peak, operation.allocated + more.get(min(source, call.end), 0))
    return TensorOption(save_ops, backward.spent, max(peak, _forward_peak(memory, backward.kept)))


def _forward_peak(memory: MemoryModel, kept: frozenset[int]) -> int:
    """Return the most bytes while the forward runs: what is not kept is freed once nothing reads it."""
    step = memory.step
    saved = {storage for call in step.calls for storage in call.saves}
    changes: Counter[int] = Counter()
    peak = more = 0
    for number, operation in enumerate(step.forward):
        for storage in operation.creates:
            sign = (storage in kept) - (storage in saved)
            changes[max(memory.last_read[storage], number) + 1] += sign * step.storages[storage]
        more += changes[number]
        peak = max(peak, operation.allocated + more)
    return peak


def _inputs(step: StepOperations) -> Iterator[frozenset[int]]:
    """Yield no storage, then what is passed to the submodules of each depth."""
    yield frozenset()
    depth = [0] * len(step.calls)
    found: dict[int, set[int]] = defaultdict(set)
    for number, call in enumerate(step.calls):
        if call.parent >= 0:
            depth[number] = depth[call.parent] + 1
            found[depth[number]].update(call.reads)
    yield from map(frozenset, found.values())


def _kept_sets(
    step: StepOperations, always: frozenset[int], seconds: Seconds, *, is_spread: bool
) -> list[tuple[str, ...]]:
    """Return growing sets of operations that may be worth keeping: first those that save most time per byte.

    Each keeps about as many bytes more than the one before. A storage that several operations write to is
    kept by keeping what the last one makes, which saves the time of all.

    Args:
        step: the plain step.
        always: storages that all sets keep.
        seconds: how long an operation takes.
        is_spread: of those that save about as much, first the one in the middle of the forward, then the
            middles of its halves, and so on: what lies between two that are kept is made again together.
    """
    last: dict[int, str] = {}
    time: dict[int, float] = defaultdict(float)
    for number, name in enumerate(names_in_save_ops(step, step.calls[0]), step.calls[0].first):
        operation = step.forward[number]
        for storage in (*operation.creates, *operation.writes):
            if step.storages[storage] >= LEAST_RECOMPUTED and (
                storage in last or storage in operation.creates
            ):
                last[storage] = name
                time[storage] += seconds(operation)
    chosen = [each for each in last if each in always]
    order = sorted(last.keys() - always, key=lambda each: (-time[each] / step.storages[each], each))
    if is_spread:
        order = [each for group in _alike(order, time, step.storages) for each in _spread(group)]
    everything = total_bytes(step, order)
    names = [last[each] for each in chosen]
    sets, held = [tuple(dict.fromkeys(names))], 0
    for storage in order:
        names.append(last[storage])
        held += step.storages[storage]
        if held * _SETS >= len(sets) * everything:
            sets.append(tuple(dict.fromkeys(names)))
    return sets


def _alike(order: Sequence[int], time: Mapping[int, float], sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield storages in groups that save about as much time per byte, each in the order of the forward."""
    for _, group in groupby(order, key=lambda each: math.frexp(time[each] / sizes[each])[1]):
        yield sorted(group)


def _spread(group: Sequence[int]) -> list[int]:
    """Return the middle of a group, then the middles of its halves, ..."""
    bits = len(group).bit_length()
    reverse = {index: int(f"{index + 1:0{bits}b}"[::-1], 2) for index in range(len(group))}
    return [group[index] for index in sorted(reverse, key=reverse.__getitem__)]
