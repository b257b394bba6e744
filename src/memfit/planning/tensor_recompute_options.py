"""Ways to recompute the tensors of a model one by one: whose results are kept, and what that costs.

A way is a set of operations. Sets grow from none to all, those first that save most time per byte; and
likewise with the inputs of blocks, or of their parts, kept in any case. Each way's peak follows from the
plain step, operation by operation: what storages hold in the forward, and what of that is made again while
the backward runs.

    forward     conv ── a ── batch_norm ── b ── relu ── c ── conv ── d        kept: a and d
    backward    of the second conv: batch_norm and relu run again; c exists until the backward of relu has run

A storage holds one *content* after another: an operation that writes in place makes a new one. This follows
what ``strategies/mechanisms/single_tensor_recompute.py`` does, in bytes.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product

from memfit.planning.module_checkpoint_options import FREE, Seconds, bytes_of_storages, named_operations
from memfit.planning.step_memory_model import StepMemoryModel
from memfit.records import (
    LEAST_RECOMPUTED,
    HostUnits,
    ModuleCall,
    Operation,
    StepOperations,
    is_recomputable_operation,
)


@dataclass(frozen=True, slots=True)
class _StorageContent:
    """What a storage holds between two writes."""

    storage: int
    maker: int
    """The operation that makes it; -1 if it exists when the module is called."""
    before: int
    """The content that its maker overwrites; -1 if it is the storage's first one."""


@dataclass(frozen=True, slots=True)
class ContentsOfCall:
    """The contents of a module's call."""

    all: tuple[_StorageContent, ...]
    reads: dict[int, tuple[int, ...]]
    """By operation: the contents that it reads."""
    makes: dict[int, tuple[int, ...]]
    """By operation: the contents that it makes."""
    saved: tuple[tuple[int, int], ...]
    """What autograd saves: the operation whose backward reads it, and the content."""

    @classmethod
    def of(cls, step: StepOperations, call: ModuleCall) -> "ContentsOfCall":
        """Return those of a call."""
        found: list[_StorageContent] = []
        now: dict[int, int] = {}

        def content(storage: int) -> int:
            if storage not in now:
                now[storage] = len(found)
                found.append(_StorageContent(storage, -1, -1))
            return now[storage]

        reads, makes, saved = {}, {}, []
        save = call.first_save
        for number in range(call.first, call.end + 1):
            while save < call.end_save and step.saved_at[save] <= number:
                saved.append((step.saved_by[save], content(step.saved[save])))
                save += 1
            if number == call.end:
                break
            operation = step.forward[number]
            reads[number] = tuple(map(content, operation.reads))
            made = [_StorageContent(storage, number, -1) for storage in operation.creates]
            made += [_StorageContent(storage, number, content(storage)) for storage in operation.writes]
            makes[number] = tuple(range(len(found), len(found) + len(made)))
            now |= {each.storage: len(found) + index for index, each in enumerate(made)}
            found += made
        return cls(tuple(found), reads, makes, tuple(saved))


class RecomputeSimulation:
    """What exists again of a call's contents while its backward runs.

    Args:
        step: the plain step.
        contents: of the call.
        kept: by content, whether it is kept or exists anyway.
        seconds: how long an operation takes.
    """

    def __init__(
        self, step: StepOperations, contents: ContentsOfCall, kept: Sequence[bool], seconds: Seconds
    ) -> None:
        self._step, self._contents, self._kept, self._seconds = step, contents, kept, seconds
        self.spent = 0.0
        """Seconds of the operations that have run again."""
        self._held = self._most = 0
        self._made: set[int] = set()
        self._uses = Counter(content for _, content in contents.saved)
        """By content: how often autograd saved it, and how many operations that run again read it."""
        self._runs: set[int] = set()
        pending = list(self._uses)
        while pending:
            content = pending.pop()
            maker = contents.all[content].maker
            if not kept[content] and maker not in self._runs:
                self._runs.add(maker)
                self._uses.update(contents.reads[maker])
                pending += contents.reads[maker]

        self.kept = frozenset(contents.all[each].storage for each in self._uses if kept[each])
        """The storages that are kept for it."""
        self._holders = Counter(contents.all[each].storage for each in self._uses if kept[each])

    def run(self, call: ModuleCall) -> dict[int, int]:
        """Return the bytes held for the backward of each operation: what is kept, and what is made again."""
        saved: dict[int, list[int]] = defaultdict(list)
        for number, content in self._contents.saved:
            saved[number].append(content)
        self._held = bytes_of_storages(self._step, self.kept)
        found = {}
        for number in range(call.end, call.first - 1, -1):
            self._most = self._held
            for content in saved[number]:
                self._make(content)
            found[number] = self._most
            for content in saved[number]:
                self._let_go(content)
        return found

    def _make(self, content: int) -> None:
        pending = [content]
        while pending:
            maker = self._contents.all[pending[-1]].maker
            if self._exists(pending[-1]):
                pending.pop()
            elif missing := [each for each in self._contents.reads[maker] if not self._exists(each)]:
                pending += missing
            else:
                self._run(maker)

    def _exists(self, content: int) -> bool:
        return self._kept[content] or content in self._made

    def _run(self, maker: int) -> None:
        self.spent += self._seconds(self._step.forward[maker])
        made = [each for each in self._contents.makes[maker] if not self._kept[each]]
        self._made.update(made)
        self._held += sum(map(self._bytes, made))
        read = list(self._contents.reads[maker])
        for each in made:
            before = self._contents.all[each].before
            if before >= 0 and self._uses[before] == 1:  # nothing else needs it: its storage is written to
                read.remove(before)
                self._let_go(before)
        self._most = max(self._most, self._held)
        for each in read:
            self._let_go(each)
        for each in made:
            if not self._uses[each]:
                self._held -= self._bytes(each)

    def _let_go(self, content: int) -> None:
        self._uses[content] -= 1
        if self._uses[content]:
            return
        storage = self._contents.all[content].storage
        self._holders[storage] -= self._kept[content]
        if content in self._made or (self._kept[content] and not self._holders[storage]):
            self._held -= self._bytes(content)

    def _bytes(self, content: int) -> int:
        return self._step.storages[self._contents.all[content].storage]


