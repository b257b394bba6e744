"""Have ``torch.save`` write the models that a script saves whole without their plan.

A pickled model has its ``__dict__``, and a plan's forward in it: the file would load only where memfit is
installed, and ``torch.load`` would refuse it with ``weights_only``.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch

_SAVE = Patch("torch", "save", why="save whole models without their plan")


def save_models_without_plan() -> None:
    """Change ``torch.save`` for the rest of the process; torch has been imported."""
    InstalledHooks().wrap(_SAVE, "save", _save)


def _save(original: Callable[..., Any], saved: Any, *args: Any, **kwargs: Any) -> Any:
    from memfit.strategies.mechanisms.wrap_forward import forward_wrappers

    with ExitStack() as afterwards:
        for module in _modules(saved):
            *_, innermost = (None, *forward_wrappers(module))
            if innermost is not None:
                attributes, planned = module.__dict__, module.__dict__.pop("forward")
                if innermost.inner is not None:
                    attributes["forward"] = innermost.inner
                afterwards.callback(attributes.__setitem__, "forward", planned)
        return original(saved, *args, **kwargs)


def _modules(saved: Any) -> Iterator[Any]:
    """Yield the modules in what is saved: a model, or containers of models."""
    from torch import nn
    from torch.utils._pytree import tree_leaves

    seen = (each for each in tree_leaves(saved) if isinstance(each, nn.Module))
    yield from {part: None for module in seen for part in module.modules()}
