"""Skip Triton's machine code stages for all kernels but the first, because the ghost runs none of them.

Triton compiles each kernel that Inductor writes to machine code, in stages:

    ttir  ->  ttgir  ->  llir  ->  ptx  ->  cubin

The first kernel goes through all stages, so that a compiler that does not work fails; every later kernel
reuses the first one's output from the stages after ttir. This saves a seventh of the time to compile GPT-2
small.

Kernels that Inductor did not write go through all stages: they may request workspace on the GPU, or more of
a multiprocessor than it has, which only the later stages detect. So do reductions with several candidates,
among which such checks choose, and kernels that are written to a file for use elsewhere.
"""

from collections.abc import Callable, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from memfit.patching.patches import Patch

_AUTOTUNER = Patch(
    "torch._inductor.runtime.triton_heuristics:CachingAutotuner",
    "_precompile_config",
    why="generate machine code once, which no GPU runs",
)
_BACKEND = Patch(
    "triton.backends.nvidia.compiler:CUDABackend",
    "add_stages",
    why="generate machine code once, which no GPU runs",
)

_LAST_FULL_STAGE = "ttir"
_POINTWISE = "POINTWISE"  # its threads share no memory that could exceed a limit
_REDUCTIONS = {"REDUCTION", "PERSISTENT_REDUCTION", "SPLIT_SCAN"}
_USES_WORKSPACE = "tensor_descriptor"

_Stage = Callable[[Any, MutableMapping[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class _StageOutput:
    """The output of one stage for the first kernel."""

    code: str | bytes | None
    """None for an MLIR module, which a later stage may have modified: the source is passed on instead."""
    metadata: dict[str, Any]
    """The entries that the stage added to the kernel's metadata."""


def install() -> None:
    """Skip machine code stages from now on; call directly after torch was imported."""
    reuse = _ReusedStages()
    _AUTOTUNER.wrap_when_imported(_precompile_config=reuse.mark_skippable_kernel)
    _BACKEND.wrap_when_imported(add_stages=reuse.reuse_stages)


def _is_skippable(kernel: Any) -> bool:
    """Return whether nothing depends on the machine code of a kernel that Inductor is about to compile."""
    kind = kernel.heuristic_type.name
    return (
        (kind == _POINTWISE or (kind in _REDUCTIONS and len(kernel.configs or ()) == 1))
        and not kernel.inductor_meta.get("store_cubin")
        and _USES_WORKSPACE not in kernel.fn.src
    )


class _ReusedStages:
    """The output of each stage for the first kernel, and whether the kernel being compiled may have it."""

    def __init__(self) -> None:
        self._first: dict[tuple[Any, str], _StageOutput] = {}
        self._skippable: ContextVar[bool] = ContextVar("skippable", default=False)

    def mark_skippable_kernel(
        self, compile_one: Callable[..., Any], kernel: Any, *args: Any, **options: Any
    ) -> Any:
        before = self._skippable.set(_is_skippable(kernel))
        try:
            return compile_one(kernel, *args, **options)
        finally:
            self._skippable.reset(before)

    def reuse_stages(
        self,
        add_stages: Callable[..., None],
        backend: Any,
        stages: dict[str, _Stage],
        *args: Any,
        **options: Any,
    ) -> None:
        add_stages(backend, stages, *args, **options)
        if self._skippable.get() and _LAST_FULL_STAGE in stages:
            later = list(stages)[list(stages).index(_LAST_FULL_STAGE) + 1 :]
            for name in later:
                stages[name] = self._run_once((backend.target, name), stages[name])

    def _run_once(self, key: tuple[Any, str], stage: _Stage) -> _Stage:
        def run(source: Any, metadata: MutableMapping[str, Any]) -> Any:
            first = self._first.get(key)
            if first is None:
                before = dict(metadata)
                code = stage(source, metadata)
                added = {
                    name: value for name, value in metadata.items() if before.get(name, run) is not value
                }
                self._first[key] = _StageOutput(code if isinstance(code, str | bytes) else None, added)
                return code
            metadata.update(first.metadata)
            return source if first.code is None else first.code

        return run
