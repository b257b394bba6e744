"""Notice the next forward of an outermost module, without a hook on the modules inside it.

PyTorch calls a hook on all modules several hundred times in a step of a large model. The hook here is in
PyTorch's table from a mark of the run until its first call, which is the outermost module's.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import _global_forward_pre_hooks, register_module_forward_pre_hook

from memfit.patching.installed_hooks import InstalledHooks
from memfit.recording.event_labels import LabelBook
from memfit.records import MarkKind

_OF_FORWARDS = (MarkKind.FORWARD, MarkKind.EVALUATION)


class NextForward:
    """Notices the first forward after each mark, and all forwards that train nothing.

    Modules without parameters, such as losses, are not noticed.

    Args:
        in_backward: returns whether a backward pass is running, which makes a forward a recomputation.
        on_root: called with an outermost module that is about to run; returns whether the forward may train
            nothing. If so, the next one is noticed, too: it may train, and no mark is between.
    """

    def __init__(self, in_backward: Callable[[], bool], on_root: Callable[[torch.nn.Module], bool]) -> None:
        self._in_backward, self._on_root = in_backward, on_root
        self._hooks: InstalledHooks
        self._table: dict[int, Any] = {}
        self._key = -1
        self._awaited = False

    def install(self, hooks: InstalledHooks, book: LabelBook) -> None:
        """Notice forwards from now on.

        Args:
            hooks: registry of the changes to PyTorch.
            book: holds the marks.
        """
        handle = register_module_forward_pre_hook(self._enter)
        hooks.add(handle)
        self._hooks, self._table, self._key = hooks, _global_forward_pre_hooks, handle.id
        self._awaited = True
        book.listeners.append(self._after_mark)

    def _after_mark(self, kind: MarkKind, _index: int) -> None:
        if kind not in _OF_FORWARDS and not self._awaited:
            self._await()

    def _await(self) -> None:
        self._awaited = True
        if not (self._hooks.are_suspended or self._hooks.removed):  # resuming puts it back
            self._table[self._key] = self._enter

    def _enter(self, module: torch.nn.Module, _arguments: tuple[object, ...]) -> None:
        if torch.compiler.is_compiling() or self._in_backward():
            return
        if not self._awaited:  # it was suspended meanwhile, and put back
            self._table.pop(self._key, None)
            return
        if next(module.parameters(), None) is None:
            return
        self._awaited = False
        self._table.pop(self._key, None)
        if self._on_root(module):
            self._await_after(module)

    def _await_after(self, module: torch.nn.Module) -> None:
        """Notice the next forward when a module has returned, or failed."""

        def leave(*_: object) -> None:
            handle.remove()
            self._await()

        handle = module.register_forward_hook(leave, always_call=True)
