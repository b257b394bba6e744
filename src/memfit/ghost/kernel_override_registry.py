"""Override PyTorch's kernels from Python, with the original kernel still callable."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from memfit.patching.patches import Patch

Kernel = Callable[..., Any]
"""PyTorch's original kernel, called with the op's arguments."""


class KernelOverrides:
    """ATen kernels, or those of another namespace, that are replaced while this object lives.

    A replacement is called as ``function(run, *arguments, **keywords)``, at a cost of about 5 µs per call.

    Args:
        patches: declare the ops, of one namespace.

    >>> overrides = KernelOverrides(Patch("torch:ops.aten", "neg", why="show this"))
    >>> @overrides.add("neg", "CPU")
    ... def negative(run, tensor):
    ...     return run(tensor) - 1
    >>> (-torch.ones(1)).item()
    -2.0
    >>> overrides.remove()
    """

    def __init__(self, *patches: Patch) -> None:
        self._patches = patches
        self._namespace = patches[0].owner.rpartition(".")[2]
        self._library = torch.library.Library(self._namespace, "IMPL")  # type: ignore[no-untyped-call]

    def add(self, op: str, key: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorate a function that replaces the kernel of ``op`` for one dispatch key.

        Args:
            op: name and overload, such as ``max.dim``, declared by its name. An op that this PyTorch lacks is
                skipped.
            key: ``CUDA`` covers every call, also from within PyTorch's own kernels; ``AutogradCUDA`` only
                calls that autograd sees, and fake tensors.
        """
        if not any(patch.declares(op.partition(".")[0]) for patch in self._patches):
            raise LookupError(f"{op} is not declared")

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            try:
                kernel = torch.library.get_kernel(f"{self._namespace}::{op}", key)
            except RuntimeError:
                return function
            original = kernel.call_boxed

            def call(keyset: torch.DispatchKeySet, *args: object, **keywords: object) -> object:
                return function(partial(original, keyset), *args, **keywords)

            with warnings.catch_warnings():  # PyTorch 2.11 warns that a kernel is replaced
                warnings.filterwarnings("ignore", "Warning only once for all operators")
                self._library.impl(op, call, key, with_keyset=True)  # type: ignore[no-untyped-call]
            return function

        return register

    def remove(self) -> None:
        """Restore every original kernel."""
        self._library._destroy()  # type: ignore[no-untyped-call]
