"""Do something as soon as a module has been imported, by whomever."""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence


def after_import(name: str, action: Callable[[], None]) -> Callable[[], None]:
    """Call a function once a module has been imported: now, if it has been.

    Returns:
        What gives up waiting.
    """
    finder = AfterImport(name, action)
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, finder)
    return finder.give_up


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function once a module has been imported, and leaves the import itself alone."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name = name
        self._action = action

    def give_up(self) -> None:
        """Wait no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module as everyone else would, and hang the action on its loader."""
        if fullname != self._name:
            return None
        # Those behind it: one before it may be of its kind, and would ask it in turn.
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_then_act(module: types.ModuleType) -> None:
                # Not when it is found: many programs look whether a module is there and go on.
                self.give_up()
                execute(module)
                self._action()

            spec.loader.exec_module = execute_then_act  # type: ignore[method-assign]
        return spec
