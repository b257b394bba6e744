"""Models whose layers a script calls, but never the model, where a part of the plan acts."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memfit.strategies.mechanisms.module_patterns import class_name


class UncalledModels:
    """Watches which models the script calls."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._names: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """The classes of models whose layers the script has called, but never the model."""
        return tuple(sorted(self._names))

    def watch(self, model: nn.Module) -> None:
        """List a model from the first call of a layer of it until the script calls the model."""
        name = class_name(model).removeprefix("FSDP")
        layers = [each for each in model.modules() if each is not model]

        def called(*_: Any) -> None:
            if torch.compiler.is_compiling():  # which traces hooks
                return
            while hooks:
                hooks.pop().remove()
            self._names.discard(name)
            self._on_change()

        def layer_called(*_: Any) -> None:
            if torch.compiler.is_compiling():
                return
            if hooks and torch.is_grad_enabled() and name not in self._names:  # a copy has them, too
                self._names.add(name)
                self._on_change()

        hooks = [each.register_forward_pre_hook(layer_called) for each in layers]
        hooks.append(model.register_forward_pre_hook(called, prepend=True))
