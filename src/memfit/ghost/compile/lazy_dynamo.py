"""Import ``torch._dynamo`` only when something uses it.

PyTorch's optimizers and checkpoints import Dynamo to tell it where a compiled graph must end, and to keep it
out of their own code. Both mean something only to code that is being compiled, but the import takes 1.2 s: a
third of the dry run of a small script, and half of each run of a plan that checkpoints. Here, the import
statement makes the module without its contents. It answers these two uses itself, and imports its settings, a
module that needs no other, alone. Any other use fills it.

Until then, as many Python objects as the module would hold take its place, and reference cycles are collected
once. Python collects them, and the tensors that they hold, when a quarter of all objects are new: the import
makes that many, and with fewer objects, the next collection would be earlier than without memfit.

Source: ``_use_grad_for_differentiable`` in torch/optim/optimizer.py, ``_disable_dynamo`` in torch/_compile.py
and ``_recomputation_hook`` in torch/utils/checkpoint.py, PyTorch 2.14.1; ``gc_collect_generations`` in
Modules/gcmodule.c, Python 3.11.
"""

import gc
import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_NAME = "torch._dynamo"
_CONFIG = f"{_NAME}.config"
_CHECKPOINT = "torch.utils.checkpoint"
"""Has Dynamo disabled in functions that it makes for one recomputation each."""
_CALLED_INSTEAD = "__dynamo_disable"
"""The attribute in which ``_disable_dynamo`` keeps what it calls instead of a function."""
_OBJECTS = 96_000
"""The objects that the import adds to ``gc.get_objects()`` on the ghost with PyTorch 2.14.1. Without
memfit, the import adds 134,668; memfit itself imports some of what Dynamo does."""


def import_dynamo_lazily() -> None:
    """Make the import lazy, unless it has already happened.

    Call it after every ``call_after_import`` of Dynamo or a module in it: their functions are then called
    when the module is filled.
    """
    if _NAME not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _LazyModule(ModuleType):
    """``torch._dynamo`` without its contents, until an attribute is asked for that it does not have."""

    def __init__(self, name: str, execute: Callable[[ModuleType], None]) -> None:
        super().__init__(name)
        self._execute = execute
        self._filling = threading.RLock()
        self._undecorated: list[Any] = []
        self._objects = _stand_ins()
        gc.collect()

    def __getattr__(self, name: str) -> Any:
        if name == "config":
            return importlib.import_module(_CONFIG)
        if not name.startswith("__"):  # the import system asks for some of these before they are set
            self.fill()
        try:
            return vars(self)[name]
        except KeyError:
            raise AttributeError(f"module {_NAME!r} has no attribute {name!r}") from None

    def graph_break(self, msg: str = "") -> None:
        """Do nothing: there is no graph."""

    def disable(self, fn: Any = None, recursive: bool = True, *, wrapping: bool = True, **rest: Any) -> Any:
        """Return a function of PyTorch's own as it is, until there is a Dynamo to keep out of it."""
        if wrapping and getattr(fn, "__module__", "") != _CHECKPOINT:  # the caller is not PyTorch's own
            self.fill()
            return vars(self)["disable"](fn, recursive, wrapping=wrapping, **rest)
        if not wrapping:
            self._undecorated.append(fn)
        return fn

    def fill(self) -> None:
        """Run the import, unless it has begun in this thread; wait for another thread that runs it."""
        with self._filling:
            execute = vars(self).pop("_execute", None)
            if execute is not None:
                self._objects.clear()
                execute(self)
                for function in self._undecorated:
                    vars(function).pop(_CALLED_INSTEAD, None)
                self.__class__ = ModuleType  # type: ignore[assignment]


def _stand_ins() -> list[list[object]]:
    """Return as many objects as the module would hold, made without a collection of Python's in between.

    No setting can take their place: ``gc.freeze`` hides objects from the count, and thresholds do not change
    that a quarter of all objects must be new. Made with collections, they would take 90 ms instead of 5 ms.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return [[] for _ in range(_OBJECTS)]
    finally:
        if was_enabled:
            gc.enable()


class _Finder(MetaPathFinder):
    """Finds ``torch._dynamo`` as a lazy module, and fills it before any module in it, but its settings."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == _NAME:
            return self._find_lazy(path, target)
        package = sys.modules.get(_NAME)
        inside = fullname.startswith(f"{_NAME}.") and fullname != _CONFIG
        if inside and isinstance(package, _LazyModule):
            package.fill()
            if (module := sys.modules.get(fullname)) is not None:
                return _Imported(module).spec()
        return None

    def _find_lazy(self, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(_NAME, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            spec.loader.create_module = lambda spec: _LazyModule(spec.name, execute)  # type: ignore[method-assign]
            spec.loader.exec_module = _leave_empty  # type: ignore[method-assign]
        return spec


def _leave_empty(module: ModuleType) -> None:
    """Run no code: ``fill`` will."""


class _Imported(Loader):
    """Loads a module that was imported while it was being looked for: Python would run its code again."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def spec(self) -> ModuleSpec:
        """Return a spec with this loader, also as the module's own, which Python prefers to it."""
        spec = self._module.__spec__ = ModuleSpec(self._module.__name__, self)
        return spec

    def create_module(self, _spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
