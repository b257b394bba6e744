"""A rank of a job whose script was written for one process: it sees one GPU, and one rank writes.

The GPU of the rank becomes GPU 0. The first rank prints and writes; the others would print and write the
same.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch

_OPEN = Patch("builtins", "open", also="io", why="have one rank write the script's files")
_OS = Patch(
    "os",
    *("replace", "rename", "remove", "unlink", "rmdir", "mkdir"),
    why="have one rank write the script's files",
)
_SECONDS = 10
"""How long another rank waits for a folder that the first is about to make."""


def become_one_process(hooks: InstalledHooks) -> None:
    """Have this rank see its own GPU as GPU 0 and, unless it is the first, print and write nothing.

    Call it before the process imports torch.
    """
    rank = int(os.environ["RANK"])
    local = int(os.environ.get("LOCAL_RANK", rank))
    visible = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[local] if local < len(visible) else str(local)
    os.environ["LOCAL_RANK"] = "0"
    if rank == 0:
        return
    os.environ["TQDM_DISABLE"] = "1"
    sys.stdout.flush()
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)
    tempfile.gettempdir()  # finds the folder by writing to it, behind a lock
    hooks.wrap(_OPEN, "open", _open)
    for name in _OS.names:
        hooks.wrap(_OS, name, _leave_to_first if name != "mkdir" else _await_folder)


def _open(original: Callable[..., Any], file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
    if set(mode) & set("wax+") and _is_of_script(file):
        handle, path = tempfile.mkstemp()  # not the null device: archives read where they are in their file
        os.unlink(path)  # noqa: PTH108 - it is gone when it is closed
        return original(handle, mode.replace("x", "w"), *args, **kwargs)
    return original(file, mode, *args, **kwargs)


def _leave_to_first(original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
    in_folder = any(kwargs.get(name) is not None for name in ("dir_fd", "src_dir_fd", "dst_dir_fd"))
    return None if _is_of_script(path) and not in_folder else original(path, *args, **kwargs)


def _await_folder(original: Callable[..., None], path: Any, *args: Any, **kwargs: Any) -> None:
    if not _is_of_script(path):
        return original(path, *args, **kwargs)
    until = time.monotonic() + _SECONDS
    while not Path(path).exists() and time.monotonic() < until:
        time.sleep(0.01)
    return None


def _is_of_script(path: Any) -> bool:
    """Return whether a path is one of the files that the script writes: no cache, and not temporary."""
    if not isinstance(path, str | os.PathLike):
        return False
    whole = Path(os.path.abspath(os.fspath(path)))  # noqa: PTH100 - as it is, links included
    if whole.is_relative_to(Path.cwd()):
        whole = whole.relative_to(Path.cwd())
    others = (tempfile.gettempdir(), "/dev", "/proc", sys.prefix)
    hidden = any(part.startswith(".") or part == "__pycache__" for part in whole.parts)
    return not hidden and not any(whole.is_relative_to(each) for each in others)


def leave_job() -> None:
    """Leave the process group together with the other ranks, if memfit has joined one."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.barrier()
        distributed.destroy_process_group()
