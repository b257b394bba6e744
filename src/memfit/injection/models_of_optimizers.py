"""The models that each optimizer of a script takes, as they are when the optimizer is created."""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memfit.patching.patches import Patch
from memfit.user_lines import innermost_line_of_place, innermost_user_line

if TYPE_CHECKING:
    from memfit.patching.installed_hooks import InstalledHooks

_OPTIMIZER = Patch("torch.optim.optimizer:Optimizer", "__init__", why="find the models that a script trains")


@dataclass(frozen=True, slots=True)
class _OptimizedModel:
    """A model of an optimizer."""

    optimizer: int
    """Which, counted from 0 as they are created."""
    model: weakref.ref[Any]
    line: str
    """The line that creates the optimizer."""


class ModelsOfOptimizers:
    """Learns the names of modules, and which are the outermost of those that an optimizer takes."""

    def __init__(self) -> None:
        from memfit.recording.module_names import ModuleNames

        self.names = ModuleNames()
        self.found: list[_OptimizedModel] = []
        self.all: list[weakref.ref[Any]] = []
        """Every optimizer that has been created."""
        self.on_found: Callable[[Any], None] = lambda _: None
        """Called with each model that an optimizer takes."""
        self._learnt = 0  # of the names, when the last optimizer was created

    @property
    def are_final(self) -> bool:
        """Whether no module was put into another, or copied, since the last optimizer was created."""
        return self.names.learnt == self._learnt

    def note_optimizers(self, hooks: "InstalledHooks") -> None:
        """Hook the creation of optimizers."""
        hooks.wrap(_OPTIMIZER, "__init__", self._optimized)

    def is_model(self, called: Any) -> bool:
        """Whether a module that the script calls is a whole model."""
        from memfit.recording.module_names import called_module

        return called_module(called) in self.names.outermost()

    def taken_by(self, parameters: Iterable[Any]) -> list[Any]:
        """Return the outermost models that have one of some parameters, in the order of their names."""
        ids = set(map(id, parameters))
        found = [each for each in self.names.outermost() if any(id(one) in ids for one in each.parameters())]
        return sorted(found, key=self.names.full_name)

    def _optimized(
        self, original: Callable[..., None], optimizer: Any, params: Any, *args: Any, **kwargs: Any
    ) -> None:
        entries = optimizer_parameters_as_lists(params)
        line = innermost_line_of_place(innermost_user_line(sys._getframe(2)))
        models = self.taken_by(parameters_in_optimizer_lists(entries))
        self.found += [_OptimizedModel(len(self.all), weakref.ref(model), line) for model in models]
        for model in models:
            self.on_found(model)
        self.all.append(weakref.ref(optimizer))
        self._learnt = self.names.learnt
        original(optimizer, entries, *args, **kwargs)


def optimizer_parameters_as_lists(parameters: Any) -> list[Any]:
    """Return what an optimizer is given as lists: of parameters, of named ones, or of groups of them."""
    import torch

    entries = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    for entry in entries:
        if isinstance(entry, dict):
            entry["params"] = optimizer_parameters_as_lists(entry["params"])
    return entries


def parameters_in_optimizer_lists(entries: Iterable[Any]) -> Iterator[Any]:
    """Yield the parameters in what ``optimizer_parameters_as_lists`` returned."""
    for entry in entries:
        if isinstance(entry, dict):
            yield from parameters_in_optimizer_lists(entry["params"])
        else:
            yield entry[1] if isinstance(entry, tuple) else entry
