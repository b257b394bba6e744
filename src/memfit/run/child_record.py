"""What a process beside the script's records of itself: the most memory that it has held, and how it failed.

It does so from its first use of the GPU on, not only at its end: it may be killed, or leave by ``os._exit``.
"""

import os
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

from memfit.patching.patches import Patch, before
from memfit.records import Figure
from memfit.run.children import forget_process, name_of_this_process, record_process
from memfit.run.script import end_of
from memfit.units import format_bytes

_CUDA = Patch("torch.cuda", "_lazy_init", why="report a fork that uses the GPU, which fails")


def record_failing_fork(folder: Path) -> None:
    """Record this fork of a process that used the GPU if it uses the GPU, too: that fails, on a card as well.

    Source: ``_lazy_init``, torch/cuda/__init__.py, PyTorch 2.14.1.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda._initialized:
        return

    def record(*_: object) -> None:
        why = "CUDA cannot be used in a fork of a process that has used it"
        record_process(folder, os.getpid(), name_of_this_process(), None, why)

    _CUDA.install("_lazy_init", partial(before, record))


class ChildRecord:
    """Records this process in the run's folder, where memfit finds it."""

    def __init__(self, folder: Path, context: Figure) -> None:
        """Describe what is recorded; ``context`` is that of the device."""
        self._folder = folder
        self._context = context
        self._process = 0
        self._written: tuple[int, str] | None = None
        self._shortage = ""  # the allocation that failed last
        self._failure = ""

    def begin(self) -> None:
        """Record that this process uses the GPU and, from now on, how it fails."""
        import torch

        self._process = os.getpid()
        torch._C._cuda_attach_out_of_memory_observer(self._ran_out)  # type: ignore[attr-defined]
        sys.exit, os._exit = self._noted(sys.exit), self._noted(os._exit)
        sys.excepthook = self._noted_exception(sys.excepthook)
        self._write()

    def update(self) -> None:
        """Record what this process has held so far; it goes on, whatever failed before."""
        self._shortage = self._failure = ""
        self._write()

    def end(self) -> None:
        """Record that this process ends."""
        self._shortage = ""
        self._write()

    def withdraw(self) -> None:
        """Record this process no more, and forget what was recorded: it is a rank."""
        self._process = 0
        forget_process(self._folder, os.getpid())

    def _leave(self, error: BaseException) -> None:
        if os.getpid() != self._process:  # a fork of this process, such as a worker of a loader
            return
        end = end_of(error)
        if end.exit_code:
            raised = "" if end.reason == "out of memory" else end.exception
            self._failure = raised or self._shortage or end.exception or f"exit code {end.exit_code}"
        self.end()

    def _ran_out(self, _device: int, requested: int, _total: int, free: int) -> None:
        self._shortage = f"out of memory: {format_bytes(requested)} requested, {format_bytes(free)} free"
        self._write()

    def _write(self) -> None:
        import torch

        if os.getpid() != self._process:
            return
        held = torch.cuda.max_memory_reserved() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
        failure = self._failure or self._shortage
        if self._written == (held, failure):
            return
        self._written = held, failure
        peak = Figure(held + self._context.bytes, self._context.provenance, "reserved + CUDA context")
        record_process(self._folder, self._process, name_of_this_process(), peak, failure)

    def _noted(self, leave: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
        """Return a function that ends this process as ``leave`` does, and records an exit code."""

        def noted(code: object = None, /) -> NoReturn:
            self._leave(SystemExit(code))
            leave(code)

        return noted

    def _noted_exception(self, hook: Callable[..., object]) -> Callable[..., object]:
        def excepthook(
            kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
        ) -> None:
            self._leave(error)
            hook(kind, error, trace)

        return excepthook
