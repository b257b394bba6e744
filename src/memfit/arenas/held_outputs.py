"""Keep the outputs of chosen modules until the step ends."""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from torch import nn

from memfit.errors import UsageError


class HeldOutputs:
    """Context manager that keeps what some modules return, so that it can be read until the step ends."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = tuple(modules)
        for module in self._modules:
            if not isinstance(module, nn.Module):
                raise UsageError(
                    f"'exclude' must be one or more modules, such as model.layer4, not {module!r}."
                )
        self.outputs: dict[nn.Module, list[Any]] = {}
        self._hooks = ExitStack()

    def __enter__(self) -> None:
        for module in self._modules:
            self._hooks.callback(module.register_forward_hook(self._keep).remove)

    def __exit__(self, *_: object) -> None:
        self._hooks.close()
        self.outputs.clear()

    def _keep(self, module: nn.Module, _: Any, output: Any) -> None:
        self.outputs.setdefault(module, []).append(output)
