"""What ranks send each other, through files: a rank that must send runs beside this one.

    this rank                            memfit                        rank 3
    ---------                            ------                        ------
    send_object_list ──> objects/sent-0
    recv_object_list ──> asks/wanted-3   starts rank 3, hidden ──────> send_object_list ──> objects/sent-3
                     <── objects/sent-3

A rank appends what it sends to one file, each object after its key. A key counts the calls of each kind in
each group, which all of a group's ranks make in the same order.
Objects are received where the script receives them, small tensors where it reads them
(``values/sent_elements.py``).
"""

import os
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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
        self.rank = rank
        self._waits = f"waits-{rank}"
        self._calls: Counter[tuple[object, ...]] = Counter()
        self._quiet = 0
        self._leaving = False
        self._sent: dict[Path, _SentObjects] = {}
        self._later: list[tuple[str, Callable[[], Any]]] = []
        self.before_waiting: Callable[[], object] = lambda: None
        """Called again and again while this rank waits for others."""
        self.sources: set[int] = set()
        self.missing = ""
        """What the script reads that no rank has written; empty if there is nothing."""

    def key(self, *call: object) -> str:
        """Return the key of the next object of a call, given by its kind, its group and the ranks in it.

        It is empty, and nothing is counted, within ``quiet``.
        """
        if self._quiet:
            return ""
        self._calls[call] += 1
        return f"{'/'.join(map(str, call))}/{self._calls[call]}"

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
        try:
            written = pickle.dumps(sent)
        except (pickle.PicklingError, AttributeError, TypeError):
            return
        with (self._folders()[0] / f"sent-{self.rank}").open("ab") as file:
            file.write(b"%s %d\n%s" % (key.encode(), len(written), written))

    def leave_awaited(self, key: str, sent: Callable[[], Any]) -> None:
        """Leave what a function returns, which may wait for a third rank, once another wants this one."""
        self._later.append((key, sent))
        self._leave_if_wanted()

    def receive(self, key: str, sender: int) -> Any:
        """Return an object that another rank leaves; memfit runs that rank up to there.

        Raises:
            LookupError: the rank cannot send it; the message says why.
        """
        self.sources.add(sender)
        path = self._folders()[0] / f"sent-{sender}"
        sent = self._sent.setdefault(path, _SentObjects(path))
        if not sent.has(key):
            self.want(sender)
            self.wait_until(partial(sent.has, key), sender)
        return pickle.loads(sent.read(key))  # noqa: S301 - a rank of the same job wrote it

    def wait_until(self, condition: Callable[[], bool], rank: int) -> None:
        """Wait for another rank.

        Raises:
            LookupError: it has ended, or all ranks wait; the message says why.
        """
        try:
            while not condition():
                if (why := self.failure(rank)) and not condition():
                    raise LookupError(why)
                self._leave_if_wanted()
                self.before_waiting()
                self.note_waiting(True)
                time.sleep(_INTERVAL)
        finally:
            self.note_waiting(False)

    @property
    def asks(self) -> Path:
        """The folder in which the ranks of this run ask for each other."""
        return self._folders()[1]

    @property
    def is_quiet(self) -> bool:
        """Whether this rank sends nothing."""
        return bool(self._quiet)

    def want(self, rank: int) -> None:
        """Have another rank run beside this one."""
        self.sources.add(rank)
        (self.asks / f"wanted-{rank}").touch()

    def is_wanted(self) -> bool:
        """Return whether another rank may wait for this one."""
        return os.path.lexists(f"{self.asks}/wanted-{self.rank}")

    def wanted_ranks(self) -> set[int]:
        """Return the ranks that run, this one among them if there is another."""
        return {int(path.name.removeprefix("wanted-")) for path in self.asks.glob("wanted-*")}

    def failure(self, rank: int) -> str:
        """Return why another rank sends nothing more, or why no rank does; empty while it runs."""
        for file in (self.asks / f"failed-{rank}", self.asks / "failed"):
            if file.exists():
                return file.read_text()
        return ""

    def note_waiting(self, waits: bool) -> None:
        """Note whether this rank waits for others: if all do, memfit tells them."""
        file = self.asks / self._waits
        if waits:
            file.touch()
        else:
            file.unlink(missing_ok=True)

    def _leave_if_wanted(self) -> None:
        """Leave what awaits other ranks, one after the other, as a GPU's stream sends it."""
        while self._later and not self._leaving and self.is_wanted():
            key, sent = self._later.pop(0)
            self._leaving = True
            try:
                self.leave(key, sent())
            finally:
                self._leaving = False


class _SentObjects:
    """What a rank has appended to its file, by key; processes that run as the same rank append the same."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._places: dict[str, tuple[int, int]] = {}

    def has(self, key: str) -> bool:
        """Return whether an object is there in full."""
        if key not in self._places:
            self._look()
        return key in self._places

    def read(self, key: str) -> bytes:
        """Return an object that is there."""
        at, length = self._places[key]
        with self._path.open("rb") as file:
            file.seek(at)
            return file.read(length)

    def _look(self) -> None:
        """Find what has been appended since."""
        if not os.path.lexists(self._path):
            return
        with self._path.open("rb") as file:
            end = os.fstat(file.fileno()).st_size
            file.seek(self._read)
            while (head := file.readline()).endswith(b"\n"):
                key, _, length = head.decode().rpartition(" ")
                if file.tell() + int(length) > end:
                    return
                self._places.setdefault(key, (file.tell(), int(length)))
                self._read = file.seek(int(length), os.SEEK_CUR)
