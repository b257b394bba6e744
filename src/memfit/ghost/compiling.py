"""What ``torch.compile`` and Triton must not take from the ghost, or leave behind.

Caches. What is compiled for the ghost is good for the card that it stands in for, but what is *chosen* on
it is not: no kernel runs, so none is faster. Compilers therefore keep their caches in memfit's own folder,
never in the user's, whatever the environment or the script says; remote caches are left alone.

Choices. A compiler that times candidates is told that all take as long, and takes its first; what it
allocates for the timing it allocates. Such choices are never read back from a cache, so that a second dry
run allocates what the first one did.

Compiling happens in this process: a worker process would import PyTorch without the ghost.
"""

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from memfit.ghost.after_import import after_import
from memfit.ghost.answers import Note
from memfit.ghost.load import Ghost
from memfit.records import Provenance

_TIE_MS = 1000.0
"""What every candidate takes: longer than any timing loop goes on, so that each runs a few times only."""

_CHOSEN = (
    "Kernels that a card chooses by timing them were not timed: the first candidate was taken each time. "
    "What the timing allocates is counted, as on a card's first run; later runs find the choice in a cache."
)
_TIMING = "timing kernels"
_OFF = (
    "TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE",
    "TORCHINDUCTOR_AUTOGRAD_REMOTE_CACHE",
    "TORCHINDUCTOR_AUTOTUNE_REMOTE_CACHE",
    "TORCHINDUCTOR_BUNDLED_AUTOTUNE_REMOTE_CACHE",
    "TORCHINDUCTOR_AUTOTUNE_IN_SUBPROC",
    "TRITON_CACHE_AUTOTUNING",
)


Labelled = Callable[[str], AbstractContextManager[None]]


def install(
    ghost: Ghost, folder: Path, note: Note, *, labelled: Labelled = lambda _op: nullcontext()
) -> None:
    """Keep what is compiled from now on apart: call once, when torch has just been imported.

    Args:
        ghost: the loaded ghost.
        folder: where compilers keep their caches.
        note: called when a choice was made without timing.
        labelled: labels what is allocated within, by what is done there.
    """
    Compiling(ghost, folder, note, labelled).install()


class Compiling:
    """What ``install`` puts in place."""

    def __init__(self, ghost: Ghost, folder: Path, note: Note, labelled: Labelled) -> None:
        self._ghost = ghost
        self._folder = folder
        self._note = note
        self._labelled = labelled

    def install(self) -> None:
        """Set the environment, now and again when a compiler is imported: a script may set it in between."""
        self._set_environment()
        for module, action in (
            ("torch._inductor.config", self._set_inductor),
            ("torch._inductor.codecache", self._forget_choices),
            ("torch._inductor.runtime.benchmarking", self._tie_inductor),
            ("triton", self._set_environment),
            ("triton.testing", self._tie_triton),
        ):
            after_import(module, action)

    def _set_environment(self) -> None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self._folder / "inductor")
        os.environ["TRITON_CACHE_DIR"] = str(self._folder / "triton")
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        os.environ.update(dict.fromkeys(_OFF, "0"))

    def _set_inductor(self) -> None:
        self._set_environment()
        from torch._inductor import config

        config.autotune_local_cache = False
        config.autotune_in_subproc = False

    def _forget_choices(self) -> None:
        """Have graphs whose kernels were chosen while compiling compiled again each time."""
        from torch._inductor import config
        from torch._inductor.codecache import BypassFxGraphCache, FxGraphCache

        check = FxGraphCache._check_can_cache

        @functools.wraps(check)
        def check_can_cache(*args: Any, **options: Any) -> None:
            if config.max_autotune or config.max_autotune_gemm:
                raise BypassFxGraphCache("kernels were chosen without timing")
            check(*args, **options)

        FxGraphCache._check_can_cache = staticmethod(check_can_cache)  # type: ignore[method-assign]

    def _tie_inductor(self) -> None:
        from torch._inductor.runtime import benchmarking

        for benchmarker in (benchmarking.TritonBenchmarker, benchmarking.InductorBenchmarker):
            benchmarker.benchmark_gpu = self._tied(benchmarker.benchmark_gpu)  # type: ignore[method-assign]

    def _tie_triton(self) -> None:
        import triton.testing as timing  # type: ignore[import-untyped]

        for name in ("do_bench", "do_bench_cudagraph"):
            setattr(timing, name, self._tied(getattr(timing, name)))

    def _tied(self, benchmark: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that times a kernel: all take as long."""

        @functools.wraps(benchmark)
        def timed(*args: Any, **options: Any) -> Any:
            self._note(Provenance.ASSUMED, _CHOSEN, "")
            with self._labelled(_TIMING), self._ghost.answering_elapsed(_TIE_MS):
                return benchmark(*args, **options)

        return timed
