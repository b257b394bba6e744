"""Objects that ranks send each other, through files: a rank that must send runs beside this one.

    this rank                            memfit                        rank 3
    ---------                            ------                        ------
    send_object_list ──> objects/KEY
    recv_object_list ──> asks/wanted-3   starts rank 3, hidden ──────> send_object_list ──> objects/KEY
                     <── objects/KEY

A key counts the calls of each kind in each group, which all of a group's ranks make in the same order.
"""

import hashlib
import pickle
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

_INTERVAL = 0.05
"""Seconds between two looks for an object."""


class ExchangedObjects:
    """The objects of a job, as seen by one rank.

    Args:
        folders: returns where the ranks of the job leave the objects that they send, and where the ranks of
            this run ask for others.
        rank: this one.
    """

    def __init__(self, folders: Callable[[], tuple[Path, Path]], rank: int) -> None:
        self._folders = folders
        self._waits = f"waits-{rank}"
        self._calls: Counter[tuple[object, ...]] = Counter()

    def key(self, *call: object) -> str:
        """Return the key of the next object of a call, given by its kind, its group and the ranks in it."""
        self._calls[call] += 1
        text = repr((*call, self._calls[call]))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def leave(self, key: str, sent: Any) -> None:
        """Leave an object for the ranks that receive it; one that cannot be pickled is not left."""
        folder, _ = self._folders()
        beside = folder / f"{key}.{self._waits}"
        try:
            beside.write_bytes(pickle.dumps(sent))
        except (pickle.PicklingError, AttributeError, TypeError):
            return
        beside.replace(folder / key)

    def receive(self, key: str, sender: int) -> Any:
        """Return an object that another rank leaves; memfit runs that rank up to there.

        Raises:
            LookupError: the rank cannot send it; the message says why.
        """
        folder, asks = self._folders()
        kept = folder / key
        if not kept.exists():
            (asks / f"wanted-{sender}").touch()
            (asks / self._waits).touch()
            while not kept.exists():
                for why in (asks / f"failed-{sender}", asks / "failed"):
                    if why.exists() and not kept.exists():
                        raise LookupError(why.read_text())
                time.sleep(_INTERVAL)
            (asks / self._waits).unlink()
        return pickle.loads(kept.read_bytes())  # noqa: S301 - a rank of the same job wrote it
