"""Running something around a module's forward, and taking it back.

    module(x) -> hooks -> module.forward, a Wrapped -> around(the forward that was, x)

The module, its class and its hooks stay; so do names and ``state_dict``. Copies and pickles of the module
call their own forward, and ``inspect.signature`` sees the original's arguments.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

Forward = Callable[..., Any]


class Wrapped:
    """Stands in a module in place of its forward.

    Args:
        module: it is not kept alive: models are freed when they are deleted, not when the collector runs.
        around: ``around(forward, *args, **kwargs)`` is what a call does; plain data, so that it
            can be pickled.
        inner: the forward that stood in the module itself; None if it was its class's.
    """

    def __init__(self, module: nn.Module, around: Any, inner: Forward | None) -> None:
        self._module = weakref.ref(module)
        self.around, self.inner = around, inner

    def __reduce__(self) -> tuple[type["Wrapped"], tuple[Any, ...]]:
        """Let copies be of the module's copy."""
        return type(self), (self.module, self.around, self.inner)

    @property
    def module(self) -> nn.Module:
        """Return the module; whoever calls its forward holds it."""
        module = self._module()
        if module is None:
            raise AssertionError("a forward does not outlive its module")
        return module

    @property
    def __wrapped__(self) -> Forward:
        """Return the forward that was; ``inspect.signature`` asks it, too."""
        if self.inner is not None:
            return self.inner
        forward: Forward = type(self.module).forward.__get__(self.module)
        return forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do what is around the forward."""
        return self.around(self.__wrapped__, *args, **kwargs)


def wrap_forward(module: nn.Module, around: Any, kind: type[Wrapped] = Wrapped) -> Callable[[], None]:
    """Have ``around(forward, *args, **kwargs)`` called in place of a module's forward.

    Args:
        module: its ``forward`` becomes an attribute of the object.
        around: is best a function of a module or a frozen dataclass that is callable, so that copies work.
        kind: what stands in the module.

    Returns:
        What takes it back: wrappers are taken off in the reverse order. It does not keep the module alive.
    """
    # Straight into the dictionary: torch.compile's wrapper would hand an attribute on to what it wraps.
    wrapper = module.__dict__["forward"] = kind(module, around, module.__dict__.get("forward"))
    held = weakref.ref(module)

    def back() -> None:
        module = held()
        if module is None:
            return
        if module.__dict__["forward"] is not wrapper:
            raise AssertionError("another wrapper is still around this one")
        del module.__dict__["forward"]
        if wrapper.inner is not None:
            module.__dict__["forward"] = wrapper.inner

    return back


def wrappers(module: nn.Module) -> Iterator[Wrapped]:
    """Yield what stands around a module's forward, from the outside in."""
    forward = module.__dict__.get("forward")
    while isinstance(forward, Wrapped):
        yield forward
        forward = forward.inner
