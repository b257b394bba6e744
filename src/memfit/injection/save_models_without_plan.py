"""Have ``torch.save`` write the models that a script saves whole without their plan.

A pickled model has its ``__dict__``, and a plan's forward in it: the file would load only where memfit is
installed, and ``torch.load`` would refuse it with ``weights_only``.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch

_SAVE = Patch("torch", "save", why="save whole models without their plan")


def save_models_without_plan() -> None:
    """Change ``torch.save`` for the rest of the process; torch has been imported."""
    InstalledHooks().wrap(_SAVE, "save", _save)


def _save(original: Callable[..., Any], saved: Any, *args: Any, **kwargs: Any) -> Any:
    from torch import nn
    from torch.utils._pytree import tree_leaves

    from memfit.strategies.mechanisms.wrap_forward import remove_wrappers

    with ExitStack() as afterwards:  # what is saved: a model, or containers of models
        for model in tree_leaves(saved):
            if isinstance(model, nn.Module):
                afterwards.callback(remove_wrappers(model))
        return original(saved, *args, **kwargs)
