"""Dispatch modes that have a function run each operation that PyTorch dispatches; a hook on compilations."""

from collections.abc import Callable
from typing import Any

from torch._C._dynamo import eval_frame as _eval_frame
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import SAC_IGNORED_OPS

from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch

_COMPILATIONS = Patch(
    "torch._dynamo.callback:CompilationCallbackHandler", "run_start_callbacks", why="notice compilations"
)
_SKIPPED = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)


def exclude_from_compilation(function: Callable[..., Any]) -> None:
    """Have ``torch.compile`` leave out a function that PyTorch calls, perhaps where a script is compiled."""
    _eval_frame.set_code_exec_strategy(function.__code__, _SKIPPED)


def call_before_compilations(hooks: InstalledHooks, call: Callable[[], None]) -> None:
    """Call a function whenever ``torch.compile`` begins to compile, not where it decorates a function."""

    def started(original: Callable[..., None], *args: Any) -> None:
        call()
        original(*args)

    hooks.wrap_when_imported(_COMPILATIONS, run_start_callbacks=started)


class OperationInterceptionMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has a function run the operations that checkpointing sees. ``torch.compile`` compiles nothing under it.

    Args:
        run: called with an operation, its arguments and its keyword arguments; returns its results.
        watches: whether it only records or counts them for memfit; otherwise a plan consists of it.
    """

    intercepted = 0
    """Operations that modes which only watch have intercepted in this process: no step of a user has them."""

    def __init__(self, run: Callable[[Any, Any, Any], Any], *, watches: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run, self._watches = run, watches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        OperationInterceptionMode.intercepted += self._watches
        if func in SAC_IGNORED_OPS:
            return func(*args, **(kwargs or {}))
        return self._run(func, args, kwargs or {})


exclude_from_compilation(OperationInterceptionMode.__torch_dispatch__)


class InterceptionModeAllowingCompilation(OperationInterceptionMode):  # type: ignore[no-untyped-call]
    """The same where ``torch.compile`` compiles: compiled code counts as one operation."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return that it is none of the script's: what is called under it may be compiled."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return the same; newer versions of PyTorch ask for it."""
        return True
