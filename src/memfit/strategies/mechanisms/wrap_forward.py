"""Wrap a module's forward, and unwrap it.

    module(x) -> hooks -> module.forward, a WrappedForward -> around(original forward, x)

The module, its class, hooks, names and ``state_dict`` stay. Copies and pickles of the module call their own
forward, and ``inspect.signature`` sees the original's arguments.
"""

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn

from memfit.errors import UsageError

Forward = Callable[..., Any]


class NotScriptableError(UsageError, AttributeError):
    """What a wrapper does cannot be scripted; other readers of ``__globals__`` find that there are none."""


class WrappedForward:
    """Takes the place of a module's forward.

    Args:
        module: held weakly: a model is freed when it is deleted, not when the garbage collector runs.
        around: a call runs ``around(forward, *args, **kwargs)``, or uses it as a subclass defines; plain
            data, so that it can be pickled.
        inner: the forward that the module's ``__dict__`` had; None if it was its class's.
    """

    def __init__(self, module: nn.Module, around: Any, inner: Forward | None) -> None:
        self._module = weakref.ref(module)
        self.around, self.inner = around, inner

    def __reduce__(self) -> tuple[type["WrappedForward"], tuple[Any, ...]]:
        """Bind copies to the module's copy."""
        return type(self), (self.module, self.around, self.inner)

    @property
    def module(self) -> nn.Module:
        """Return the module; the caller of its forward holds it."""
        module = self._module()
        if module is None:
            raise AssertionError("this forward has outlived its module")
        return module

    @property
    def __wrapped__(self) -> Forward:
        """Return the original forward; ``inspect.signature`` reads it too."""
        if self.inner is not None:
            return self.inner
        return partial(type(self.module).forward, self.module)  # which every version of torch.compile traces

    @property
    def __globals__(self) -> dict[str, Any]:
        """Refuse ``torch.jit.script``, which reads it to script the forward without the wrapper."""
        raise NotScriptableError(
            f"torch.jit.script of a {type(self.module).__name__}, whose forward memfit has wrapped to carry "
            "out the plan: TorchScript would call the forward alone. Leave out torch.jit.script, or what the "
            "plan does in forwards (slices, mixed precision, checkpointing, offload, sharding)."
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``around`` with the original forward."""
        return self.around(self.__wrapped__, *args, **kwargs)


def wrap_forward(
    module: nn.Module, around: Any, kind: type[WrappedForward] = WrappedForward
) -> Callable[[], None]:
    """Have calls of a module's forward run ``around(forward, *args, **kwargs)`` instead.

    Args:
        module: its ``forward`` becomes an attribute of the object.
        around: best a module-level function or a callable frozen dataclass, so that copies work.
        kind: the class of the wrapper.

    Returns:
        A function that removes the wrapper; wrappers are removed in reverse order. It does not keep the
        module alive.
    """
    # Set in __dict__: torch.compile's wrapper would pass an attribute on to the module inside.
    wrapper = module.__dict__["forward"] = kind(module, around, module.__dict__.get("forward"))
    reference = weakref.ref(module)

    def unwrap() -> None:
        module = reference()
        if module is None:
            return
        if module.__dict__["forward"] is not wrapper:
            raise AssertionError("another wrapper still encloses this one")
        del module.__dict__["forward"]
        if wrapper.inner is not None:
            module.__dict__["forward"] = wrapper.inner

    return unwrap


def forward_wrappers(module: nn.Module) -> Iterator[WrappedForward]:
    """Yield the wrappers of a module's forward, outermost first."""
    forward = module.__dict__.get("forward")
    while isinstance(forward, WrappedForward):
        yield forward
        forward = forward.inner


def remove_wrappers(model: nn.Module) -> Callable[[], None]:
    """Remove all wrappers in a model, such as those that a copy has; return what puts them back."""
    removed: list[tuple[nn.Module, WrappedForward]] = []
    for module in model.modules():
        *_, innermost = (None, *forward_wrappers(module))
        if innermost is not None:
            removed.append((module, module.__dict__.pop("forward")))
            if innermost.inner is not None:
                module.__dict__["forward"] = innermost.inner

    def put_back() -> None:
        for module, forward in removed:
            module.__dict__["forward"] = forward

    return put_back
