"""A run's position in its data, so that a resumed run continues with the same micro-batch.

    epoch     |== window ==|== window ==|== window ==|-- ...
    random    began        before       (resumed: both are restored, and what was read is read again)

A resumed run re-reads the data from the beginning of the epoch and discards them: a shuffle, and anything
else that draws random numbers, then draws the same ones. A state saved between windows has the random numbers
from which the next fetch draws. In a state saved inside a window that fetch was already done, so its random
numbers are restored after repeating the fetch.
"""

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from memfit.errors import UsageError
from memfit.random_state import generator_states, get_random_state, set_generator_states, set_random_state
from memfit.strategies.accumulation import PartialWindow
from memfit.train.data.loader_batch_size import batch_size_of
from memfit.train.data.loader_generators import generators_of
from memfit.train.progress_bar import show_rereading


@dataclass(slots=True)
class Position:
    """A position in an epoch.

    Fields:
        consumed: micro-batches of the epoch whose windows are closed.
        began: random numbers at the beginning of the epoch; None between epochs.
        before: random numbers before the open window was fetched; None if no window is open.
        batch_size: of the loader's batches, if it has that attribute.
        carried: micro-batches of the last epoch that start this one.
    """

    consumed: int = 0
    began: dict[str, Any] | None = None
    before: dict[str, Any] | None = None
    batch_size: int | None = None
    loader: Any = None
    """The loader of the epoch, until it ends."""
    carried: list[Any] = field(default_factory=list)
    _from_last: int = 0  # micro-batches carried over to this epoch, which come first
    _iterating: bool = False
    _open: int = 0
    _handed: dict[str, Any] | None = None  # random numbers when a micro-batch was yielded
    _own: list[Any] = field(default_factory=list)  # the loader's generators
    _resumed: tuple[dict[str, Any], dict[str, Any]] | None = None  # position and random numbers

    def groups(self, loader: Iterable[Any], size: int, partial: PartialWindow) -> Iterator[list[Any]]:
        """Yield the micro-batches of one window after the other; the last depends on ``partial``.

        All of a group is fetched before it is yielded. The first group after ``load_state_dict`` is the one
        that was open when the state was saved, or the next one.

        Raises:
            UsageError: the data are not those with which the state was saved.
        """
        if self._iterating:
            raise UsageError(
                "The engine is already iterating over a loader. For validation, iterate over the loader "
                "itself, without engine.through or engine.windows."
            )
        resumed = self._resumed
        self._iterating = True
        try:
            items, saved, random = self._begin(loader)
            while True:
                group = self._fetch(items, size)
                if saved.get("before") is not None:
                    self._restore_random(random)
                saved, resumed = {}, None
                if len(group) < size and partial != "flush":
                    self.carried = group if partial == "carry" else []
                    break
                if not group:
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

    def _begin(self, loader: Iterable[Any]) -> tuple[Iterator[Any], dict[str, Any], dict[str, Any]]:
        """Go to the beginning of the next group.

        Returns:
            The remaining micro-batches; in a resumed run also the saved position and random numbers.
        """
        self._own = generators_of(loader)
        saved, random = self._resumed or ({}, {})
        self.loader, self.batch_size = loader, batch_size_of(loader)
        sizes = {saved["batch_size"], self.batch_size} - {None} if saved.get("consumed") else set()
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
            self.carried = [None] * saved["carried"]  # they went backward before the state was saved
        elif random and random["own"]:
            _set_loader_generators(self._own, random["own"])
        self.began, self.consumed, self._from_last = self._random(), 0, len(self.carried)
        items = iter(chain(self.carried, loader))
        self.carried = []
        if saved.get("consumed"):
            _warn_of_persistent_workers(loader)
        if inside:
            self._skip(items, saved["consumed"])
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

    def close(self) -> None:
        """Count the last group as done: a run resumed from here starts with the next."""
        self._handed = None
        self.consumed += self._open
        self._open, self.before = 0, None

    def _skip(self, items: Iterator[Any], consumed: int) -> None:
        self.consumed = sum(1 for _ in show_rereading(islice(items, consumed), consumed))
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

    def state_dict(self, done: int) -> dict[str, Any]:
        """Return the position as plain values and tensors.

        Args:
            done: micro-batches of the open window that went backward.

        Raises:
            UsageError: micro-batches that are carried over to the next epoch wait for their backward, and
                cannot be saved.
        """
        if self._resumed is not None:
            return self._resumed[0]
        waiting = len(self.carried)
        if self.began is not None:
            waiting += max(0, self._from_last - self.consumed - done)
        if waiting:
            raise UsageError(
                f"Cannot save the run: {waiting} micro-batch{'es' * (waiting != 1)} from an earlier epoch "
                f"still {'need' if waiting != 1 else 'needs'} a backward pass. A saved state cannot contain "
                "micro-batches. Save after that backward pass, save before an epoch ends, or use "
                "partial_window='flush'."
            )
        return {
            "consumed": self.consumed,
            "carried": self._from_last,
            "began": self.began,
            "before": self.before,
            "batch_size": self.batch_size,
        }

    def load_state_dict(self, state: dict[str, Any], random: dict[str, Any]) -> None:
        """Have the next ``groups`` continue from a saved position and its random numbers."""
        self.began = self.before = None
        self.carried, self.consumed, self._open, self._handed = [], state["consumed"], 0, None
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
        warnings.warn(
            "A resumed run restarts the loader's persistent workers. From the second epoch after resuming, "
            "the workers' random numbers differ from those in an uninterrupted run. With "
            "persistent_workers=False, these numbers are the same.",
            stacklevel=5,
        )
