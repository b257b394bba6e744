"""What a model's forward does beside returning its outputs: slices of a batch would each do it.

changes of buffers and attributes     running statistics, counters, metrics
tensors that it keeps                 a list of losses, a hook's features
hooks on gradients                    are passed the gradient of a slice
hooks of the script on layers         are passed what the layer computes of a slice

Global variables and files are out of sight.
"""

import gc
import inspect
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from typing import Any, Self

import torch
from torch import nn

from memfit.card.detect_card import is_ghost_loaded
from memfit.errors import UsageError
from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch
from memfit.strategies.mechanisms.inspect_tensors import tensor_version
from memfit.user_lines import is_user_file

ADVICE = "Leave out batch_slices, or divide batches in the training loop."
_HOOKS = Patch(
    "torch:Tensor",
    *("register_hook", "register_post_accumulate_grad_hook"),
    why="see hooks on gradients that a forward registers",
)
_LIBRARIES = ("memfit", "torch")
"""Whose hooks on gradients are allowed, such as FSDP2's."""
_DEEPEST, _LONGEST = 4, 1000
"""Levels of containers, and entries of one, that are compared; of others, the length."""


class SideEffects:
    """What a model's forward does beside returning its outputs, to be used as a context around its calls.

    The first call may make what the model keeps, such as a mask. The last two get as many samples, so that
    what they leave in the model is equal, unless it depends on the samples, or counts calls.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._hooks = module, InstalledHooks()
        self._begin = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        self._tensors, self._plain = [_tensors(module)], [_plain_values(module)]

    def __enter__(self) -> Self:
        """Refuse hooks on gradients."""
        for name, part in self._module.named_modules():
            hooks = (*part._backward_hooks.values(), *part._backward_pre_hooks.values())
            if part is not self._module and any(package_of_hook(each) not in _LIBRARIES for each in hooks):
                raise UsageError(
                    f"batch_slices: {name} has a backward hook, which would be passed the gradients of "
                    f"slices, one by one. {ADVICE}"
                )
        for name in _HOOKS.names:
            self._hooks.wrap(_HOOKS, name, _refuse_hook)
        return self

    def __exit__(self, *_: object) -> None:
        """Allow them again."""
        self._hooks.remove()

    def called(self) -> None:
        """Note that the forward has run once more."""
        self._tensors.append(_tensors(self._module))
        self._plain.append(_plain_values(self._module))

    def expect_none(self) -> None:
        """Refuse a model whose calls have changed it."""
        before = self._tensors[0] | self._tensors[1]
        *_, one, other = self._tensors
        for name, (value, version) in other.items():
            was, version_before = before.get(name, (None, 0))
            made_anew = name in one and one[name][0] is not value and not is_ghost_loaded()
            if made_anew and torch.equal(one[name][0], value):
                continue
            if was is not value or version_before != version:
                raise UsageError(
                    f"batch_slices: the model's forward changes its tensor {name!r}, and would change it "
                    f"once in each slice. {ADVICE}"
                )
        *_, values, others = self._plain
        for name, plain in others.items():
            if plain != values.get(name):
                raise UsageError(
                    f"batch_slices: the model's forward changes its attribute {name!r} in each call, and "
                    f"would change it once in each slice. {ADVICE}"
                )

    def expect_nothing_kept(self) -> None:
        """Refuse a model that keeps a tensor beside its outputs, for a loss: it would be a slice's."""
        end = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        if _with_graph(self._begin, end):
            gc.collect()
        if kept := _with_graph(self._begin, end):
            last = max(kept, key=lambda each: each.grad_fn._sequence_nr())
            name, shape = last.grad_fn.name(), " x ".join(map(str, last.shape)) or "one number"
            raise UsageError(
                f"batch_slices: the model's forward, or a hook on a layer, keeps a result of {name} "
                f"({shape}) beside what the model returns. A loss of it would be that of one slice. "
                f"Return it from the model's forward, or detach it. {ADVICE}"
            )


