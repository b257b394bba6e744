"""What modules are called, as `named_modules` of the outermost one that holds them spells it."""

import weakref
from dataclasses import replace
from typing import Any, TypeVar

import torch

from memfit.records import Label, Tensor

_COMPILED = "_orig_mod"
"""Where ``torch.compile(module)`` keeps the module that it wraps: both go by one name."""


class ModuleNames:
    """Dotted names of modules, as ``named_modules`` of their outermost parent spells them.

    Parents are learnt when a module is registered, copied or unpickled and, for modules that came another
    way, when an unknown one is first called. Nothing is kept alive.
    """

    def __init__(self) -> None:
        self._parents: dict[int, tuple[weakref.ref[Any], weakref.ref[Any] | None, str]] = {}

    def learn(self, parent: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
        """Record that ``parent.name`` is ``child``; the last parent that took a shared child names it."""
        if child is not None:
            self._parents[id(child)] = (weakref.ref(child), weakref.ref(parent), name)

    def adopt(self, root: torch.nn.Module) -> None:
        """Learn a whole tree whose registrations were not seen."""
        self._parents.setdefault(id(root), (weakref.ref(root), None, ""))
        for parent in root.modules():
            for name, child in parent._modules.items():  # children() skips shared modules
                if child is not None and not self._knows(child):
                    self.learn(parent, name, child)

    def learn_copy(self, parent: torch.nn.Module) -> None:
        """Learn a module that was copied or unpickled just now, as those in it have been before it."""
        self._parents[id(parent)] = (weakref.ref(parent), None, "")
        for name, child in getattr(parent, "_modules", {}).items():
            self.learn(parent, name, child)

    def outermost(self) -> set[torch.nn.Module]:
        """Return the living modules that no other holds, as far as they are known."""
        found = {child() if parent is None else parent() for child, parent, _ in self._parents.values()}
        return {one for one in found if one is not None and self._parent(one)[0] is None}

    def full_name(self, module: torch.nn.Module) -> str:
        """Return the outermost parent's class and the dotted path below it: ``GPT.blocks.0.mlp``."""
        if not self._knows(module):
            self.adopt(module)
        names: list[str] = []
        seen: set[int] = set()
        while id(module) not in seen:
            seen.add(id(module))
            parent, name = self._parent(module)
            if parent is None:
                break
            if name != _COMPILED:
                names.append(name)
            module = parent
        inner = module._modules
        if _COMPILED in inner:  # TorchScript's modules are in no dictionary, and there is no get
            module = inner[_COMPILED] or module
        return ".".join([type(module).__name__, *reversed(names)])

    def _parent(self, module: torch.nn.Module) -> tuple[torch.nn.Module | None, str]:
        """Return the module that holds a module, as far as is known, and what it calls it."""
        if not self._knows(module):  # another may have been where it lies, and is gone
            return None, ""
        _, parent, name = self._parents[id(module)]
        return (parent() if parent is not None else None), name

    def _knows(self, module: torch.nn.Module) -> bool:
        entry = self._parents.get(id(module))
        return entry is not None and entry[0]() is module


_Named = TypeVar("_Named", Label, Tensor)


def short_names(
    labels: tuple[Label, ...], tensors: tuple[Tensor, ...] = ()
) -> tuple[tuple[Label, ...], tuple[Tensor, ...]]:
    """Drop the outermost class from modules' names where all that have a path below one share it.

    >>> [label.module for label in short_names((Label(Phase.FORWARD, "GPT.head", "", -1),))[0]]
    ['head']
    """
    modules = [label.module for label in labels] + [tensor.module for tensor in tensors]
    roots = {module.partition(".")[0] for module in modules if "." in module}
    if len(roots) != 1:
        return labels, tensors
    prefix = f"{roots.pop()}."

    def shortened(named: tuple[_Named, ...]) -> tuple[_Named, ...]:
        return tuple(replace(one, module=one.module.removeprefix(prefix)) for one in named)

    return shortened(labels), shortened(tensors)