def makers_of_call(step: StepOperations, call: ModuleCall) -> list[tuple[int, str, bool]]:
    """Return number and name of each operation of a call, and whether its results are kept anyway."""
    return [
        (number, name, operation.random or not is_recomputable_operation(operation.name))
        for number, (name, operation) in enumerate(named_operations(step, call), call.first)
    ]


def kept_contents_mask(
    makers: Sequence[tuple[int, str, bool]],
    sizes: Sequence[int],
    save_ops: set[str],
    contents: ContentsOfCall,
) -> tuple[bool, ...]:
    """Return, by content, whether it is kept, or exists when the call begins.

    Args:
        makers: as ``makers_of_call`` returns them.
        sizes: of the step's storages.
        save_ops: operations whose results are kept.
        contents: of the call.
    """
    kept = [each.maker < 0 for each in contents.all]
    for number, name, anyway in makers:
        all_kept = anyway or name in save_ops
        for made in contents.makes[number]:
            content = contents.all[made]
            kept[made] = all_kept or (
                kept[content.before] if content.before >= 0 else sizes[content.storage] < LEAST_RECOMPUTED
            )
    return tuple(kept)


# ---- the ways ------------------------------------------------------------------------------------------

_SETS = 24
"""Sets to try in one order, for each depth of the modules whose inputs are kept."""
_COLLECTIVES = ("c10d.", "_c10d_functional.", "fsdp.")


@dataclass(frozen=True, slots=True)
class TensorRecomputation:
    """One way to recompute the tensors of a model."""

    save_ops: tuple[str, ...]
    """As in ``memfit.Checkpointing``."""
    seconds: float
    """Of the operations that run again."""
    peak: int
    """Bytes of the step at its peak, counted from its beginning."""


def tensor_recomputations(
    memory: StepMemoryModel, seconds: Seconds, host: HostUnits = FREE
) -> list[TensorRecomputation]:
    """Return ways to recompute a model's tensors one by one, without those that another beats.

    There are none if a step calls the model more than once, or exchanges tensors among ranks in its forward,
    as FSDP does: it frees the parameters that it gathers.

    Args:
        memory: the plain step.
        seconds: how long an operation takes.
        host: seconds of noting an operation, as of one under a dispatch mode, and of a tensor that is saved;
            what is made again takes both once more.
    """
    step = memory.step
    if not step.calls or sum(call.parent < 0 for call in step.calls) > 1:
        return []
    if any(operation.name.startswith(_COLLECTIVES) for operation in step.forward):
        return []
    model = step.calls[0]
    contents = ContentsOfCall.of(step, model)
    makers = makers_of_call(step, model)
    sets: dict[tuple[bool, ...], tuple[str, ...]] = {}
    for always, is_spread in product(_inputs(step), (False, True)):
        for names in _kept_sets(step, always, seconds, is_spread=is_spread):
            sets.setdefault(kept_contents_mask(makers, step.storages, {*names}, contents), names)
    replaying = host.watched_operations + host.replayed_tensors

    def again(operation: Operation) -> float:
        return seconds(operation) + replaying

    plain = RecomputeSimulation(step, contents, [True] * len(contents.all), seconds).run(model)
    saved = {storage for call in step.calls for storage in call.saves}
    noting = host.watched_operations * (model.end - model.first)
    noting += host.checkpointed_tensors * (model.end_save - model.first_save)
    found = []
    for mask, names in sets.items():
        backward = RecomputeSimulation(step, contents, mask, again)
        peak = max(_backward_peak(memory, backward, plain), _forward_peak(memory, backward.kept, saved))
        found.append(TensorRecomputation(names, backward.spent + noting, peak))
    best: list[TensorRecomputation] = []
    for option in sorted(found, key=lambda each: (each.seconds, each.peak)):
        if option.peak < min((each.peak for each in best), default=memory.peak):
            best.append(option)
    return best


def _backward_peak(memory: StepMemoryModel, backward: RecomputeSimulation, plain: Mapping[int, int]) -> int:
    """Run a simulation, and return the most bytes while the backward runs."""
    step, call = memory.step, memory.step.calls[0]
    more = {number: size - plain[number] for number, size in backward.run(call).items()}
    peak, source = 0, call.end
    for operation in step.backward:
        source = operation.source if operation.source >= 0 else source
        peak = max(peak, operation.allocated + more.get(min(source, call.end), 0))
    return peak


def _forward_peak(memory: StepMemoryModel, kept: frozenset[int], saved: set[int]) -> int:
    """Return the most bytes while the forward runs: what is not kept is freed once nothing reads it."""
    step = memory.step
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
    for name, operation in named_operations(step, step.calls[0]):
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
    everything = bytes_of_storages(step, order)
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
