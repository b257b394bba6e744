"""A script under strategies it does not know of: ``python -m memfit.strategies.unattended CHANGE SCRIPT``.

It is run as ``memfit dry-run`` would run it, in silence. A model gets the plan when it is first called for
training, as if ``memfit.apply`` stood in the script once the model is made.
"""

import functools
import inspect
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

import msgspec

from memfit.capture.script import run_as_main
from memfit.errors import UsageError
from memfit.ghost.after_import import after_import


class Intervention(msgspec.Struct, frozen=True):
    """What to do to a script: travels as JSON on the command line, before the script's own."""

    module: bool
    """Whether the script is a module, as after ``python -m``."""
    strategies: tuple[str, ...]
    """Fields of a ``Plan``, each with its default settings."""
    fused: bool
    """Optimizers are made with ``fused=True`` where the script does not say which kind it wants."""


def main() -> None:
    """Run the script that the command line names."""
    _, change, *command = sys.argv
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silence, stream)
    read = msgspec.json.decode(change, type=Intervention)
    after_import("torch", functools.partial(_intervene, read))
    run_as_main(tuple(command), module=read.module)


def _intervene(change: Intervention) -> None:
    import torch

    from memfit.capture.lifted import LiftedHooks

    hooks = LiftedHooks()
    if change.strategies:
        hooks.wrap(torch.nn.Module, "__call__", _Planning(change.strategies))
    if change.fused:
        for kind in vars(torch.optim).values():
            if isinstance(kind, type) and "fused" in inspect.signature(kind).parameters:
                hooks.wrap(kind, "__init__", _fused)


class _Planning:
    """Applies a plan to each model that is called for training, before the call."""

    def __init__(self, strategies: tuple[str, ...]) -> None:
        self._plan = dict.fromkeys(strategies, True)
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __call__(self, original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        if torch.is_grad_enabled() and module not in self._seen:
            self._seen.update(module.modules())
            if any(True for _ in module.parameters()):
                self._apply(module)
        return original(module, *args, **kwargs)

    def _apply(self, model: Any) -> None:
        from memfit.strategies.apply import apply

        try:
            apply(model, self._plan)
        except UsageError:
            return  # it does not suit this model; another may follow, and a run like the first is no advice


def _fused(original: Callable[..., None], optimizer: Any, *args: Any, **kwargs: Any) -> None:
    if kwargs.get("fused") is None and kwargs.get("foreach") is None:
        kwargs["fused"] = True
    original(optimizer, *args, **kwargs)


if __name__ == "__main__":
    main()
