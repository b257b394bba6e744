"""CUDA graphs and private pools: mark captures, repeat captured steps at each replay, mark deleted pools.

The Python code that runs once, while a graph is captured, takes effect at every replay:

    capture_begin ... optimizer.step() ... capture_end      kept, and not counted
    replay                                                  counted, each time

A capture allocates from the graph's own pool; a replay allocates nothing.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch
from memfit.records import MarkKind

_GRAPH = Patch(
    "torch.cuda.graphs:CUDAGraph",
    "capture_begin",
    "capture_end",
    "replay",
    why="repeat captured steps",
)
_POOL = Patch("torch.cuda.memory:MemPool", "__del__", why="mark the end of a private pool", adds=True)

Replayable = Callable[[], None]


class GraphCaptures:
    """The actions that were kept while graphs were captured, and repeated at each replay."""

    def __init__(self) -> None:
        self._capturing: dict[int, list[Replayable]] = {}  # thread -> actions kept so far
        self._captured: weakref.WeakKeyDictionary[torch.cuda.CUDAGraph, list[Replayable]] = (
            weakref.WeakKeyDictionary()
        )

    def install(self, hooks: InstalledHooks, mark: Callable[[MarkKind, int], None]) -> None:
        """Watch every graph and every ``MemPool`` of this process."""

        def begin(graph: Any) -> None:
            self._capturing[threading.get_ident()] = self._captured[graph] = []
            mark(MarkKind.CAPTURE_BEGIN, 0)

        def end(original: Callable[..., None], graph: Any) -> None:
            self._capturing.pop(threading.get_ident(), None)
            mark(MarkKind.CAPTURE_END, 0)
            original(graph)

        def repeat(graph: Any) -> None:
            for action in self._captured.get(graph, ()):
                action()

        def mark_deletion(pool: Any) -> None:
            if pool.use_count() == 1:  # otherwise a graph still uses the pool
                mark(MarkKind.MEM_POOL_GONE, pool.id[1])

        hooks.call_after(_GRAPH, "capture_begin", begin)
        hooks.wrap(_GRAPH, "capture_end", end)
        hooks.call_after(_GRAPH, "replay", repeat)
        # A weakref finalizer would run too late, when the memory has already been released.
        hooks.replace(_POOL, "__del__", lambda _: mark_deletion)

    def keep_for_replays(self, action: Replayable) -> bool:
        """Keep an action for each replay if the calling thread is capturing; return whether it is."""
        actions = self._capturing.get(threading.get_ident())
        if actions is None:
            return False
        actions.append(action)
        return True


def thread_uses_side_stream() -> bool:
    """Return whether the calling thread uses a side stream, as warm-up iterations before a capture do.

    Source: the notes on CUDA graphs in PyTorch's documentation ("Whole-network capture").
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    # The default stream is 0. Creating and comparing two Stream objects would take fifty times as long.
    return bool(torch._C._cuda_getCurrentRawStream(torch.cuda.current_device()))
