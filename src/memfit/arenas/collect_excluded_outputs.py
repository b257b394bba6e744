"""Keep the outputs of excluded modules readable until the next step begins.

Names are searched for in a model: modules (``strategies/mechanisms/module_patterns.py``), parameters and
buffers. Models are referenced weakly, so that an arena keeps no model alive.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.utils import _pytree

from memfit.errors import UsageError
from memfit.strategies.mechanisms.module_patterns import COMPILED, modules_named


class ExcludedModuleOutputs(Mapping[nn.Module | str, list[Any]]):
    """What each excluded module returned in the last step, call by call: by module, and by name.

    A parameter or a buffer is found by its name, too; iterating yields modules only.
    """

    def __init__(self, modules: Iterable[nn.Module] = (), names: Iterable[str] = ()) -> None:
        self._excluded: WeakKeyDictionary[nn.Module, str | None] = WeakKeyDictionary(
            dict.fromkeys(modules, None)
        )
        self._tensors: dict[str, tuple[ref[nn.Module], str]] = {}
        self._outputs: dict[nn.Module, list[Any]] = {}
        self._names = tuple(names)
        self.has_model = not self._names
        """Whether the names were searched for in a model, if there are any."""

    def find_in(self, model: nn.Module) -> None:
        """Search a model for the names.

        Raises:
            UsageError: it has no module, parameter or buffer of a name; the message lists the nearest.
        """
        tensors = {
            ".".join(part for part in name.split(".") if part != COMPILED): name
            for name, _ in (*model.named_parameters(), *model.named_buffers())
        }
        modules = modules_named(model, [name for name in self._names if name not in tensors], "exclude")
        self._excluded.update({module: name for name, module in modules.items()})
        for name in self._names:
            if name in tensors:
                owner, _, own = tensors[name].rpartition(".")
                self._tensors[name] = ref(model.get_submodule(owner)), own
        self.has_model = True

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect the outputs of a step. Afterwards they hold no graph; after an exception there are none."""
        self.clear()
        with ExitStack() as hooks:
            for module in self._excluded:
                hooks.callback(module.register_forward_hook(self._keep).remove)
            hooks.push(self._end)
            yield

    def clear(self) -> None:
        """Release the outputs."""
        self._outputs.clear()

    def _end(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.clear()
        for outputs in self._outputs.values():
            outputs[:] = _pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)

    def _keep(self, module: nn.Module, _: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # in backward, a checkpointed block runs again
            return
        self._outputs.setdefault(module, []).append(output)

    def __getitem__(self, key: nn.Module | str) -> list[Any]:
        """Return a module's outputs, none if it was not called; or the parameter or buffer of a name."""
        if key in self._tensors:
            owner, own = self._tensors[str(key)]
            return [tensor for tensor in [getattr(owner(), own, None)] if tensor is not None]
        found = [module for module, name in self._excluded.items() if key in (module, name)]
        if not found:
            known = [name for name in self._excluded.values() if name is not None]
            raise KeyError(f"{key!r} is not excluded; by name: {', '.join([*known, *self._tensors])}")
        return [output for module in found for output in self._outputs.get(module, [])]

    def __iter__(self) -> Iterator[nn.Module | str]:
        """Yield the modules that returned something, in the order of their first calls."""
        return iter(self._outputs)

    def __len__(self) -> int:
        """Return the number of these modules."""
        return len(self._outputs)


def split_excluded_modules_and_names(
    exclude: "nn.Module | str | Iterable[nn.Module | str]",
) -> tuple[list[nn.Module], list[str]]:
    """Return the modules and the names in ``memfit.arena(exclude=...)``."""
    given = [exclude] if isinstance(exclude, nn.Module | str) else list(exclude)
    for each in given:
        if not isinstance(each, nn.Module | str):
            raise UsageError(
                f"'exclude' must be one or more modules, such as model.layer4, or names, not {each!r}."
            )
    return [each for each in given if isinstance(each, nn.Module)], [
        each for each in given if isinstance(each, str)
    ]
