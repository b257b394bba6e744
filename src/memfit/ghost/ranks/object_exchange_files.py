"""What ranks send each other, through files: a rank that must send runs beside this one.

    this rank                            memfit                        rank 3
    ---------                            ------                        ------
    send_object_list ──> objects/KEY
    recv_object_list ──> asks/wanted-3   starts rank 3, hidden ──────> send_object_list ──> objects/KEY
                     <── objects/KEY

A key counts the calls of each kind in each group, which all of a group's ranks make in the same order.
Objects are received where the script receives them, small tensors where it reads them
(``values/sent_elements.py``).
"""

import hashlib
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_INTERVAL = 0.02
"""Seconds between two looks for an object."""


class ExchangedObjects:
    """The objects of a job, as seen by one rank.

    Args:
        folders: returns where the ranks of the job leave the objects that they send, and where the ranks of
            this run ask for others.
        rank: this one.
        refuse: called with the reason when the script needs an object or a value that cannot be had.
    """

    real = False

    def __init__(
        self,
        folders: Callable[[], tuple[Path, Path]],
        rank: int,
        refuse: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.refuse = refuse
        self._folders = folders
        self._rank = rank
        self._waits = f"waits-{rank}"
        self._calls: Counter[tuple[object, ...]] = Counter()
        self._quiet = 0
        self._later: list[tuple[str, Callable[[], Any]]] = []

    def key(self, *call: object) -> str:
        """Return the key of the next object of a call, given by its kind, its group and the ranks in it.

        It is empty, and nothing is counted, within ``quiet``.
        """
        if self._quiet:
            return ""
        self._calls[call] += 1
        text = repr((*call, self._calls[call]))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Send nothing: one rank makes calls that others do not, or PyTorch agrees on what they have."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    def leave(self, key: str, sent: Any) -> None:
        """Leave an object for the ranks that receive it; one that cannot be pickled is not left."""
        folder, _ = self._folders()
        beside = folder / f"{key}.{self._waits}"
        try:
            beside.write_bytes(pickle.dumps(sent))
        except (pickle.PicklingError, AttributeError, TypeError):
            return
        beside.replace(folder / key)

    def leave_awaited(self, key: str, sent: Callable[[], Any]) -> None:
        """Leave what a function returns, which may wait for a third rank, once another wants this one."""
        self._later.append((key, sent))
        self._leave_if_wanted()

    def receive(self, key: str, sender: int) -> Any:
        """Return an object that another rank leaves; memfit runs that rank up to there.

        Raises:
            LookupError: the rank cannot send it; the message says why.
        """
        folder, asks = self._folders()
        kept = folder / key
        if not kept.exists():
            (asks / f"wanted-{sender}").touch()
            self.wait_until(kept.exists, (sender,))
        return pickle.loads(kept.read_bytes())  # noqa: S301 - a rank of the same job wrote it

    def wait_until(self, condition: Callable[[], bool], ranks: tuple[int, ...]) -> None:
        """Wait for other ranks.

        Raises:
            LookupError: one of them has failed, or all ranks wait; the message says why.
        """
        _, asks = self._folders()
        failures = [*(asks / f"failed-{rank}" for rank in ranks), asks / "failed"]
        try:
            while not condition():
                for why in failures:
                    if why.exists() and not condition():
                        raise LookupError(why.read_text())
                self._leave_if_wanted()
                (asks / self._waits).touch()
                time.sleep(_INTERVAL)
        finally:
            (asks / self._waits).unlink(missing_ok=True)

    def is_wanted(self) -> bool:
        """Return whether another rank waits for what this one does."""
        return (self._folders()[1] / f"wanted-{self._rank}").exists()

    def _leave_if_wanted(self) -> None:
        while self._later and self.is_wanted():
            key, sent = self._later.pop(0)
            self.leave(key, sent())
