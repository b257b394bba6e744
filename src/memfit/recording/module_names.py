"""Names of modules: their paths in ``named_modules`` of the outermost module, without wrappers."""

import weakref
from collections.abc import Iterator, MutableMapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch
from memfit.records import EventLabel, TensorInfo

_MODULE = Patch("torch.nn.modules.module:Module", "__setstate__", why="name the modules of copied models")

_WRAPPED = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Attributes in which wrappers keep the module that they wrap; a wrapper and its module share one name.

Source: ``OptimizedModule`` in torch/_dynamo/eval_frame.py, ``clean_tensor_name`` in
torch/distributed/fsdp/_common_utils.py, PyTorch 2.14.1.
"""

_Place = tuple["weakref.ref[Any]", str]
"""A parent, and the name of the module in it."""


def path_without_wrappers(path: str) -> str:
    """Return the dotted path of a module or tensor without the parts that wrappers add.

    >>> path_without_wrappers("_orig_mod.blocks.0._checkpoint_wrapped_module.fc.weight")
    'blocks.0.fc.weight'
    """
    return ".".join(part for part in path.split(".") if part not in _WRAPPED)


def called_module(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that a ``DataParallel`` over one GPU, or none, calls; any other module unchanged.

    Source: ``DataParallel.forward`` in torch/nn/parallel/data_parallel.py, PyTorch 2.14.1.
    """
    if not isinstance(module, torch.nn.DataParallel) or len(getattr(module, "device_ids", ())) > 1:
        return module
    inside = module._modules.get("module")
    return module if inside is None else called_module(inside)


class ModuleNames:
    """Dotted names of modules, as in ``named_modules`` of their outermost parent.

    Parents are learnt when a module is registered, copied or unpickled, and otherwise when an unknown module
    is first called. Nothing is kept alive.
    """

    def __init__(self) -> None:
        self._places: MutableMapping[Any, tuple[_Place, ...]] = WeakIdKeyDictionary()
        self.learnt = 0
        """How often a module was registered or copied, or found in another."""

    def follow(self, hooks: InstalledHooks) -> None:
        """Learn each module that is registered, copied or unpickled from now on."""
        hooks.add(register_module_module_registration_hook(self.learn))
        hooks.add(register_module_parameter_registration_hook(self._learn_layer))
        hooks.call_after(_MODULE, "__setstate__", self.learn_copy)

    def learn(self, parent: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
        """Record that ``parent.name`` is ``child``. Of several such places, see ``_parent``."""
        self.learnt += 1
        if child is not None:
            living = (place for place in self._places.get(child, ()) if place[0]() is not None)
            self._places[child] = (*living, (weakref.ref(parent), name))

    def _learn_layer(self, layer: torch.nn.Module, *_: Any) -> None:
        """Record a module without children: it may be a whole model."""
        if not layer._modules:
            self._places.setdefault(layer, ())

    def adopt(self, root: torch.nn.Module) -> None:
        """Learn a whole tree whose registrations were not seen."""
        self._places.setdefault(root, ())
        for parent in root.modules():
            for name, child in parent._modules.items():  # children() skips shared modules
                if child is not None and child not in self._places:
                    self.learn(parent, name, child)

    def learn_copy(self, parent: torch.nn.Module) -> None:
        """Learn a module that was just copied or unpickled, after its children."""
        self.learnt += 1
        self._places[parent] = ()
        for name, child in getattr(parent, "_modules", {}).items():
            self.learn(parent, name, child)

    def outermost(self) -> set[torch.nn.Module]:
        """Return the known live modules that have no parent."""
        parents = (parent() for places in self._places.values() for parent, _ in places)
        known = {*self._places, *parents} - {None}
        return {
            module for module in known if self._parent(module)[0] is None and called_module(module) is module
        }

    def full_name(self, module: torch.nn.Module) -> str:
        """Return the outermost parent's class and the dotted path below it: ``GPT.blocks.0.mlp``."""
        if module not in self._places:
            self.adopt(module)
        names: list[str] = []
        seen: set[int] = set()
        while id(module) not in seen:
            seen.add(id(module))
            parent, name = self._parent(module)
            if parent is None:
                break
            if name not in _WRAPPED:
                names.append(name)
            module = parent
        return ".".join([type(_unwrapped(module)).__name__, *reversed(names)])

    def _parent(self, module: torch.nn.Module) -> tuple[Any, str]:
        """Return the parent of a module, or None, and the name of the module in it.

        Of several parents, the last that has a parent itself, otherwise the last: a slice of a ModuleList is
        a new list, which holds the same layers and belongs to no model.
        """
        parents = list(self._parents(module))
        attached = [each for each in parents if next(self._parents(each[0]), None) is not None]
        return (attached or parents or [(None, "")])[-1]

    def _parents(self, module: torch.nn.Module) -> Iterator[tuple[Any, str]]:
        """Yield the modules that a module is registered in, and its name in each."""
        for ref, name in self._places.get(module, ()):
            parent = ref()
            children = getattr(parent, "_modules", {})
            held = name in children and children[name] is module
            if parent is not None and held and called_module(parent) is parent:
                yield parent, name


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that a wrapper wraps; any other module unchanged."""
    children = module._modules  # not a dict for TorchScript modules: it has no get()
    wrapped = next((children[name] for name in _WRAPPED if name in children), None)
    return module if wrapped is None else _unwrapped(wrapped)


_Named = TypeVar("_Named", EventLabel, TensorInfo)


def shorten_module_names(
    labels: tuple[EventLabel, ...], tensors: tuple[TensorInfo, ...] = ()
) -> tuple[tuple[EventLabel, ...], tuple[TensorInfo, ...]]:
    """Drop the class of the outermost module from all module names if all dotted names share it.

    >>> from memfit.records import Phase
    >>> [label.module for label in shorten_module_names((EventLabel(Phase.FORWARD, "GPT.head", "", -1),))[0]]
    ['head']
    """
    modules = [label.module for label in labels] + [tensor.module for tensor in tensors]
    roots = {module.partition(".")[0] for module in modules if "." in module}
    if len(roots) != 1:
        return labels, tensors
    prefix = f"{roots.pop()}."

    def shortened(named: tuple[_Named, ...]) -> tuple[_Named, ...]:
        return tuple(replace(each, module=each.module.removeprefix(prefix)) for each in named)

    return shortened(labels), shortened(tensors)
