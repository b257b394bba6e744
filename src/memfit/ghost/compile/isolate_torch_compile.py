"""Isolate ``torch.compile`` and Triton on the ghost: their caches, kernel timings and source lines.

Caches. Code compiled for the ghost is valid for the card that it stands in for, but a *choice* by timing is
not: no kernel runs, so none is faster. Compilers therefore keep their caches in memfit's own folder, never in
the user's, regardless of the environment or the script; remote caches are disabled. Compiled code that a
script saves (``save_cache_artifacts``) contains no machine code, which would be of no use elsewhere.

Choices. For a compiler that times candidates, all candidates take equally long, so it chooses the first; its
allocations for the timing are made as usual. Such choices are never read from a cache, nor are graphs that
depend on them: both would make a second dry run allocate differently from the first. Temporary allocations of
the compilation itself, such as those for folding a constant, do not occur in a run that finds its graph in
the cache.

Lines. Inductor stores the script's lines with a graph, but looks graphs up regardless of their file and line.
It would report lines of other scripts, or of an older version of this one, so memfit discards its lines.

Work. A graph keeps how much work its kernels do (``compiled_kernel_work.py``), for estimates of time.

Time. Compilation runs in this process: a worker process would import PyTorch without the ghost.
Machine code is generated only once, because no GPU runs it (``skip_triton_codegen.py``).
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from torch._guards import TracingContext

from memfit.ghost.compile import compiled_kernel_work, skip_triton_codegen
from memfit.ghost.note_callback_protocol import NoteCallback
from memfit.ghost.runtime_bindings import GhostRuntime
from memfit.patching.after_import import call_after_import
from memfit.patching.patches import Patch, call_before, wrapped
from memfit.records import Provenance

_INDUCTOR = "inductor-3"
"""The folder of its cache: another one whenever ``compiled_kernel_work.py`` keeps something else."""
_TIE_MS = 1000.0
"""The duration of every candidate: longer than any timing loop, so that each runs only a few times."""

_KERNEL_NOT_TIMED = (
    "On a card, candidate kernels are timed and the fastest is used. The ghost cannot time kernels, so the "
    "first candidate was used. The allocations for the timing are counted, as in the first run on a card; "
    "later runs on a card read the choice from a cache."
)
_GRAPH_NOT_TIMED = (
    "On the ghost, torch.compile took the first of several implementations without timing them. Sizes differ "
    "if a card would choose an implementation that pads its inputs or needs a workspace."
)
_FOLDERS = Patch(
    "torch._inductor.runtime.cache_dir_utils", "cache_dir", "triton_cache_dir", why="keep its own caches"
)
_COMPILE = Patch("torch._inductor.compile_fx", "compile_fx", why="keep its own caches")
_TRITON_CACHE = Patch("triton.runtime.cache:FileCacheManager", "__init__", why="keep its own caches")
_LINES = Patch(
    "torch._inductor.codecache:PyCodeCache", "stack_frames_for_code", why="leave out lines of other scripts"
)
_TIMINGS = Patch(
    "torch._inductor.codecache:CacheBase",
    *("get_local_cache", "update_local_cache"),
    why="keep timings in the process",
)
_GRAPH_CACHE = Patch(
    "torch._inductor.codecache:FxGraphCache",
    "_save_graph",
    why="cache no graph that rests on timings",
)
_AUTOGRAD_CACHE = Patch(
    "torch._functorch._aot_autograd.autograd_cache:AOTAutogradCache",
    "save",
    why="cache no graph that rests on timings",
)
_TRITON_TIMING = Patch(
    "torch._inductor.runtime.benchmarking:TritonBenchmarker", "benchmark_gpu", why="time no candidates"
)
_INDUCTOR_TIMING = Patch(
    "torch._inductor.runtime.benchmarking:InductorBenchmarker",
    "benchmark_gpu",
    why="time no candidates",
)
_TIMING_FUNCTIONS = Patch("triton.testing", "do_bench", "do_bench_cudagraph", why="time no candidates")
_TIMING = "timing kernels"
_TIMED = "memfit_timed"  # set on the tracing context of a graph that depends on timings
_OFF = (
    "TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE",
    "TORCHINDUCTOR_AUTOGRAD_REMOTE_CACHE",
    "TORCHINDUCTOR_AUTOTUNE_REMOTE_CACHE",
    "TORCHINDUCTOR_BUNDLED_AUTOTUNE_REMOTE_CACHE",
    "TORCHINDUCTOR_AUTOTUNE_IN_SUBPROC",
    "TRITON_CACHE_AUTOTUNING",
)


Labelled = Callable[[str], AbstractContextManager[None]]


def isolate_compilation(
    ghost: GhostRuntime, folder: Path, note: NoteCallback, *, labelled: Labelled = lambda _op: nullcontext()
) -> None:
    """Isolate compilation from now on; call once, directly after torch was imported.

    Args:
        ghost: the loaded ghost.
        folder: the folder for the compilers' caches.
        note: called when a choice was made without timing.
        labelled: returns a context manager that labels the allocations within by an operation.
    """
    _CompilerPatches(ghost, folder, note, labelled).install()


class _CompilerPatches:
    """The patches that ``isolate_compilation`` applies."""

    def __init__(self, ghost: GhostRuntime, folder: Path, note: NoteCallback, labelled: Labelled) -> None:
        self._ghost = ghost
        self._folder = folder
        self._note = note
        self._labelled = labelled

    def install(self) -> None:
        """Set the environment now and each time a compiler reads it, as a script may change it in between."""
        self._set_environment()
        for module, action in (
            ("torch._inductor.config", self._configure_inductor),
            ("torch._inductor.runtime.cache_dir_utils", self._redirect_inductor_cache),
            ("torch._inductor.codecache", self._discard_lines),
            ("torch._functorch._aot_autograd.autograd_cache", self._discard_choices),
            ("triton.runtime.cache", self._redirect_triton_cache),
        ):
            call_after_import(module, action)
        _COMPILE.wrap_when_imported(compile_fx=self._configure_first)
        _TRITON_TIMING.wrap_when_imported(benchmark_gpu=self._skip_timing)
        _INDUCTOR_TIMING.wrap_when_imported(benchmark_gpu=self._skip_timing)
        _TIMING_FUNCTIONS.wrap_when_imported(**dict.fromkeys(_TIMING_FUNCTIONS.names, self._skip_timing))
        skip_triton_codegen.skip_machine_code_stages()
        compiled_kernel_work.keep_kernel_work_in_graphs()

    def _set_environment(self, *_args: object, **_options: object) -> None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self._folder / _INDUCTOR)
        os.environ["TRITON_CACHE_DIR"] = str(self._folder / "triton")
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        os.environ.update(dict.fromkeys(_OFF, "0"))

    def _configure_inductor(self, *_args: object, **_options: object) -> None:
        self._set_environment()
        from torch._inductor import config

        config.autotune_local_cache = False
        config.autotune_in_subproc = False
        config.compile_threads = 1
        config.bundle_triton_into_fx_graph_cache = False

    def _redirect_inductor_cache(self) -> None:
        for name in _FOLDERS.names:  # the others import them from here
            _FOLDERS.install(name, partial(call_before, self._set_environment))

    def _configure_first(self, compile_fx: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self._configure_inductor()
        return compile_fx(*args, **options)

    def _redirect_triton_cache(self) -> None:
        from triton import knobs  # type: ignore[import-untyped]

        def set_folder(*_args: object, **_options: object) -> None:
            self._set_environment()
            knobs.cache.dir = os.environ["TRITON_CACHE_DIR"]  # a script may also have set this

        _TRITON_CACHE.install("__init__", partial(call_before, set_folder))

    def _discard_lines(self) -> None:
        """Keep PyTorch's allocation history from adding script lines to those of Inductor's generated code.

        Source: ``PythonTraceback::appendSymbolized`` in torch/csrc/profiler/python/combined_traceback.cpp.
        """
        _LINES.install("stack_frames_for_code", lambda _: staticmethod(lambda _path, _line: None))

    def _discard_choices(self) -> None:
        """Keep timings in this process only, and graphs that depend on them out of the caches."""
        timings: dict[str, Any] = {}
        _TIMINGS.install("get_local_cache", lambda _: lambda _: timings)
        _TIMINGS.install("update_local_cache", lambda _: lambda _, cache: timings.update(cache))
        _GRAPH_CACHE.install("_save_graph", lambda save: staticmethod(wrapped(save, _unless_timed)))
        _AUTOGRAD_CACHE.install("save", lambda save: staticmethod(wrapped(save, _unless_timed)))

    def _skip_timing(self, benchmark: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a function that times a kernel, and have all kernels take equally long."""
        context = TracingContext.try_get()
        if context is not None:
            vars(context)[_TIMED] = True
        text = _KERNEL_NOT_TIMED if context is None else _GRAPH_NOT_TIMED
        self._note(Provenance.ASSUMED, text, "", sizes=context is not None)
        with self._labelled(_TIMING), self._ghost.answering_elapsed(_TIE_MS):
            return benchmark(*args, **options)


def _unless_timed(save: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Save a compiled graph, unless it depends on timings."""
    if not getattr(TracingContext.try_get(), _TIMED, False):
        save(*args, **options)
