"""Where training stands in its data, so that a resumed run reads on at the same micro-batch.

    epoch     |== window ==|== window ==|== window ==|-- ...
    random    began        before       (resumed: both are put back, what was read is read again)

Data are read again from the beginning of the epoch, and thrown away: a shuffle and whatever else draws random
numbers then draws the same. Between windows the numbers stand where the state was saved, and the next fetch
draws from there; inside one it had been done before, so that they are put there after it.
"""

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from memfit.errors import UsageError
from memfit.strategies.accumulation import PartialWindow
from memfit.train.data.loader_generators import own_generators, set_states, states_of
from memfit.train.progress_bar import reading_again
from memfit.train.resume.state_file import random_state, set_random_state


@dataclass(slots=True)
class Position:
    """A place in an epoch.

    Fields:
        consumed: micro-batches of the epoch whose windows are closed.
        began: random numbers at the beginning of the epoch; None between epochs.
        before: random numbers before the open window was fetched; None if there is none.
        batch_size: of the loader's batches, if it says.
        carried: micro-batches of the last epoch that wait for this one.
    """

    consumed: int = 0
    began: dict[str, Any] | None = None
    before: dict[str, Any] | None = None
    batch_size: int | None = None
    loader: Any = None
    """What the epoch's data come from, until it ends."""
    carried: list[Any] = field(default_factory=list)
    _from_last: int = 0  # micro-batches of this epoch that were carried over to it: they come first
    _at_work: bool = False
    _open: int = 0
    _handed: dict[str, Any] | None = None  # random numbers when a micro-batch was handed out
    _own: list[Any] = field(default_factory=list)  # generators of the loader's
    _resumed: tuple[dict[str, Any], dict[str, Any]] | None = None  # position and random numbers

    def groups(self, loader: Iterable[Any], size: int, partial: PartialWindow) -> Iterator[list[Any]]:
        """Return the micro-batches of one window after the other; a partial one last, if it is wanted.

        A group is fetched whole before it is handed out. The first one after ``load_state_dict`` is the one
        that was open, or would have come next.

        Raises:
            UsageError: the data are not those that the state was saved with.
        """
        if self._at_work:
            raise UsageError(
                "The engine goes through data already. For validation go through the loader itself, without "
                "engine.through or engine.windows."
            )
        resumed = self._resumed
        self._at_work = True
        try:
            items, place, now = self._begin(loader)
            while True:
                group = self._fetch(items, size)
                if place.get("before") is not None:
                    self._put_back(now)
                place, resumed = {}, None
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
            self._at_work = False
            if resumed is not None:  # interrupted on the way to its first group
                self.load_state_dict(*resumed)
                set_random_state(resumed[1])

    def _begin(self, loader: Iterable[Any]) -> tuple[Iterator[Any], dict[str, Any], dict[str, Any]]:
        """Go to where the next group begins.

        Returns:
            What is still to come, and, of a run that goes on, the place and the random numbers of its state.
        """
        self._own = own_generators(loader)
        place, now = self._resumed or ({}, {})
        self.loader, self.batch_size = loader, batch_size_of(loader)
        sizes = {place["batch_size"], self.batch_size} - {None} if place.get("consumed") else set()
        if len(sizes) > 1:
            raise UsageError(
                f"Cannot resume inside an epoch: the loader had batches of {place['batch_size']} when the "
                f"state was saved, and has batches of {self.batch_size}. Give it the data that it had."
            )
        self._resumed = None
        inside = place.get("began") is not None
        if inside:
            self._put_back(place["began"])
            self.carried = [None] * place["carried"]  # they went backward before the state was saved
        elif now and now["own"]:
            set_states(self._own, now["own"])
        self.began, self.consumed, self._from_last = self._random(), 0, len(self.carried)
        items = iter(chain(self.carried, loader))
        self.carried = []
        if place.get("consumed"):
            _warn_of_lasting_workers(loader)
        if inside:
            self._skip(items, place["consumed"])
            self._put_back(place["before"] or now)
        return items, place, now

    def _fetch(self, items: Iterator[Any], size: int) -> list[Any]:
        """Return the next group. Half a fetch is none: a run that goes on fetches it from where it began."""
        self.before = before = self._random()
        try:
            return list(islice(items, size))
        except BaseException:
            self._put_back(before)
            self.before = None
            raise

    def hand_out(self) -> None:
        """Note where random numbers stand: a micro-batch that has not gone backward is begun again."""
        self._handed = self._random()

    def taken(self) -> None:
        """Count what was handed out as gone backward: random numbers go on from here."""
        self._handed = None

    def close(self) -> None:
        """Count the group that was handed out last: a run that is resumed now begins with the next."""
        self._handed = None
        self.consumed += self._open
        self._open, self.before = 0, None

    def _skip(self, items: Iterator[Any], consumed: int) -> None:
        self.consumed = sum(1 for _ in reading_again(islice(items, consumed), consumed))
        if self.consumed < consumed:
            raise UsageError(
                f"Cannot resume: the state was saved after {consumed} batches of an epoch, "
                f"and the loader has only {self.consumed}. Give it the data that it had."
            )

    def random(self) -> dict[str, Any]:
        """Return where all generators stand that data and model draw from: the loader's own, too."""
        if self._resumed is not None:  # the loader is not known yet
            return random_state() | {"own": self._resumed[1]["own"]}
        return self._handed or self._random()

    def _random(self) -> dict[str, Any]:
        return random_state() | {"own": states_of(self._own)}

    def _put_back(self, random: dict[str, Any]) -> None:
        set_random_state(random)
        set_states(self._own, random["own"])

    def state_dict(self, done: int) -> dict[str, Any]:
        """Return it.

        Args:
            done: micro-batches of the open window that went backward.

        Raises:
            UsageError: micro-batches are carried over from one epoch to the next, and wait for their
                backward: they are not saved.
        """
        if self._resumed is not None:
            return self._resumed[0]
        waiting = len(self.carried)
        if self.began is not None:
            waiting += max(0, self._from_last - self.consumed - done)
        if waiting:
            raise UsageError(
                f"{waiting} micro-batches are carried over from one epoch to the next, and cannot be saved. "
                'Save when they went backward, or before an epoch ends; or choose partial_window="flush".'
            )
        return {
            "consumed": self.consumed,
            "carried": self._from_last,
            "began": self.began,
            "before": self.before,
            "batch_size": self.batch_size,
        }

    def load_state_dict(self, state: dict[str, Any], random: dict[str, Any]) -> None:
        """Have the next ``groups`` go on from a state, with random numbers as they were when it was saved."""
        self.began = self.before = None
        self.carried, self.consumed, self._open, self._handed = [], state["consumed"], 0, None
        self._resumed = state, random


def batch_size_of(loader: Any) -> int | None:
    """Return how many samples a loader's batches have; None if it does not say."""
    given = getattr(loader, "batch_size", None)
    return given if isinstance(given, int) else None


def _warn_of_lasting_workers(loader: Any) -> None:
    if getattr(loader, "persistent_workers", False):
        warnings.warn(
            "The loader's persistent_workers begin anew in a resumed run: what they draw at random is not "
            "what it would have been after their first epoch. Without persistent_workers it is.",
            stacklevel=5,
        )
