"""memfit as one of the processes that torchrun starts: which rank it is, and where it meets the others.

torchrun --nproc-per-node 2 -m memfit dry-run train.py

torchrun ──> memfit ──> rank 0 on a ghost ──┐ its trace
──> memfit ──> rank 1 on a ghost ──┤
└─> a folder of this machine ──> the first memfit reports on all
"""

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from memfit.run.rank import Rank
from memfit.temporary_folders import PREFIX, hold_folder

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
"""Variables that torchrun sets."""
_INTERVAL = 0.1


def started_rank(environment: Mapping[str, str]) -> Rank | None:
    """Return the rank as which torchrun has started this process; None if it has not, or only this one.

    >>> started_rank({"WORLD_SIZE": "2"})
    """
    if any(name not in environment for name in _NAMES) or environment["WORLD_SIZE"] == "1":
        return None
    nproc = int(environment["LOCAL_WORLD_SIZE"])
    return Rank(rank=int(environment["RANK"]), nproc=nproc, nnodes=int(environment["WORLD_SIZE"]) // nproc)


class SharedTraces:
    """The traces of the ranks on this machine, in a folder that the processes of one job share.

    Args:
        rank: that of this process.
        environment: as torchrun has set it.
        name: of this run, if memfit runs the script several times.
    """

    def __init__(self, rank: Rank, environment: Mapping[str, str], name: str) -> None:
        job = "\0".join(environment.get(name, "") for name in (*_NAMES[3:], "TORCHELASTIC_RESTART_COUNT"))
        digest = hashlib.sha256(f"{os.getuid()}\0{job}".encode()).hexdigest()[:16]
        self._folder = Path(tempfile.gettempdir()) / f"{PREFIX}ranks-{digest}"
        self._lock: int | None = None
        self._first = rank.rank - rank.local
        self._rank = rank
        self._name = name

    def prepare(self) -> Path:
        """Return where this rank's trace is to be written; what an earlier job has left is removed."""
        self._release()
        self._lock = hold_folder(self._folder)
        for suffix in ("memfit", "remark", "heard"):
            self._file(suffix).unlink(missing_ok=True)
        return self.trace(self._rank.rank)

    def trace(self, rank: int) -> Path:
        """Return the file of a rank's trace."""
        return self._file("memfit", rank)

    def exchange(self, remark: str) -> dict[int, str]:
        """Tell the other ranks that this one has written its trace, with a remark, and return theirs.

        A rank that fails never does; torchrun then ends all others.
        """
        own = self._file("written")
        own.write_text(remark)
        own.replace(own.with_suffix(".remark"))
        remarks = {rank: path.read_text() for rank, path in self._all("remark").items()}
        self._file("heard").touch()
        return remarks

    def remove(self) -> None:
        """Remove the folder once all ranks have heard the others."""
        self._all("heard")
        self.abandon()

    def abandon(self) -> None:
        """Remove the folder: this rank has failed."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _all(self, suffix: str) -> dict[int, Path]:
        """Wait until each rank has written a file, and return them."""
        ranks = range(self._first, self._first + self._rank.nproc)
        paths = {rank: self._file(suffix, rank) for rank in ranks}
        while not all(path.exists() for path in paths.values()):
            time.sleep(_INTERVAL)
        return paths

    def _file(self, suffix: str, rank: int | None = None) -> Path:
        return self._folder / f"{self._name}-{self._rank.rank if rank is None else rank}.{suffix}"
