"""What storages hold in a forward, and what of that is made again while its backward runs.

    forward     conv ── a ── batch_norm ── b ── relu ── c ── conv ── d        kept: a and d
    backward    of the second conv: batch_norm and relu run again; c exists until the backward of relu has run

A storage holds one *content* after another: an operation that writes in place makes a new one. This follows
what ``strategies/mechanisms/tensor_tape.py`` does, in bytes.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memfit.planning.region_options import Seconds, total_bytes
from memfit.records import LEAST_RECOMPUTED, ModuleCall, StepOperations, can_run_again


@dataclass(frozen=True, slots=True)
class StorageContent:
    """What a storage holds between two writes."""

    storage: int
    maker: int
    """The operation that makes it; -1 if it exists when the module is called."""
    before: int
    """The content that its maker overwrites; -1 if it is the storage's first one."""


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a module's call."""

    all: tuple[StorageContent, ...]
    reads: dict[int, tuple[int, ...]]
    """By operation: the contents that it reads."""
    makes: dict[int, tuple[int, ...]]
    """By operation: the contents that it makes."""
    saved: tuple[tuple[int, int], ...]
    """What autograd saves: the operation whose backward reads it, and the content."""

    @classmethod
    def of(cls, step: StepOperations, call: ModuleCall) -> "Contents":
        """Return those of a call."""
        found: list[StorageContent] = []
        now: dict[int, int] = {}

        def content(storage: int) -> int:
            if storage not in now:
                now[storage] = len(found)
                found.append(StorageContent(storage, -1, -1))
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
            made = [StorageContent(storage, number, -1) for storage in operation.creates]
            made += [StorageContent(storage, number, content(storage)) for storage in operation.writes]
            makes[number] = tuple(range(len(found), len(found) + len(made)))
            now |= {each.storage: len(found) + index for index, each in enumerate(made)}
            found += made
        return cls(tuple(found), reads, makes, tuple(saved))


class ContentsInBackward:
    """What exists again of a call's contents while its backward runs.

    Args:
        step: the plain step.
        contents: of the call.
        kept: by content, whether it is kept or exists anyway.
        seconds: how long an operation takes.
    """

    def __init__(
        self, step: StepOperations, contents: Contents, kept: Sequence[bool], seconds: Seconds
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
        self._held = total_bytes(self._step, self.kept)
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


def kept_contents(
    step: StepOperations, call: ModuleCall, save_ops: frozenset[str], contents: Contents
) -> list[bool]:
    """Return, by content, whether it is kept, or exists when the call begins."""
    kept = [each.maker < 0 for each in contents.all]
    for number, name in enumerate(names_in_save_ops(step, call), call.first):
        operation = step.forward[number]
        all_kept = name in save_ops or operation.random or not can_run_again(operation.name)
        for each in contents.makes[number]:
            before = contents.all[each].before
            small = step.storages[contents.all[each].storage] < LEAST_RECOMPUTED
            kept[each] = all_kept or (kept[before] if before >= 0 else small)
    return kept


def names_in_save_ops(step: StepOperations, call: ModuleCall) -> Iterator[str]:
    """Yield the names of a call's operations in ``save_ops``."""
    seen: Counter[str] = Counter()
    for operation in step.forward[call.first : call.end]:
        yield f"{operation.name}:{seen[operation.name]}"
        seen[operation.name] += 1
