"""A module whose forward is computed again in backward: torch.utils.checkpoint, and what that leaves over.

module.forward = Region ── checkpoint(Call, *tensors) ─┬─ first time: the forward, with what was passed
                                                       └─ later:      the same again, with what it found
"""

import operator
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from memfit.errors import UsageError
from memfit.strategies.mechanisms.forward_state import BufferHabits, Draws, tensors_in, unseen, version
from memfit.strategies.mechanisms.recompute_check import Comparing, Recording
from memfit.strategies.mechanisms.selective_saving import keeping
from memfit.strategies.mechanisms.wrap_forward import Forward, Wrapped

if TYPE_CHECKING:
    from memfit.strategies.checkpointing import Checkpointing

Context = AbstractContextManager[Any]


@dataclass(frozen=True, slots=True)
class Recomputing:
    """What a region is told: how, and its name for messages."""

    settings: "Checkpointing"
    name: str


class Region(Wrapped):
    """The forward of one checkpointed module."""

    def __init__(self, module: nn.Module, around: Recomputing, inner: Forward | None) -> None:
        super().__init__(module, around, inner)
        self.settings, self.name = around.settings, around.name
        self.habits = BufferHabits(around.name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward so that it can be computed again, if there is anything to go backward for."""
        forward, settings = self.__wrapped__, self.settings
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            # The compiler makes one graph of it and decides there what is computed again; buffers change
            # once.
            contexts: dict[str, Any] = {}
            if settings.save_ops:
                contexts["context_fn"] = partial(keeping, settings.save_ops)
            return checkpoint(
                forward,
                *args,
                use_reentrant=settings.use_reentrant,
                preserve_rng_state=settings.preserve_rng_state,
                **contexts,
                **kwargs,
            )
        tensors, spec = tree_flatten((args, kwargs))
        differentiable = (each.requires_grad for each in tensors if isinstance(each, torch.Tensor))
        if not any(differentiable) and not any(each.requires_grad for each in self.module.parameters()):
            return forward(*args, **kwargs)
        with unseen():
            call = Call(self, forward, (args, kwargs), spec)
            yes = torch.empty(0, requires_grad=True)
        if not settings.use_reentrant:
            return checkpoint(
                call, *tensors, use_reentrant=False, preserve_rng_state=settings.preserve_rng_state
            )
        # Reentrant checkpointing asks its arguments whether there is something to differentiate, not the
        # parameters: one that says yes keeps those of a first layer from going without gradients.
        leaves = checkpoint(
            call, yes, *tensors, use_reentrant=True, preserve_rng_state=settings.preserve_rng_state
        )
        return call.result(leaves)


class Call:
    """One call of a region: the forward, then the same again as often as backward asks.

    What was passed is kept by ``checkpoint`` alone, as it keeps tensors: seen by saved-tensor hooks, and
    checked for later changes.
    """

    def __init__(
        self,
        region: Region,
        forward: Forward,
        passed: tuple[tuple[Any, ...], dict[str, Any]],
        spec: TreeSpec,
    ) -> None:
        self._region, self._forward, self._spec = region, forward, spec
        self._passed: tuple[tuple[Any, ...], dict[str, Any]] | None = passed
        self._result: TreeSpec | None = None
        settings = region.settings
        self._buffers = region.habits.note(region.module)
        self._draws = Draws.note() if settings.preserve_rng_state else None
        self._saving, self._saved = keeping(settings.save_ops)
        self._recorded = Recording() if settings.check else None

    def __call__(self, *tensors: Any) -> Any:
        """Run the forward."""
        if self._region.settings.use_reentrant:
            tensors = tensors[1:]
        if self._passed is not None:
            # With the very objects that were passed: a list that the forward appends to is the caller's.
            (args, kwargs), self._passed = self._passed, None
            result = self._first(tensors, args, kwargs)
        else:
            args, kwargs = tree_unflatten(tensors, self._spec)
            with ExitStack() as stack:
                for context in self._again():
                    stack.enter_context(context)
                result = self._forward(*args, **kwargs)
        if not self._region.settings.use_reentrant:
            return result
        leaves, self._result = tree_flatten(result)
        self._expect_seen("returns", leaves, lambda _: True)
        return tuple(leaves)

    def result(self, leaves: Any) -> Any:
        """Put together what a reentrant forward returned in pieces."""
        if self._result is None:
            raise AssertionError("the forward has not run")
        return tree_unflatten(leaves, self._result)

    def _expect_seen(self, what: str, leaves: Iterable[Any], matters: Callable[[torch.Tensor], bool]) -> None:
        """Complain about tensors inside objects: reentrant checkpointing loses their gradients."""
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor) and any(map(matters, tensors_in(leaf))):
                raise UsageError(
                    f"{self._region.name} cannot be checkpointed with use_reentrant=True: it {what} a "
                    f"{type(leaf).__name__} with tensors in it, whose gradients would be lost. Leave "
                    "use_reentrant out."
                )

    def _attributes(self) -> dict[tuple[int, str], torch.Tensor]:
        """Return the tensors that are plain attributes of the region's modules: a loss of a router's, say."""
        return {
            (place, name): value
            for place, part in enumerate(self._buffers.parts)
            for name, value in vars(part).items()
            if isinstance(value, torch.Tensor)
        }

    def _warn_of_attributes(self, before: dict[tuple[int, str], torch.Tensor]) -> None:
        new = {
            name
            for (place, name), value in self._attributes().items()
            if before.get((place, name)) is not value
        }
        if new:
            warnings.warn(
                f"{self._region.name} has put {', '.join(sorted(new))} on a module: reentrant checkpointing "
                "records no gradient for that, and if a loss uses it, its part is missing. Leave "
                "use_reentrant out.",
                stacklevel=2,
            )

    def _first(self, tensors: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        versions = [version(each) for each in tensors]
        holders = [(each, tensors_in(each)) for each in tensors if not isinstance(each, torch.Tensor)]
        unkept = (
            (torch.get_rng_state(), Draws.note()) if self._buffers.first and self._draws is None else None
        )
        reentrant = self._region.settings.use_reentrant
        if reentrant:
            self._expect_seen("is handed", tensors, lambda each: each.requires_grad)
        attributes = self._attributes() if reentrant else {}
        with self._saving, self._recorded or nullcontext():
            result = self._forward(*args, **kwargs)
        if reentrant:
            self._warn_of_attributes(attributes)
        for each, held in holders:
            if not _same(held, tensors_in(each)):
                raise UsageError(
                    f"{self._region.name} cannot be checkpointed: its forward changes the "
                    f"{type(each).__name__} that it is handed, and would find it changed when it is computed "
                    "again. Hand it none; in transformers: model.config.use_cache = False."
                )
        changed = [place for place, each in enumerate(tensors) if version(each) != versions[place]]
        if changed:
            raise UsageError(
                f"{self._region.name} cannot be checkpointed: its forward changes tensor {changed[0]} of "
                "its arguments in place, so that it cannot be computed again from them. Make that operation "
                "out of place, or checkpoint a module that begins before it."
            )
        with unseen():
            self._region.habits.learn(self._buffers)
            if self._draws is not None:
                self._draws.settle()
            if unkept is not None:
                self._warn_if_drawn(*unkept)
        return result

    def _warn_if_drawn(self, cpu: torch.Tensor, draws: Draws) -> None:
        draws.settle()
        if not draws.before and torch.equal(cpu, torch.get_rng_state()):
            return
        module, name = self._region.module, self._region.name
        parts = [part for part, each in module.named_modules() if isinstance(each, _DropoutNd)]
        dropouts = ", ".join(f"{name}.{part}".rstrip(".") for part in parts)
        warnings.warn(
            f"{name} draws random numbers{f' ({dropouts})' if parts else ''}, and preserve_rng_state is "
            "False: the recomputation draws others, and gradients are wrong. Leave preserve_rng_state on.",
            stacklevel=2,
        )

    def _again(self) -> list[Context]:
        contexts: list[Context] = [self._buffers.again()]
        if self._draws is not None:
            contexts.append(self._draws.again())
        contexts.append(self._saved)
        if self._recorded is not None:
            contexts.append(Comparing(self._region.name, self._recorded.fingerprints))
        return contexts


def _same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))
