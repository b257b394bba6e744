"""Where training stands in its data, so that a resumed run reads on at the same micro-batch.

    epoch     |== window ==|== window ==|== window ==|-- ...
    random    began        before       (resumed: both are put back, what was read is read again)

Data are read again from the beginning of the epoch, and thrown away: a shuffle and whatever else draws random
numbers then draws the same.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from memfit.errors import UsageError
from memfit.strategies.accumulation import PartialWindow
from memfit.train.progress import reading_again
from memfit.train.state import random_state, set_random_state


@dataclass(slots=True)
class Position:
    """A place in an epoch.

    Fields:
        consumed: micro-batches of the epoch whose windows are closed.
        began: random numbers at the beginning of the epoch; None between epochs.
        before: random numbers before the open window was fetched; None if there is none.
        carried: micro-batches of the last epoch that wait for this one.
    """

    consumed: int = 0
    began: dict[str, Any] | None = None
    before: dict[str, Any] | None = None
    carried: list[Any] = field(default_factory=list)
    _open: int = 0
    _resumed: dict[str, Any] | None = None

    def groups(self, loader: Iterable[Any], size: int, partial: PartialWindow) -> Iterator[list[Any]]:
        """Return the micro-batches of one window after the other; a partial one last, if it is wanted.

        A group is fetched whole before it is handed out. The first one after ``load_state_dict`` is the one
        that was open, or would have come next.
        """
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            set_random_state(resumed["began"])
        self.began, self.consumed = random_state(), 0
        items = iter(chain(self.carried, loader))
        self.carried = []
        if resumed is not None:
            self._skip(items, resumed)
        while True:
            self.before = random_state()
            group = list(islice(items, size))
            if resumed is not None:
                set_random_state(resumed["random"])
                resumed = None
            if len(group) < size and partial != "flush":
                self.carried = group if partial == "carry" else []
                break
            if not group:
                break
            self._open = len(group)
            yield group
            self.close()
        self.began = self.before = None

    def close(self) -> None:
        """Count the group that was handed out last: a run that is resumed now begins with the next."""
        self.consumed += self._open
        self._open, self.before = 0, None

    def _skip(self, items: Iterator[Any], resumed: dict[str, Any]) -> None:
        read = reading_again(islice(items, resumed["consumed"]), resumed["consumed"])
        skipped = sum(1 for _ in read)
        if skipped < resumed["consumed"]:
            raise UsageError(
                f"Cannot resume: the state was saved after {resumed['consumed']} batches of an epoch, "
                f"and the loader has only {skipped}. Give it the data that it had."
            )
        self.consumed = skipped
        set_random_state(resumed["before"] or resumed["random"])

    def state_dict(self) -> dict[str, Any]:
        """Return it; empty between epochs.

        Raises:
            UsageError: micro-batches are carried over to the next epoch: they are not saved.
        """
        if self.carried:
            raise UsageError(
                f"{len(self.carried)} micro-batches are carried over to the next epoch, and cannot be saved. "
                'Save before the end of an epoch, or choose partial_window="flush".'
            )
        if self.began is None:
            return {}
        return {"consumed": self.consumed, "began": self.began, "before": self.before}

    def load_state_dict(self, state: dict[str, Any], random: dict[str, Any]) -> None:
        """Have the next ``groups`` go on from a state, with random numbers as they were when it was saved."""
        self._resumed = state | {"random": random} if state else None
