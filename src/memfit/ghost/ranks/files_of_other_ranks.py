"""Files that another rank writes: the first of the machine prepares data or an index, and then all read it.

    rank 0                      rank 7, which runs alone
    ------                      ------------------------
    np.save("index.npy", …)
    dist.barrier()              dist.barrier()                  goes on at once: no other rank runs
    np.load("index.npy")        np.load("index.npy")            is missing: rank 0 runs beside, up to there

Nothing starts for a barrier alone. Once other ranks run beside, they and this one wait for each other in
barriers: one might read what another still writes, or has removed. A script may also wait in a loop until a
file is there.

The ranks count the collectives in each group that Python calls, and note how many they have reached in
``asks/met-RANK``.
"""

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from memfit.ghost.ranks.object_exchange_files import ExchangedObjects
from memfit.patching.patches import Patch
from memfit.user_lines import frame_locations, innermost_user_line, is_memfit_file, is_user_file

_COLLECTIVES = Patch(
    "torch.distributed:ProcessGroup",
    *("barrier", "allreduce", "reduce", "broadcast", "allgather", "gather", "scatter"),
    why="count where ranks meet",
    source="torch/csrc/distributed/c10d/init.cpp",
)
_STAT = Patch("os", "stat", why="wait for files that another rank writes")
_ELSEWHERE = ("/proc/", "/sys/", "/dev/")
_QUESTIONS = 3
_PATIENCE = 2.0
"""How often, and for how many seconds, a line must have asked for a file to count as a loop that waits."""
_LOOKING = {Path(__file__).name, "genericpath.py", "<frozen genericpath>", "pathlib.py", "_local.py"}
"""Files of the standard library that look for files, and this one."""
_COMPILERS = ("_dynamo", "_functorch", "_inductor")
"""Of PyTorch: they look for what they have compiled before."""


