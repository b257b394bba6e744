"""Have collectives release their tensors at a time that does not depend on the speed of the dry run.

Asynchronous collectives release them as early as a GPU may: as soon as they are issued.

Such a collective holds its tensors until the script waits for it, or until the GPU is done, which a thread of
PyTorch checks ten times a second. Without this, a run's peak would depend on the speed of the dry run.

Source: ``stashed_for_allocator_safety_``, torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, PyTorch 2.14.
"""

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from memfit.ghost.runtime_bindings import GhostRuntime
from memfit.patching.patches import Patch

_COLLECTIVES = Patch(
    "torch.distributed:ProcessGroup",
    "*",
    why="release the tensors of a collective when it is issued (methods that return c10d::Work)",
    source="torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp",
)
_REDUCER = Patch(
    "torch.distributed:Reducer",
    *("prepare_for_backward", "_rebuild_buckets"),
    why="release the first buckets of DistributedDataParallel before it rebuilds them",
    source="rebuildBuckets, torch/csrc/distributed/c10d/reducer.cpp",
)
_WORK = Patch("torch.distributed:Work", "wait", "synchronize", why="see which collectives a script awaits")


@dataclass(slots=True)
class _Issued:
    """A collective, which may outlive the script's handle of it."""

    awaited: bool = False


class CollectiveWatcher:
    """Watches the collectives that a script issues from Python, and DistributedDataParallel's first ones.

    Args:
        ghost: marks in a trace where streams wait, but not for the watcher.
    """

    waits: ClassVar[int] = 0
    """How often this process has waited until all collectives were released."""

    def __init__(self, ghost: GhostRuntime) -> None:
        self._ghost = ghost
        self.race = False
        """Whether the script dropped a tensor that a collective held: only the GPU decides until when.

        Or DistributedDataParallel dropped its first buckets, in the step in which it reduced them.
        """
        self._issued: weakref.WeakKeyDictionary[Any, _Issued] = weakref.WeakKeyDictionary()
        self._coalescing: list[Any] | None = None
        """The tensors of the collectives that are being issued together; None if they are issued alone."""
        self._removed = False

    def install(self) -> None:
        """Patch the process groups of the imported ``torch.distributed``."""
        if self._removed:
            return
        import torch.distributed as dist

        group, work = dist.ProcessGroup, dist.Work
        self._wait: Any = work.wait
        for name in _COLLECTIVES.present():
            if "-> c10d::Work" in (getattr(group, name).__doc__ or ""):
                _COLLECTIVES.wrap(name, self._release)
        for name in _WORK.names:
            _WORK.wrap(name, self._note_wait)
        _COLLECTIVES.wrap("_start_coalescing", self._start)
        _before_first_rebuild(self._release_buckets)

    def remove(self) -> None:
        """Leave all collectives as they are from now on."""
        self._removed = True

    def _start(self, start: Callable[..., Any], *args: Any) -> Any:
        self._coalescing = []
        return start(*args)

    def _release(self, issue: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Issue a collective, and have it hold nothing once it has been issued."""
        if self._removed:
            return issue(*args, **kwargs)
        held = list(_tensors((*args, *kwargs.values())))
        work = issue(*args, **kwargs)
        if issue.__name__ == "_end_coalescing":
            held, self._coalescing = self._coalescing or [], None
        if self._coalescing is not None:
            self._coalescing += held
        elif work is not None and held and held[0].is_cuda and not _capturing():
            with self._ghost.leaving_no_marks():
                self._wait(work)
            self._issued[work] = collective = _Issued()
            for tensor in held:
                weakref.finalize(tensor, self._dropped, collective).atexit = False
        return work

    def _note_wait(self, wait: Callable[..., Any], work: Any, *args: Any, **kwargs: Any) -> Any:
        if work in self._issued:
            self._issued[work].awaited = True
        return wait(work, *args, **kwargs)

    def _release_buckets(self, race: bool) -> None:
        if not self._removed:
            self.race |= race
            wait_until_collectives_released()

    def _dropped(self, collective: _Issued) -> None:
        """A tensor is gone, perhaps before the script waited for its collective."""
        self.race |= not collective.awaited


def _tensors(values: Any) -> Iterator[Any]:
    """Yield the tensors in nested sequences."""
    import torch

    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _capturing() -> bool:
    import torch

    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def wait_until_collectives_released() -> None:
    """Wait until the watchdog of each process group has released all finished collectives.

    PyTorch's watchdog thread does so ten times a second: on a card within about a step, on the ghost after
    any number of them, for a step there takes milliseconds.

    Source: ``waitForPendingWorks``, torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, PyTorch 2.14.
    """
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not c10d.is_initialized():
        return
    CollectiveWatcher.waits += 1
    nccl = getattr(c10d, "ProcessGroupNCCL", None)
    if nccl is None:  # a PyTorch without it
        return
    for group in list(c10d._world.pg_map):
        for device in group._device_types:
            backend = group._get_backend(device)
            if isinstance(backend, nccl):  # that of PyTorch 2.10 has no such method, its group has
                getattr(backend, "_wait_for_pending_works", group._wait_for_pending_works)()


@functools.cache
def release_first_buckets() -> None:
    """Have DistributedDataParallel's first buckets released before a forward puts others in their place.

    Otherwise the watchdog may or may not have looked by then: the peak would hold all gradients once more, or
    not.
    """
    import torch

    def wait(_race: bool) -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        wait_until_collectives_released()

    _before_first_rebuild(wait)


def _before_first_rebuild(act: Callable[[bool], None]) -> None:
    """Call a function once for each DistributedDataParallel, before it rebuilds its buckets.

    Args:
        act: called in the forward after the first reduction, with whether nothing has waited for collectives
            since, which is so if that forward is of the same step.
    """
    waits_before: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
    acted: weakref.WeakSet[Any] = weakref.WeakSet()

    def prepare(original: Callable[..., None], reducer: Any, *args: Any) -> None:
        waits_before[reducer] = CollectiveWatcher.waits
        original(reducer, *args)

    def rebuild(original: Callable[..., bool], reducer: Any) -> bool:
        if reducer in waits_before and reducer not in acted and not _capturing():
            acted.add(reducer)
            act(waits_before[reducer] == CollectiveWatcher.waits)
        return original(reducer)

    _REDUCER.wrap("prepare_for_backward", prepare)
    _REDUCER.wrap("_rebuild_buckets", rebuild)
