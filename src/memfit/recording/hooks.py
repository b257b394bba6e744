"""What memfit has put into PyTorch: taken out again for good, or for as long as compiled code runs.

``torch.compile`` reads those tables: it traces what it finds into the user's graph, and guards on their
length. So while a compiled region runs, or is being compiled, memfit's own hooks are not there, and what
is compiled is what would be compiled without memfit. They are lifted for every thread at once, because
the tables are.
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


class LiftedHooks:
    """The hooks of this process that can be lifted, and what else has to go when they go for good."""

    def __init__(self) -> None:
        self._laid: list[tuple[_Table, int, Any]] = []  # (table, key in it, what stands there)
        self._regions = 0
        self._lock = threading.Lock()
        self._undo: list[Callable[[], None]] = []
        self.removed = False
        """Whether they are gone for good."""

    def add(self, handle: "RemovableHandle") -> None:
        """Lift the hook of a handle, too, from now on; every table that it stands in."""
        for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
            table = reference()
            if table is not None:
                self._laid.append((table, handle.id, table[handle.id]))
        self.on_removal(handle.remove)

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Replace ``owner.name`` by ``around(original, ...)``; a method passes its object next."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self.removed:  # somebody has kept it, or wrapped it in turn
                return original(*args, **kwargs)
            return around(original, *args, **kwargs)

        self.replace(owner, name, wrapped)

    def replace(self, owner: Any, name: str, value: object) -> None:
        """Put something else at ``owner.name``."""
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)

        def put_back() -> None:
            if vars(owner).get(name) is not value:
                return  # somebody has put something of theirs there since
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        self.on_removal(put_back)

    def on_removal(self, action: Callable[[], None]) -> None:
        """Have something done when all is removed; what came last is done first."""
        self._undo.append(action)

    def remove(self) -> None:
        """Take everything out, for good."""
        self.removed = True
        with self._lock:
            self._laid.clear()
        while self._undo:
            self._undo.pop()()

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
