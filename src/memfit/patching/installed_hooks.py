"""The hooks and patches that are installed in PyTorch now: suspended while compiled code runs, or removed.

``torch.compile`` reads PyTorch's hook tables: it traces the hooks that it finds into the user's graph, and
guards on the lengths of the tables. So memfit's own hooks are suspended while a compiled region runs or is
being compiled, and the compiled code is the same as without memfit. The tables are shared by all threads, and
so is the suspension.
"""

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from memfit.patching.after_import import call_after_import
from memfit.patching.patches import Patch

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

_Table = OrderedDict[int, Any]


class InstalledHooks:
    """The hooks in this process that can be suspended, and the actions that undo every change to PyTorch."""

    def __init__(self) -> None:
        self._hooks: list[tuple[_Table, int, Any]] = []  # (table, key, hook)
        self._suspensions = 0
        self._lock = threading.Lock()
        self._undo: list[Callable[[], None]] = []
        self.removed = False
        """Whether everything has been removed for good."""

    def add(self, handle: "RemovableHandle") -> None:
        """Add a hook, in every table that contains it."""
        for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
            table = reference()
            if table is not None:
                self._hooks.append((table, handle.id, table[handle.id]))
        self.on_removal(handle.remove)

    def wrap(self, patch: Patch, name: str, around: Callable[..., Any], *, on: Any = None) -> None:
        """Replace a name by ``around(original, ...)``, until removal; a method passes its object next."""

        def wrapping(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                if self.removed:  # the script has kept a reference, or has wrapped the wrapper
                    return original(*args, **kwargs)
                return around(original, *args, **kwargs)

            return wrapped

        self.replace(patch, name, wrapping, on=on)

    def wrap_when_imported(self, patch: Patch, **arounds: Callable[..., Any]) -> None:
        """Replace names as ``wrap`` does, as soon as the module of their owner has been imported."""

        def wrap() -> None:
            for name, around in arounds.items():
                self.wrap(patch, name, around)

        self.on_removal(call_after_import(patch.module, wrap))

    def call_after(self, patch: Patch, name: str, action: Callable[[Any], object]) -> None:
        """Call ``action`` with the object of a method after each call of that method, until removal."""

        def around(original: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(owner, *args, **kwargs)
            action(owner)
            return result

        self.wrap(patch, name, around)

    def replace(self, patch: Patch, name: str, replacement: Callable[[Any], Any], *, on: Any = None) -> None:
        """Replace a name by ``replacement(original)``, until removal; see ``Patch.install``."""
        self.on_removal(patch.install(name, replacement, on=on))

    def on_removal(self, action: Callable[[], None]) -> None:
        """Add an action to run on removal; the last one added runs first."""
        self._undo.append(action)

    def remove(self) -> None:
        """Remove everything for good."""
        self.removed = True
        with self._lock:
            self._hooks.clear()
        while self._undo:
            self._undo.pop()()

    @property
    def are_suspended(self) -> bool:
        """Whether the hooks are suspended now."""
        return self._suspensions > 0

    def suspend(self) -> None:
        """Take the hooks out of their tables until ``resume`` has been called as often."""
        with self._lock:
            self._suspensions += 1
            if self._suspensions == 1:
                for table, key, _ in self._hooks:
                    table.pop(key, None)

    def resume(self) -> None:
        """Put the hooks back into their tables, before those of the script."""
        with self._lock:
            self._suspensions -= 1
            if self._suspensions == 0:
                for table, key, hook in reversed(self._hooks):
                    table[key] = hook
                    table.move_to_end(key, last=False)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Suspend the hooks within."""
        self.suspend()
        try:
            yield
        finally:
            self.resume()