def expect_no_forward_hooks(module: nn.Module) -> None:
    """Refuse hooks of the script on the forward of layers: what they keep would be that of a slice."""
    of_each = torch.nn.modules.module
    hooks = [
        ("each module", of_each._global_forward_pre_hooks, of_each._global_forward_hooks),
        *(
            (name, part._forward_pre_hooks, part._forward_hooks)
            for name, part in module.named_modules()
            if part is not module
        ),
    ]
    for name, *tables in hooks:
        for hook in (each for table in tables for each in table.values()):
            function = inspect.unwrap(getattr(hook, "func", hook))
            code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
            if code is not None and is_user_file(code.co_filename):
                raise UsageError(
                    f"batch_slices: {name} has a forward hook, {code.co_qualname} at {code.co_filename}:"
                    f"{code.co_firstlineno}, which would be passed slices of a batch, and some twice. Do its "
                    "work in the module's forward, or return from the model what it needs. A hook on the "
                    f"model itself is passed the whole batch. {ADVICE}"
                )


def package_of_hook(hook: Any) -> str:
    """Return the name of the package in which a hook was defined."""
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).partition(".")[0]


def _refuse_hook(register: Callable[..., Any], tensor: torch.Tensor, hook: Any) -> Any:
    if package_of_hook(hook) in _LIBRARIES:
        return register(tensor, hook)
    raise UsageError(
        "batch_slices: the model's forward registers a hook on a gradient, and would register one in each "
        f"slice, for the slice's gradient. {ADVICE}"
    )


def _tensors(module: nn.Module) -> dict[str, tuple[torch.Tensor, int]]:
    """Return buffers, and tensors that are plain attributes, by name, each with its version.

    They are held: another may get the identity of one that is gone.
    """
    return {
        f"{prefix}.{name}".lstrip("."): (value, tensor_version(value))
        for prefix, part in module.named_modules()
        for name, value in (*part._buffers.items(), *vars(part).items())
        if isinstance(value, torch.Tensor)
    }


def _plain_values(module: nn.Module) -> dict[str, Any]:
    """Return numbers and text among attributes, in containers and in objects that are attributes, by name."""
    own = vars(nn.Module())  # with tables of hooks, whose entries memfit adds and removes
    return {
        f"{prefix}.{name}".lstrip("."): _plain(value, _DEEPEST)
        for prefix, part in module.named_modules()
        for name, value in vars(part).items()
        if name not in own
    }


def _plain(value: Any, depth: int) -> Any:
    """Return a copy of what is plain in a value, to be compared."""
    if isinstance(value, int | float | complex | str | bytes):
        return value if value == value else str(value)  # noqa: PLR0124 - NaN, which is not itself
    entries: Collection[Any]
    if isinstance(value, Mapping):
        entries = value.items()
    elif isinstance(value, Sequence | AbstractSet | deque):
        entries = value
    elif depth == _DEEPEST and not isinstance(value, torch.Tensor | nn.Module | type) and not callable(value):
        entries = getattr(value, "__dict__", {}).items()
    else:
        return None
    if not depth or len(entries) > _LONGEST:
        return len(entries)
    return [_plain(each, depth - 1) for each in entries]


def _with_graph(begin: int, end: int) -> list[Any]:
    """Return the tensors that operations of an interval have computed, and that can be differentiated."""
    found = []
    for each in gc.get_objects():
        if type(each) is torch.Tensor:  # and no compiler's fake one
            with suppress(RuntimeError):  # autograd refuses to say it of some views that were written to
                if each.grad_fn is not None and begin <= each.grad_fn._sequence_nr() < end:
                    found.append(each)
    return found


@contextmanager
def without_cache(module: nn.Module) -> Iterator[None]:
    """Have a model of transformers return no keys and values for later tokens, which cannot be joined.

    So does transformers itself, if it checkpoints.
    """
    found = (vars(each).get("config") for each in module.modules())  # of T5's decoder, its own
    configs: Iterable[Any] = {
        id(each): each for each in found if getattr(each, "use_cache", None) is True
    }.values()
    for each in configs:
        each.use_cache = False
    try:
        yield
    finally:
        for each in configs:
            each.use_cache = True
