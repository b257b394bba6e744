"""A script under strategies it does not know of: ``python -m memfit.strategies.inject_plan CHANGE SCRIPT``.

It is run as ``memfit dry-run`` would run it, in silence. Models get the plan when an optimizer takes their
parameters, as if ``memfit.apply`` stood in the script just before; not parts of models, for a script has no
name for those, whichever of them it calls.
"""

import functools
import inspect
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from memfit.errors import UsageError
from memfit.ghost.patching.after_import import after_import
from memfit.run.script import run_as_main

if TYPE_CHECKING:
    from memfit.recording.hooks import InstalledHooks


class Intervention(msgspec.Struct, frozen=True):
    """What to do to a script: travels as JSON on the command line, before the script's own."""

    module: bool
    """Whether the script is a module, as after ``python -m``."""
    strategies: tuple[str, ...]
    """Fields of a ``Plan``, each with its default settings."""
    fused: bool
    """Optimizers are made with ``fused=True`` where the script does not say which kind it wants."""
    models: str
    """File to which the class of each model that gets the plan is written, a line each."""


def main() -> None:
    """Run the script that the command line names."""
    _, change, *command = sys.argv
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # who answered the script's questions once is not asked again
        os.dup2(silence, stream)
    read = msgspec.json.decode(change, type=Intervention)
    after_import("torch", functools.partial(_intervene, read))
    run_as_main(tuple(command), module=read.module)


def _intervene(change: Intervention) -> None:
    import torch

    from memfit.recording.hooks import InstalledHooks

    hooks = InstalledHooks()
    if change.strategies:
        _Planning(change).install(hooks)
    if change.fused:
        for kind in vars(torch.optim).values():
            if isinstance(kind, type) and "fused" in inspect.signature(kind).parameters:
                hooks.wrap(kind, "__init__", _fused)


class _Planning:
    """Applies a plan to each model whose parameters an optimizer takes, until the script itself has one."""

    def __init__(self, change: Intervention) -> None:
        from memfit.recording.module_names import ModuleNames

        self._plan = dict.fromkeys(change.strategies, True)
        self._report = Path(change.models)
        self._names = ModuleNames()
        self._planned: list[tuple[weakref.ref[Any], str]] = []

    def install(self, hooks: "InstalledHooks") -> None:
        """Learn of modules and optimizers as they are made, and of plans."""
        import torch
        from torch.nn.modules.module import register_module_module_registration_hook

        from memfit.strategies import apply

        hooks.add(register_module_module_registration_hook(self._names.learn))
        hooks.wrap(torch.nn.Module, "__setstate__", self._copied)
        hooks.wrap(torch.optim.Optimizer, "__init__", self._optimized)
        hooks.wrap(apply, "apply_to_model", self._applied)

    def _copied(self, original: Callable[..., None], module: Any, state: Any) -> None:
        original(module, state)
        self._names.learn_copy(module)

    def _optimized(self, original: Callable[..., None], optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        trained = {id(one) for group in optimizer.param_groups for one in group["params"]}
        for model in sorted(self._names.outermost(), key=self._names.full_name):
            if any(id(one) in trained for one in model.parameters()):
                self._apply(model)

    def _apply(self, model: Any) -> None:
        from memfit.strategies.apply import apply

        try:
            apply(model, self._plan)
        except UsageError:
            return  # it has one, or it does not suit; if none gets it, the run is like the first
        self._tell([*self._planned, (weakref.ref(model), self._names.full_name(model))])

    def _applied(self, original: Callable[..., Any], model: Any, plan: Any) -> Any:
        from memfit.strategies.apply import revert

        for entry in list(self._planned):
            ours = entry[0]()
            if ours is not None and model in set(ours.modules()):  # the script has a plan of its own for it
                revert(ours)
                self._tell([one for one in self._planned if one is not entry])
        return original(model, plan)

    def _tell(self, planned: list[tuple[weakref.ref[Any], str]]) -> None:
        self._planned = planned
        self._report.write_text("".join(f"{name}\n" for _, name in planned))


def _fused(original: Callable[..., None], optimizer: Any, *args: Any, **kwargs: Any) -> None:
    if kwargs.get("fused") is None and kwargs.get("foreach") is None:
        kwargs["fused"] = True
    original(optimizer, *args, **kwargs)


if __name__ == "__main__":
    main()
