"""Machine code that no GPU will run, made once.

Triton turns each kernel that Inductor writes into machine code, in stages:

    ttir  ->  ttgir  ->  llir  ->  ptx  ->  cubin

The ghost never runs it. The first kernel goes through all of them, so that a compiler that does not work
says so; of every later one what the later stages make is the first one's. That is a seventh of the time that
it takes to compile GPT-2 small.

Kernels that Inductor did not write go all the way: they may ask for work space on the GPU, or for more of a
multiprocessor than it has, and only the later stages know. So do reductions with several candidates, which
such checks choose from, and kernels that are written to a file for use elsewhere.
"""

import functools
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from memfit.ghost.patching.after_import import after_import

_LAST_OF_THE_SOURCE = "ttir"
_POINTWISE = "POINTWISE"  # its threads share nothing that could be too much
_REDUCTIONS = {"REDUCTION", "PERSISTENT_REDUCTION", "SPLIT_SCAN"}
_WANTS_WORK_SPACE = "tensor_descriptor"

_Stage = Callable[[Any, MutableMapping[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class _Made:
    """What one stage made of the first kernel."""

    code: str | bytes | None
    """None where it is a module of MLIR, which a later stage may have changed: then the source goes on."""
    told: dict[str, Any]
    """What it added to the kernel's metadata."""


_first: dict[tuple[Any, str], _Made] = {}
_needless: ContextVar[bool] = ContextVar("needless", default=False)


def install() -> None:
    """Make machine code once from now on: call when torch has just been imported."""
    after_import("torch._inductor.runtime.triton_heuristics", _tell_needless_kernels)
    after_import("triton.backends.nvidia.compiler", _make_once)


def _tell_needless_kernels() -> None:
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    compile_one = CachingAutotuner._precompile_config

    @functools.wraps(compile_one)
    def precompile(kernel: Any, *args: Any, **options: Any) -> Any:
        with _within(_is_needless(kernel)):
            return compile_one(kernel, *args, **options)

    CachingAutotuner._precompile_config = precompile  # type: ignore[method-assign,assignment]


def _is_needless(kernel: Any) -> bool:
    """Whether nothing hangs on the machine code of what Inductor is about to compile."""
    kind = kernel.heuristic_type.name
    return (
        (kind == _POINTWISE or (kind in _REDUCTIONS and len(kernel.configs or ()) == 1))
        and not kernel.inductor_meta.get("store_cubin")
        and _WANTS_WORK_SPACE not in kernel.fn.src
    )


@contextmanager
def _within(needless: bool) -> Iterator[None]:
    before = _needless.set(needless)
    try:
        yield
    finally:
        _needless.reset(before)


def _make_once() -> None:
    from triton.backends.nvidia.compiler import CUDABackend  # type: ignore[import-untyped]

    add_stages = CUDABackend.add_stages

    @functools.wraps(add_stages)
    def add(backend: Any, stages: dict[str, _Stage], *args: Any, **options: Any) -> None:
        add_stages(backend, stages, *args, **options)
        if _needless.get() and _LAST_OF_THE_SOURCE in stages:
            later = list(stages)[list(stages).index(_LAST_OF_THE_SOURCE) + 1 :]
            for name in later:
                stages[name] = _once((backend.target, name), stages[name])

    CUDABackend.add_stages = add


def _once(key: tuple[Any, str], stage: _Stage) -> _Stage:
    def made(source: Any, metadata: MutableMapping[str, Any]) -> Any:
        first = _first.get(key)
        if first is None:
            before = dict(metadata)
            code = stage(source, metadata)
            told = {name: value for name, value in metadata.items() if before.get(name, made) is not value}
            _first[key] = _Made(code if isinstance(code, str | bytes) else None, told)
            return code
        metadata.update(first.told)
        return source if first.code is None else first.code

    return made
