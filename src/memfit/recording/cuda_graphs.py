"""CUDA graphs and private pools: when they come and go.

What a script's Python did once, while a graph was captured, happens again at every replay:

    capture_begin ... optimizer.step() ... capture_end      remembered, and not counted
    replay                                                  counted, as often as it comes

Memory is asked for while capturing, from the graph's own pool; a replay asks for none.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from memfit.recording.hooks import LiftedHooks
from memfit.records import MarkKind

Happening = Callable[[], None]


class Replays:
    """What happened while graphs were captured."""

    def __init__(self) -> None:
        self._capturing: dict[int, list[Happening]] = {}  # thread -> what has happened so far
        self._captured: weakref.WeakKeyDictionary[torch.cuda.CUDAGraph, list[Happening]] = (
            weakref.WeakKeyDictionary()
        )

    def install(self, hooks: LiftedHooks, mark: Callable[[MarkKind, int], None]) -> None:
        """Watch every graph and every ``MemPool`` of this process.

        Args:
            hooks: where everything goes that is put into PyTorch.
            mark: takes what happens now, and its index.
        """

        def capture_begin(begin: Callable[..., None], self: Any, *args: Any, **options: Any) -> None:
            begin(self, *args, **options)
            mark(MarkKind.CAPTURE_BEGIN, 0)
            replays._capturing[threading.get_ident()] = replays._captured[self] = []

        def capture_end(end: Callable[..., None], self: Any) -> None:
            replays._capturing.pop(threading.get_ident(), None)
            mark(MarkKind.CAPTURE_END, 0)
            end(self)

        def replay_again(replay: Callable[..., None], self: Any) -> None:
            replay(self)
            for happening in replays._captured.get(self, ()):
                happening()

        def gone(self: Any) -> None:
            if self.use_count() == 1:  # otherwise graphs use it, and it stays
                mark(MarkKind.MEM_POOL_GONE, self.id[1])

        replays = self
        for name, around in (
            ("capture_begin", capture_begin),
            ("capture_end", capture_end),
            ("replay", replay_again),
        ):
            hooks.wrap(torch.cuda.CUDAGraph, name, around)
        # Not a finalizer of weakref's: those come when the memory was given back already.
        hooks.replace(torch.cuda.MemPool, "__del__", gone)

    def captured(self, happening: Happening) -> bool:
        """Say whether the calling thread is capturing; if so, what happens now happens at each replay."""
        happened = self._capturing.get(threading.get_ident())
        if happened is None:
            return False
        happened.append(happening)
        return True


def warming_up() -> bool:
    """Say whether the calling thread works on a side stream, as what is to be captured is run before.

    Source: the notes on CUDA graphs in PyTorch's documentation ("Whole-network capture").
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    # The default stream is 0; to make two Stream objects and compare them takes fifty times as long.
    return bool(torch._C._cuda_getCurrentRawStream(torch.cuda.current_device()))
