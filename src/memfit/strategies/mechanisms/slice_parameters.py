"""Aliases of parameters, one for each slice of a batch, so that the gradients of slices add up in place.

    backward    alias of slice 2 ── sum = gradient ──> alias of slice 1 ── sum += gradient ──> ... ──> weight

Autograd adds the gradients of several uses of a weight in new memory if they are views, as those of linear
and recurrent layers are. A loop over micro-batches adds each to ``weight.grad`` in place, and so do aliases.
"""

import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch import nn

from memfit.strategies.mechanisms.in_place_gradient_accumulation import autocast_to

Aliases = Mapping[torch.Tensor, torch.Tensor]
"""By parameter."""


_AT_ONCE = 1 << 62
"""Autograd runs the node with the largest number first: an alias adds a gradient as soon as there is one."""


class ChainedAliases:
    """The aliases of a module's trained parameters, of one slice after the other."""

    def __init__(self, module: nn.Module) -> None:
        self._chains = [(each, _Sum()) for each in module.parameters() if each.requires_grad]
        self._tokens: list[torch.Tensor] = []
        _own_uses()  # before the backward, which it would interrupt

    def of_next_slice(self) -> Aliases:
        """Return the aliases for the next slice."""
        before: Sequence[torch.Tensor | None] = self._tokens or [None] * len(self._chains)
        made = [
            _Alias.apply(each if token is None else each.detach(), token, total)
            for (each, total), token in zip(self._chains, before, strict=True)
        ]
        self._tokens = [token for _, token in made]
        for token in self._tokens:
            cast("Any", token.grad_fn)._set_sequence_nr(_AT_ONCE)
        return {each: alias for (each, _), (alias, _) in zip(self._chains, made, strict=True)}


class _Sum:
    """The sum of the slices' gradients so far."""

    tensor: torch.Tensor | None = None

    def takes(self, gradient: torch.Tensor, uses: tuple[int, int]) -> bool:
        """Return whether a gradient can become the sum, as nothing else holds it or will use it."""
        is_dense = gradient.layout == torch.strided and all(gradient.stride()[: gradient.dim()])
        return is_dense and uses == _own_uses()


class _Uses(_Sum):
    """Keeps what else holds a gradient."""

    found: tuple[int, int] = (0, 0)

    def takes(self, gradient: torch.Tensor, uses: tuple[int, int]) -> bool:  # noqa: ARG002
        """Keep it."""
        self.found = uses
        return True


@cache
def _own_uses() -> tuple[int, int]:
    """Return how often a gradient is held that nothing but an alias's backward holds.

    It differs from one version of PyTorch and Python to the next.
    """
    uses, weight = _Uses(), torch.ones(2, 2, device="cpu", requires_grad=True)
    with torch.enable_grad(), autocast_to("cpu", None):
        alias, _ = _Alias.apply(weight, None, uses)
        torch.autograd.backward((torch.ones(2, 2, device="cpu") @ alias).sum())
    return uses.found


def leaf_aliases(module: nn.Module) -> dict[torch.Tensor, torch.Tensor]:
    """Return an alias that collects a gradient of its own for each trained parameter of a module."""
    return {each: nn.Parameter(each.detach()) for each in module.parameters() if each.requires_grad}


@contextmanager
def parameters_replaced(module: nn.Module, aliases: Aliases) -> Iterator[None]:
    """Have a module use aliases in place of its parameters."""
    places = [
        (part, name, own)
        for part in module.modules()
        for name, own in part._parameters.items()
        if own is not None and own in aliases
    ]
    try:
        _set_parameters((part, name, aliases[own]) for part, name, own in places)
        yield
    finally:
        _set_parameters(places)


def _set_parameters(places: Any) -> None:
    recurrent = set()
    for part, name, value in places:
        part._parameters[name] = value
        if isinstance(part, nn.RNNBase):
            recurrent.add(part)
    for part in recurrent:  # or it would copy them to memory of its own
        part._flat_weights = [getattr(part, name) for name in part._flat_weights_names]
        part._flat_weight_refs = [None if each is None else weakref.ref(each) for each in part._flat_weights]


def can_be_replaced(module: nn.Module) -> bool:
    """Return whether nothing else replaces a module's parameters, as FSDP does, or has compiled their use."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    compiled: tuple[type, ...] = () if dynamo is None else (dynamo.OptimizedModule,)
    return not is_sharded(module) and not any(
        isinstance(each, compiled) or each._compiled_call_impl is not None for each in module.modules()
    )


def is_sharded(module: nn.Module) -> bool:
    """Return whether FSDP gathers parameters of a module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds = () if fsdp is None else (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    return any(isinstance(each, kinds) for each in module.modules())


class _Alias(torch.autograd.Function):
    """A parameter for one slice, and a token that the next slice's alias is made of.

    The first slice's, whose backward is the last, hands the sum on to the parameter.
    """

    @staticmethod
    def forward(
        ctx: Any, parameter: torch.Tensor, token: torch.Tensor | None, total: _Sum
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.total, ctx.is_first = total, token is None
        return parameter.view_as(parameter), torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None, _: torch.Tensor | None) -> Any:
        total = ctx.total
        if total.tensor is None:
            if gradient is not None:
                uses = cast("Any", gradient)._use_count(), sys.getrefcount(gradient)
                total.tensor = gradient if total.takes(gradient, uses) else gradient.clone()
        elif gradient is not None:
            total.tensor.add_(gradient)
        if not ctx.is_first:
            return None, torch.empty(0, device="cpu"), None
        whole, total.tensor = total.tensor, None
        return whole, None, None
