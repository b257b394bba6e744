"""Dispatch modes that have a function run each operation that PyTorch dispatches."""

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import SAC_IGNORED_OPS


class DispatchedOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has a function run the operations that checkpointing sees. ``torch.compile`` compiles nothing under it.

    Args:
        run: called with an operation, its arguments and its keyword arguments; returns its results.
    """

    def __init__(self, run: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        if func in SAC_IGNORED_OPS:
            return func(*args, **(kwargs or {}))
        return self._run(func, args, kwargs or {})


class OperationsBesideGraphs(DispatchedOperations):  # type: ignore[no-untyped-call]
    """The same where ``torch.compile`` compiles: compiled code counts as one operation."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return that it is none of the script's: what is called under it may be compiled."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return the same; newer versions of PyTorch ask for it."""
        return True
