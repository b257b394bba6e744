"""What of a process does not survive a fork of it, or would be shared with the fork: found, and put right.

Source: fork(2); Lib/random.py, Python 3.11 (``random`` seeds itself anew in a fork);
torch/csrc/utils/device_lazy_init.cpp, PyTorch 2.14.
"""

import atexit
import ctypes
import fcntl
import os
import re
import stat
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.patching.patches import Patch
from memfit.run.descendant_processes import descendants_of_process

_THREADS = Patch("torch", "set_num_threads", why="keep a fork, whose OpenMP has lost its threads, on one")

_HARMLESS = ("tqdm._monitor",)
"""Modules whose threads nothing waits for: tqdm's only refreshes bars."""
_CUDA = 1
"""``DeviceType::CUDA`` of c10/core/DeviceType.h."""
_MARK_BAD_FORK = "_ZN5torch5utils22set_device_in_bad_forkEN3c1010DeviceTypeEb"


@dataclass(frozen=True, slots=True)
class _OpenFile:
    """A file of a process, whose position a fork would share."""

    descriptor: int
    reads: bool
    position: int

    def separate(self) -> None:
        """Give this process a position of its own in the file; drop what it writes to one it writes to."""
        path = f"/proc/self/fd/{self.descriptor}" if self.reads else os.devnull
        own = os.open(path, os.O_RDONLY if self.reads else os.O_WRONLY)
        if self.reads:
            os.lseek(own, self.position, os.SEEK_SET)
        os.dup2(own, self.descriptor, inheritable=os.get_inheritable(self.descriptor))
        os.close(own)


def is_thread_harmless_to_fork(started: object) -> bool:
    """Return whether a fork can do without a thread."""
    return type(started).__module__ in _HARMLESS


def obstacle_to_fork() -> str:
    """Return what of this process a fork would lack, and may need; empty if nothing."""
    if threading.current_thread() is not threading.main_thread():
        return "the script trains in a thread"
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not is_thread_harmless_to_fork(thread):
            return f"the script has started a thread ({thread.name})"
    for task in Path("/proc/self/task").iterdir():
        name = (task / "comm").read_text().strip()
        if name.startswith("pt_"):
            return f"PyTorch has started a thread ({name})"
    if any(descendants_of_process(os.getpid())):
        return "the script has started a process"
    return "" if _unmark_bad_fork() is not None else "this PyTorch cannot use CUDA in a fork"


def gpu_memory_shortage() -> str:
    """Return that memory has run out, if so: with more of it, the script would have gone on otherwise."""
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for device in range(torch.cuda.device_count()):
            stats = torch.cuda.memory_stats(device)
            if stats["num_ooms"] or stats["num_alloc_retries"]:
                return "GPU memory has run out before the script trained"
    return ""


def open_files_of_process(others: Iterable[int]) -> tuple[list[_OpenFile], str]:
    """Return this process's files, and why they cannot all be separated; ``others`` are left alone."""
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names only
        descriptor = int(name)
        if descriptor <= 2 or descriptor in others:  # noqa: PLR2004 - standard streams
            continue
        try:
            mode = os.fstat(descriptor).st_mode
        except OSError:  # that of the listing itself
            continue
        if stat.S_ISCHR(mode) or stat.S_ISDIR(mode):
            continue
        access = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        if not stat.S_ISREG(mode) or access == os.O_RDWR:
            return [], f"the script has {os.readlink(f'/proc/self/fd/{name}')} open"  # noqa: PTH115
        position = os.lseek(descriptor, 0, os.SEEK_CUR)
        found.append(_OpenFile(descriptor, access == os.O_RDONLY, position))
    return found, ""


def repair_fork(random_state: Any, files: Iterable[_OpenFile]) -> None:
    """Have this fork go on as if it were the process that it was forked from.

    Args:
        random_state: of Python's global generator before the fork.
        files: what ``open_files_of_process`` returned before the fork.
    """
    import random

    import torch

    random.setstate(random_state)
    for file in files:
        file.separate()
    if (unmark := _unmark_bad_fork()) is not None:
        unmark(_CUDA, False)
    _forget_exit_handlers()
    for library in _gnu_openmp():  # it has lost its threads, and would wait for them
        library.omp_set_num_threads(1)
    torch.set_num_threads(1)
    _THREADS.install("set_num_threads", lambda _: lambda _: None)


def _unmark_bad_fork() -> "Callable[[int, bool], None] | None":
    """Return the function that says whether this process is a fork in which CUDA cannot be used."""
    import torch

    library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_python.so"))
    mark: Any = getattr(library, _MARK_BAD_FORK, None)
    if mark is None:
        return None
    mark.argtypes, mark.restype = (ctypes.c_int8, ctypes.c_bool), None
    return mark  # type: ignore[no-any-return]


def _gnu_openmp() -> list[ctypes.CDLL]:
    """Return the copies of GNU's OpenMP in this process: libraries bring their own."""
    maps = Path("/proc/self/maps").read_text(errors="replace")
    return [ctypes.CDLL(path) for path in sorted(set(re.findall(r"/\S*/libgomp[^/\s]*\.so[^/\s]*", maps)))]


def _forget_exit_handlers() -> None:
    """Leave what the script has registered so far for its end to the process that it was registered in."""
    atexit._clear()
    finalizers: Any = weakref.finalize
    for finalizer in list(finalizers._registry):
        finalizer.atexit = False
    finalizers._registered_with_atexit = False  # the next one registers their handler again
    util: Any = sys.modules.get("multiprocessing.util")
    if util is not None:
        util._finalizer_registry.clear()
        atexit.register(util._exit_function)
