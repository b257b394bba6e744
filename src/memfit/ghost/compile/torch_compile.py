"""What ``torch.compile`` and Triton must not take from the ghost, or leave behind.

Caches. What is compiled for the ghost is good for the card that it stands in for, but what is *chosen* on
it is not: no kernel runs, so none is faster. Compilers therefore keep their caches in memfit's own folder,
never in the user's, whatever the environment or the script says; remote caches are left alone. What
a script saves of compiled code (``save_cache_artifacts``) has no machine code in it, which would be
of no use elsewhere.

Choices. A compiler that times candidates is told that all take as long, and takes its first; what it
allocates for the timing it allocates. Such choices are never read back from a cache, nor are graphs that
were shaped by them: both would need other memory in a second dry run than in the first. What compiling
itself allocates for a moment, as for folding a constant, a run that finds its graph does not allocate.

Lines. Inductor keeps the lines of the script with a graph, but finds graphs whatever file or line they came
from. It would name lines of other scripts, or of this one before it was edited, so it is asked for none.

Time. Compiling happens in this process: a worker process would import PyTorch without the ghost.
Machine code that nobody runs is made once (``machine_code.py``).
"""

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch._guards import TracingContext

from memfit.ghost.compile import triton_stub
from memfit.ghost.ffi import Ghost
from memfit.ghost.patching.after_import import after_import
from memfit.ghost.patching.before_call import before
from memfit.ghost.values.stand_ins import Note
from memfit.records import Provenance

_TIE_MS = 1000.0
"""What every candidate takes: longer than any timing loop goes on, so that each runs a few times only."""

_CHOSEN = (
    "Kernels that a card chooses by timing them were not timed: the first candidate was taken each time. "
    "What the timing allocates is counted, as on a card's first run; later runs find the choice in a cache."
)
_SHAPED = (
    "While compiling, ways to compute something were not timed against each other, and the first was taken: "
    "sizes depend on it where one of them pads its inputs or needs work space."
)
_TIMING = "timing kernels"
_TIMED = "memfit_timed"  # set on the context of a graph that was compiled by timings
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
        """Set the environment, now and each time that a compiler looks: a script may set it in between."""
        self._set_environment()
        for module, action in (
            ("torch._inductor.config", self._set_inductor),
            ("torch._inductor.runtime.cache_dir_utils", self._set_where_inductor_looks),
            ("torch._inductor.compile_fx", self._set_where_inductor_begins),
            ("torch._inductor.codecache", self._forget_lines),
            ("torch._functorch._aot_autograd.autograd_cache", self._forget_choices),
            ("torch._inductor.runtime.benchmarking", self._tie_inductor),
            ("triton.runtime.cache", self._set_where_triton_looks),
            ("triton.testing", self._tie_triton),
        ):
            after_import(module, action)
        triton_stub.install()

    def _set_environment(self, *_args: object, **_options: object) -> None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self._folder / "inductor")
        os.environ["TRITON_CACHE_DIR"] = str(self._folder / "triton")
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        os.environ.update(dict.fromkeys(_OFF, "0"))

    def _set_inductor(self, *_args: object, **_options: object) -> None:
        self._set_environment()
        from torch._inductor import config

        config.autotune_local_cache = False
        config.autotune_in_subproc = False
        config.compile_threads = 1
        config.bundle_triton_into_fx_graph_cache = False

    def _set_where_inductor_looks(self) -> None:
        from torch._inductor.runtime import cache_dir_utils as folders

        for name in ("cache_dir", "triton_cache_dir"):  # the others import them from here
            setattr(folders, name, before(self._set_environment, getattr(folders, name)))

    def _set_where_inductor_begins(self) -> None:
        from torch._inductor import compile_fx

        compile_fx.compile_fx = before(self._set_inductor, compile_fx.compile_fx)

    def _set_where_triton_looks(self) -> None:
        from triton import knobs  # type: ignore[import-untyped]
        from triton.runtime.cache import FileCacheManager  # type: ignore[import-untyped]

        def set_folder(*_args: object, **_options: object) -> None:
            self._set_environment()
            knobs.cache.dir = os.environ["TRITON_CACHE_DIR"]  # a script may have set this, too

        FileCacheManager.__init__ = before(set_folder, FileCacheManager.__init__)

    def _forget_lines(self) -> None:
        """Have PyTorch's history of allocations add no lines to those of the code that Inductor wrote.

        Source: ``PythonTraceback::appendSymbolized`` in torch/csrc/profiler/python/combined_traceback.cpp.
        """
        from torch._inductor.codecache import PyCodeCache

        PyCodeCache.stack_frames_for_code = staticmethod(lambda _path, _line: None)  # type: ignore[method-assign,assignment]

    def _forget_choices(self) -> None:
        """Keep timings to this process, and graphs that were shaped by them out of the caches."""
        from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
        from torch._inductor.codecache import CacheBase, FxGraphCache

        timings: dict[str, Any] = {}
        CacheBase.get_local_cache = lambda _: timings  # type: ignore[method-assign,assignment]
        CacheBase.update_local_cache = lambda _, cache: timings.update(cache)  # type: ignore[method-assign,assignment]
        for cache, name in ((FxGraphCache, "_save_graph"), (AOTAutogradCache, "save")):
            setattr(cache, name, staticmethod(_unless_timed(getattr(cache, name))))

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
            context = TracingContext.try_get()
            if context is not None:
                vars(context)[_TIMED] = True
            self._note(
                Provenance.ASSUMED, _CHOSEN if context is None else _SHAPED, "", sizes=context is not None
            )
            with self._labelled(_TIMING), self._ghost.answering_elapsed(_TIE_MS):
                return benchmark(*args, **options)

        return timed


def _unless_timed(save: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what saves a compiled graph: one that was shaped by timings is not saved."""

    @functools.wraps(save)
    def save_unless_timed(*args: Any, **options: Any) -> Any:
        if not getattr(TracingContext.try_get(), _TIMED, False):
            save(*args, **options)

    return save_unless_timed