class FilesOfOtherRanks:
    """The files that the script of this rank misses, and the ranks that may write them.

    Args:
        objects: what the ranks send each other.
        writers: the ranks that may write files for it: the first of its machine, and the first of all.
    """

    def __init__(self, objects: ExchangedObjects, writers: tuple[int, ...]) -> None:
        self._objects = objects
        self._rank = objects.rank
        self._writers = tuple(dict.fromkeys(each for each in writers if each != objects.rank))
        self._process = os.getpid()
        self._met: Counter[str] = Counter()
        self._members: dict[str, list[int]] = {}
        self._last_meeting = ""
        self._published: Counter[str] = Counter()
        self._awaits = False
        self._sought: set[tuple[str, str]] = set()
        self._polled: dict[tuple[str, str], tuple[float, int]] = {}
        self._polls = False
        objects.before_waiting = self._publish

    def install(self) -> None:
        """Count meetings, and look for missing files, for the life of the process."""
        for name in _COLLECTIVES.present():
            _COLLECTIVES.wrap(name, self._meet)
        if self._writers:
            sys.addaudithook(self._see_open)
            _STAT.install("stat", self._stat)

    def _meet(self, call: Callable[..., Any], group: Any, *args: Any, **options: Any) -> Any:
        import torch.distributed as dist

        if group.size() > 1 and not self._objects.is_quiet:
            name, self._process = str(group.group_name), os.getpid()
            self._met[name] += 1
            if name not in self._members:
                self._members[name] = dist.get_process_group_ranks(group)
            if self._objects.is_wanted():
                self._publish()
            if call.__name__ == "barrier":
                self._last_meeting = innermost_user_line()
                self._wait_in_barrier(name)
        return call(group, *args, **options)

    def _publish(self) -> None:
        """Note how many meetings this rank has reached."""
        if self._published == self._met:
            return
        file = self._objects.asks / f"met-{self._rank}"
        beside = file.with_suffix(".new")
        beside.write_text(json.dumps(self._met))
        beside.replace(file)
        self._published = self._met.copy()

    def _has_met(self, rank: int, group: str) -> bool:
        file = self._objects.asks / f"met-{rank}"
        return file.exists() and json.loads(file.read_text()).get(group, 0) >= self._met[group]

    def _has_met_in_all(self, rank: int, groups: list[str]) -> bool:
        return all(self._has_met(rank, each) for each in groups)

    def _wait_in_barrier(self, group: str) -> None:
        """Wait for the ranks of a group that run; one that has ended is not missed."""
        for rank in self._objects.wanted_ranks() & set(self._members[group]) - {self._rank}:
            self._wait(partial(self._has_met, rank, group), rank)

    def _wait(self, condition: Callable[[], bool], rank: int) -> str:
        """Wait for a rank; return why it does not come, or nothing."""
        self._awaits = True
        try:
            self._objects.wait_until(condition, rank)
        except LookupError as error:
            return str(error)
        finally:
            self._awaits = False
        return ""

    def _see_open(self, event: str, args: tuple[Any, ...]) -> None:
        """Have a file that is missing be written before the script opens it."""
        if event != "open" or not self._met or self._awaits:
            return
        path, _, flags = args
        if not isinstance(path, str | bytes) or flags & os.O_CREAT or not self._looks():
            return
        name = os.fsdecode(path)
        if name.endswith(".pyc") or name.startswith(_ELSEWHERE) or os.path.lexists(name):
            return
        if _reads_for_script() and (why := self._have_written(name)):
            self._objects.missing = why

    def _stat(self, stat: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``os.stat``, with which ``os.path.exists`` and ``Path.exists`` look for a file."""

        def look(path: Any, *args: Any, **options: Any) -> Any:
            try:
                found = stat(path, *args, **options)
            except FileNotFoundError:
                if self._awaits or not self._looks() or not _looks_for_script():
                    raise
            else:
                if self._polls:
                    self._polls = False
                    self._objects.note_waiting(False)
                return found
            name = os.fsdecode(path)
            if self._met:
                self._have_written(name)
            self._note_loop(name)
            return stat(path, *args, **options)

        for supported in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            supported.add(look)
        return look

    def _looks(self) -> bool:
        """Return whether this is the thread and the process of the script: no worker of a loader."""
        return threading.current_thread() is threading.main_thread() and os.getpid() == self._process

    def _have_written(self, name: str) -> str:
        """Have the ranks that may write a file run up to where this one is.

        Returns:
            Why it is still missing; empty if it is there, or if it was missing here before.
        """
        key = (name, json.dumps(self._met))
        if key in self._sought:
            return ""
        self._sought.add(key)
        reasons = []
        for rank in self._writers:
            groups = [group for group, members in self._members.items() if rank in members]
            if not groups:
                continue
            self._objects.want(rank)
            why = self._wait(partial(self._has_met_in_all, rank, groups), rank)
            if os.path.lexists(name):
                return ""
            reasons.append(why or f"rank {rank}, which memfit ran up to there, has not written it")
        before = f" before the barrier at {self._last_meeting}" if self._last_meeting else ""
        return (
            f"{innermost_user_line()} reads {name}, which does not exist. Another rank may write it{before}, "
            f"but {', and '.join(reasons)}."
        ) * bool(reasons)

    def _note_loop(self, name: str) -> None:
        """Start the ranks that may write a file for which the script waits in a loop."""
        key = (name, innermost_user_line())
        began, times = self._polled.get(key, (time.monotonic(), 0))
        self._polled[key] = began, times + 1
        if times < _QUESTIONS or time.monotonic() - began < _PATIENCE:
            return
        for rank in self._writers:
            self._objects.want(rank)
        failures = [self._objects.failure(rank) for rank in self._writers]
        if all(failures) and not os.path.lexists(name):
            self._objects.refuse(
                f"{key[1]} waits in a loop for {name}, which another rank must write, but {failures[0]}."
            )
        self._polls = True
        self._objects.note_waiting(True)


def _looks_for_script() -> bool:
    """Return whether the script's own line looks for a file, itself or through the standard library."""
    frames = frame_locations(sys._getframe(2))
    return is_user_file(next((file for file, _ in frames if Path(file).name not in _LOOKING), ""))


def _reads_for_script() -> bool:
    """Return whether the script reads a file, itself or through a library, but for imports and caches."""
    reader = ""
    for file, _ in frame_locations(sys._getframe(2)):
        if file == __file__:
            continue
        if file.startswith("<frozen importlib") or (is_memfit_file(file) and not reader):
            return False
        if is_user_file(file):
            return not any(f"/torch/{part}/" in reader for part in _COMPILERS)
        reader = reader or file
    return False
