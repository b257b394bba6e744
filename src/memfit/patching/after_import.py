"""Run a function as soon as a module has been imported."""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence


def call_after_import(name: str, action: Callable[[], object]) -> Callable[[], None]:
    """Call a function once a module has been imported; at once if it already has been.

    Returns:
        A function that cancels the call.
    """
    finder = AfterImport(name, action)
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, finder)
    return finder.cancel


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function once a module has been imported, without changing the import itself."""

    def __init__(self, name: str, action: Callable[[], object]) -> None:
        self._name = name
        self._action = action

    def cancel(self) -> None:
        """Stop waiting for the import."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module with the other finders, and have its loader run the action."""
        if fullname != self._name:
            return None
        # Only the finders after this one: another AfterImport before it would ask this one in turn.
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_then_act(module: types.ModuleType) -> None:
                # Not in find_spec: many programs only check whether a module exists.
                self.cancel()
                execute(module)
                self._action()

            spec.loader.exec_module = execute_then_act  # type: ignore[method-assign]
        return spec
