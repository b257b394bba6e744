"""A run's position in its data, so that a resumed run continues with the same micro-batch.

    epoch     |== window ==|== window ==|== window ==|-- ...
    random    began        before       (resumed: both are restored, and what was read is read again)

A resumed run re-reads the data from the beginning of the epoch and discards them: a shuffle, and anything
else that draws random numbers, then draws the same ones. A state saved between windows has the random numbers
from which the next fetch draws. In a state saved inside a window that fetch was already done, so its random
numbers are restored after repeating the fetch.
"""

import sys
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass, field
from itertools import islice
from random import Random, SystemRandom
from typing import Any

import torch

from memfit.errors import UsageError
from memfit.random_state import generator_states, get_random_state, set_generator_states, set_random_state
from memfit.strategies.accumulation import Accumulation, Remainder
from memfit.train.data.loader_order import batches_already_read, loader_order_of
from memfit.train.progress_bar import show_rereading_progress
from memfit.train.ranks.rank_agreement import SingleRank
from memfit.user_lines import warn_user

_LOADER_PARTS = ("sampler", "batch_sampler", "dataset")


@dataclass(slots=True)
class LoaderPosition:
    """A position in an epoch.

    Fields:
        consumed: micro-batches of the epoch whose windows are closed.
        began: random numbers at the beginning of the epoch; None between epochs.
        before: random numbers before the open window was fetched; None if no window is open.
        batch_size: of the loader's batches, if it has that attribute.
        carried: micro-batches of the window with which this epoch began, from earlier epochs.
    """

    consumed: int = 0
    began: dict[str, Any] | None = None
    before: dict[str, Any] | None = None
    batch_size: int | None = None
    loader: Any = None
    """The loader of the epoch, until it ends."""
    carried: int = 0
    ranks: SingleRank = field(default_factory=SingleRank)
    """That train together, each with a loader of its own."""
    _iterating: bool = False
    _open: int = 0
    _handed: dict[str, Any] | None = None  # random numbers when a micro-batch was yielded
    _own: list[Any] = field(default_factory=list)  # the loader's generators
    _resumed: tuple[dict[str, Any], dict[str, Any]] | None = None  # position and random numbers

    def groups(
        self,
        loader: Iterable[Any],
        size: int,
        remainder: Remainder,
        carried: int = 0,
    ) -> Iterator[list[Any]]:
        """Yield the micro-batches of one window after the other; the last group may be smaller.

        All of a group is fetched before it is yielded. The first group after ``load_state_dict`` is the one
        that was open when the state was saved, or the next one. A group is empty if only
        other ranks have data left.

        Args:
            loader: yields micro-batches.
            size: of a window.
            remainder: ``"drop"`` leaves out a last group that is smaller.
            carried: micro-batches that the first window already has, from earlier epochs.
        """
        if self._iterating:
            raise UsageError(
                "The engine is already iterating over a loader. For validation, iterate over the loader "
                "itself, without engine.through or engine.windows."
            )
        resumed = self._resumed
        self._iterating = True
        try:
            items, saved, random = self._begin(loader, carried)
            while True:
                group = self._fetch(items, size - self.carried_into_group)
                if saved.get("before") is not None:
                    self._restore_random(random)
                saved, resumed = {}, None
                dropped = len(group) < size and remainder == "drop"
                if not self._goes_on(0 if dropped else len(group), remainder):
                    self.consumed += len(group)
                    break
                self._open = len(group)
                yield group
                self.close()
            self.began = self.before = self.loader = None
        finally:
            self._iterating = False
            if resumed is not None:  # interrupted before its first group
                self.load_state_dict(*resumed)
                set_random_state(resumed[1])

    def _goes_on(self, size: int, remainder: Remainder) -> bool:
        """Return whether the epoch goes on after each rank fetched so many batches.

        It ends when no rank has data left; with ``remainder="drop"``, when a rank has too little.
        """
        most, least = self.ranks.agree("a loop over batches", size, -size)
        if remainder == "carry" and most != -least:
            raise UsageError(
                f"remainder='carry' needs equally many batches on every rank, but one rank has {int(most)} "
                f"left for a window and another {int(-least)}. Use a DistributedSampler, or remainder='step'."
            )
        return bool(-least if remainder == "drop" else most)

    @property
    def carried_into_group(self) -> int:
        """Micro-batches from earlier epochs in the window of the current group."""
        return 0 if self.consumed else self.carried

    def _begin(
        self, loader: Iterable[Any], carried: int
    ) -> tuple[Iterator[Any], dict[str, Any], dict[str, Any]]:
        """Go to the beginning of the next group.

        Returns:
            The remaining micro-batches; in a resumed run also the saved position and random numbers.
        """
        self._own = _generators_of(loader)
        saved, random = self._resumed or ({}, {})
        self.loader, self.batch_size = loader, _loader_batch_size(loader)
        consumed, order = saved.get("consumed", 0), saved.get("order", {"ranks": 1})
        sizes = {saved["batch_size"], self.batch_size} - {None} if consumed else set()
        if consumed and order["ranks"] != self.ranks.size:
            consumed, sizes = batches_already_read(consumed, order, loader, self.ranks.size), set()
        if len(sizes) > 1:
            raise UsageError(
                f"Cannot resume inside an epoch: the loader's batch_size was {saved['batch_size']} "
                f"when the state was saved, but is {self.batch_size} now. Pass a loader with the "
                "original batch_size."
            )
        self._resumed = None
        inside = saved.get("began") is not None
        if inside:
            self._restore_random(saved["began"])
            carried = saved["carried"]
        elif random and random["own"]:
            _set_loader_generators(self._own, random["own"])
        self.began, self.consumed, self.carried = self._random(), 0, carried
        items = iter(loader)
        if consumed:
            _warn_of_persistent_workers(loader)
        if inside:
            self._skip(items, consumed)
            self._restore_random(saved["before"] or random)
        return items, saved, random

    def _fetch(self, items: Iterator[Any], size: int) -> list[Any]:
        """Return the next group. An interrupted fetch is undone: a resumed run repeats all of it."""
        self.before = before = self._random()
        try:
            return list(islice(items, size))
        except BaseException:
            self._restore_random(before)
            self.before = None
            raise

    def hand_out(self) -> None:
        """Record the random numbers: a micro-batch without its backward is repeated after a resume."""
        self._handed = self._random()

    def confirm(self) -> None:
        """Record that the yielded micro-batch went backward: a resumed run continues after it."""
        self._handed = None

    def begin_epoch(self) -> None:
        """Count an epoch's batches from 0, unless the epoch is resumed."""
        if self.began is None and self._resumed is None:
            self.consumed = 0

    def close(self) -> None:
        """Count the last group as done: a run resumed from here starts with the next."""
        self._handed = None
        self.consumed += self._open
        self._open, self.before = 0, None

    def _skip(self, items: Iterator[Any], consumed: int) -> None:
        self.consumed = sum(1 for _ in show_rereading_progress(islice(items, consumed), consumed))
        if self.consumed < consumed:
            raise UsageError(
                f"Cannot resume: the state was saved after {consumed} batches of an epoch, but this "
                f"loader has only {self.consumed} batches. Pass the same data as in the saved run."
            )

    def random_state(self) -> dict[str, Any]:
        """Return the state of all generators that data and model draw from, including the loader's own."""
        if self._resumed is not None:  # the loader is not known yet
            return get_random_state() | {"own": self._resumed[1]["own"]}
        return self._handed or self._random()

    def _random(self) -> dict[str, Any]:
        return get_random_state() | {"own": generator_states(self._own)}

    def _restore_random(self, random: dict[str, Any]) -> None:
        set_random_state(random)
        _set_loader_generators(self._own, random["own"])

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain values and tensors."""
        if self._resumed is not None:
            return self._resumed[0]
        return {
            "consumed": self.consumed,
            "carried": self.carried,
            "began": self.began,
            "before": self.before,
            "batch_size": self.batch_size,
            "order": loader_order_of(self.loader, self.ranks.size),
        }

    def load_state_dict(self, state: dict[str, Any], random: dict[str, Any]) -> None:
        """Have the next ``groups`` continue from a saved position and its random numbers."""
        self.began = self.before = None
        if state["began"] is None:  # between epochs: the last one's batches are of no consequence
            state = state | {"consumed": 0}
        self.carried, self.consumed = state["carried"], state["consumed"]
        self._open, self._handed = 0, None
        self._resumed = state, random


def _set_loader_generators(generators: list[Any], states: list[Any]) -> None:
    try:
        set_generator_states(generators, states)
    except (ValueError, TypeError, RuntimeError, KeyError, AttributeError) as error:
        if len(states) == len(generators):
            fault = f"a random number generator of this loader does not accept its saved state ({error})"
        else:
            numbers = f"{len(states)} random number generators, but this loader has {len(generators)}"
            fault = f"the loader of the saved run had {numbers}"
        raise UsageError(f"Cannot resume: {fault}. Pass the same loader as in the saved run.") from None


def _warn_of_persistent_workers(loader: Any) -> None:
    if getattr(loader, "persistent_workers", False):
        warn_user(
            "A resumed run restarts the loader's persistent workers. From the second epoch after resuming, "
            "the workers' random numbers differ from those in an uninterrupted run. With "
            "persistent_workers=False, these numbers are the same.",
        )


def _loader_batch_size(loader: Any) -> int | None:
    """Return a loader's ``batch_size``; None if it has no such attribute.

    >>> from torch.utils.data import DataLoader
    >>> _loader_batch_size(DataLoader(range(8), batch_size=4)), _loader_batch_size([])
    (4, None)
    """
    given = getattr(loader, "batch_size", None)
    return given if isinstance(given, int) else None


def number_of_batches(loader: Any) -> int | None:
    """Return the number of a loader's batches; None if it does not know."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:  # a DataLoader of an IterableDataset has a length that raises
        return None


