"""Running something around a module's forward, and taking it back.

    module(x) -> hooks -> module.forward = partial(around, the forward that was) -> the forward that was

The module, its class and its hooks stay; so do names and ``state_dict``. Copies of the module (``deepcopy``)
call their own forward, and ``inspect.signature`` sees the original's arguments.
"""

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

from torch import nn


def wrap_forward(module: nn.Module, around: Callable[..., Any]) -> Callable[[], None]:
    """Have ``around(forward, *args, **kwargs)`` called in place of a module's forward.

    Args:
        module: its ``forward`` becomes an attribute of the object.
        around: is best a function of a module or a frozen dataclass that is callable, so that copies work.

    Returns:
        What takes it back: wrappers are taken off in the reverse order.
    """
    own = module.__dict__.get("forward")
    module.forward = update_wrapper(partial(around, module.forward), module.forward)

    def back() -> None:
        if own is None:
            del module.forward
        else:
            module.forward = own

    return back
