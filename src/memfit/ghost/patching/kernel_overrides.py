"""Override kernels of PyTorch from Python, with the original still at hand."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

Run = Callable[..., Any]
"""The original kernel: called with the op's arguments, it does what PyTorch would have done."""


class Overrides:
    """Kernels of ATen that are replaced for as long as this object lives.

    A replacement is called as ``function(run, *arguments, **keywords)``. It costs about 5 µs a call.

    >>> overrides = Overrides()
    >>> @overrides.add("neg", "CPU")
    ... def negative(run, tensor):
    ...     return run(tensor) - 1
    >>> (-torch.ones(1)).item()
    -2.0
    >>> overrides.remove()
    """

    def __init__(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]

    def add(self, op: str, key: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Replace the kernel of ``op`` for one dispatch key by the function that is decorated.

        Args:
            op: name and overload, ``max.dim``. One that this PyTorch does not have is passed over.
            key: ``CUDA`` is reached by every call, also from within PyTorch's own kernels; ``AutogradCUDA``
                only by calls that autograd sees, and by fake tensors.
        """

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            try:
                kernel = torch.library.get_kernel(f"aten::{op}", key)
            except RuntimeError:
                return function
            original = kernel.call_boxed

            def call(keyset: torch.DispatchKeySet, *args: object, **keywords: object) -> object:
                return function(partial(original, keyset), *args, **keywords)

            with warnings.catch_warnings():  # PyTorch 2.11 says that a kernel is replaced
                warnings.filterwarnings("ignore", "Warning only once for all operators")
                self._library.impl(op, call, key, with_keyset=True)  # type: ignore[no-untyped-call]
            return function

        return register

    def remove(self) -> None:
        """Give every kernel back its place."""
        self._library._destroy()  # type: ignore[no-untyped-call]


def available() -> bool:
    """Say whether this PyTorch lets its own kernels be called from an override (2.9 does, 2.8 does not)."""
    return hasattr(torch.library, "get_kernel")
