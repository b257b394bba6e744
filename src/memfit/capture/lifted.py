"""Hooks in PyTorch's global tables that are out of sight while compiled code runs.

``torch.compile`` reads those tables: it traces what it finds into the user's graph, and guards on their
length. So while a compiled region runs, or is being compiled, memfit's own hooks are not there, and what
is compiled is what would be compiled without memfit. They are lifted for every thread at once, because
the tables are.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

_Table = OrderedDict[int, Any]


class LiftedHooks:
    """The hooks of this process that can be lifted."""

    def __init__(self) -> None:
        self._laid: list[tuple[_Table, int, Any]] = []  # (table, key in it, what stands there)
        self._regions = 0
        self._lock = threading.Lock()

    def add(self, handle: "RemovableHandle") -> None:
        """Lift the hook of a handle, too, from now on; every table that it stands in."""
        for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
            table = reference()
            if table is not None:
                self._laid.append((table, handle.id, table[handle.id]))

    @property
    def lifted(self) -> bool:
        """Whether they are lifted now."""
        return self._regions > 0

    def lift(self) -> None:
        """Take the hooks out of their tables, until as many calls of ``lay``."""
        with self._lock:
            self._regions += 1
            if self._regions == 1:
                for table, key, _ in self._laid:
                    table.pop(key, None)

    def lay(self) -> None:
        """Put the hooks back where they were: before those of the script."""
        with self._lock:
            self._regions -= 1
            if self._regions == 0:
                for table, key, hook in reversed(self._laid):
                    table[key] = hook
                    table.move_to_end(key, last=False)

    @contextmanager
    def out_of_sight(self) -> Iterator[None]:
        """Lift the hooks within."""
        self.lift()
        try:
            yield
        finally:
            self.lay()
