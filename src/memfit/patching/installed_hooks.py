"""A registry of memfit's hooks and patches in PyTorch: suspend them while compiled code runs, or remove them.

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

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

_Table = OrderedDict[int, Any]
_ABSENT = object()


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

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Replace ``owner.name`` by ``around(original, ...)``; a method passes its object next."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self.removed:  # the script has kept a reference, or has wrapped the wrapper
                return original(*args, **kwargs)
            return around(original, *args, **kwargs)

        self.replace(owner, name, wrapped)

    def replace(self, owner: Any, name: str, value: object) -> None:
        """Replace ``owner.name`` by a value, until removal."""
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)

        def restore() -> None:
            if vars(owner).get(name) is not value:
                return  # other code has replaced it since
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        self.on_removal(restore)

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