def check_loader_batch_size(settings: Accumulation, loader: Any) -> None:
    """Check the loader's batch size, if both it and the settings have one."""
    name = "micro_batch_size" if settings.gathers else "global_batch_size"
    given, expected = _loader_batch_size(loader), getattr(settings, name)
    if None in (given, expected) or given == expected:
        return
    why = (
        "batches_per_update takes each of the loader's batches as one micro-batch. To divide the loader's "
        "batches, set parts_per_batch."
        if settings.gathers
        else "The engine divides the loader's batches. To make one update from several of them, set "
        "batches_per_update."
    )
    raise UsageError(f"The loader's batch_size is {given}, but {name}={expected}. They must be equal. {why}")


def _generators_of(loader: Any) -> list[Any]:
    """Return PyTorch's, NumPy's and Python's generators that are attributes of a loader and its parts.

    ``DataLoader(shuffle=True, generator=...)`` has one. Each comes once, in a fixed order. memfit does not
    find generators in worker processes and in other objects.
    """
    kinds: tuple[type, ...] = (torch.Generator, Random)
    if "numpy" in sys.modules:
        import numpy as np

        kinds = (*kinds, np.random.Generator, np.random.RandomState)
    found = {
        id(value): value
        for part in _loader_parts(loader)
        for _, value in sorted(vars(part).items())
        if isinstance(value, kinds) and not isinstance(value, SystemRandom)
    }
    return list(found.values())


def _loader_parts(loader: Any) -> Iterator[Any]:
    waiting, seen = [loader], set[int]()
    while waiting:
        part = waiting.pop(0)
        if id(part) not in seen and hasattr(part, "__dict__"):
            seen.add(id(part))
            yield part
            waiting += [vars(part)[name] for name in _LOADER_PARTS if name in vars(part)]
