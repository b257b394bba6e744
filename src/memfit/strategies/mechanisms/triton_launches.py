"""Triton kernels that Python launches itself: PyTorch does not dispatch them, so no mode sees them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from memfit.patching.after_import import after_import
from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch

_KERNEL = Patch("triton.runtime.jit:JITFunction", "run", why="see the arguments of Triton kernels")


@contextmanager
def triton_launches(about_to_run: Callable[[Any], None]) -> Iterator[None]:
    """Within the block, call a function with the arguments of each Triton kernel before it runs."""
    hooks = InstalledHooks()

    def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        about_to_run((args, kwargs))
        return original(*args, **kwargs)

    hooks.on_removal(after_import("triton.runtime.jit", lambda: hooks.wrap(_KERNEL, "run", run)))
    try:
        yield
    finally:
        hooks.remove()
