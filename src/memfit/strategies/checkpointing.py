"""Activation checkpointing: what a block's forward computes is dropped, and computed again in backward.

    forward    block 0 ── x1 ── block 1 ── x2 ── block 2 ──> loss     kept: x0, x1, x2, not what is inside
    backward   block 2 again, and back;  block 1 again, and back;  block 0 again, and back

It costs a forward more (a third of the arithmetic of a step) and takes the activations of one block at a
time. Gradients and buffers are those of plain training, bit for bit where the kernels are deterministic.

On top of ``torch.utils.checkpoint``. What that leaves to its callers is done here: buffers that a forward
changes (BatchNorm's statistics) change once, random numbers of every GPU are drawn again, keyword arguments
and containers pass in both modes, a first layer gets gradients in the reentrant mode too, and arguments
that a forward changes in place are refused.
"""

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from torch import nn
from torch.nn.modules import (
    activation,
    batchnorm,
    conv,
    dropout,
    instancenorm,
    linear,
    normalization,
    pooling,
    sparse,
)

from memfit.errors import UsageError
from memfit.strategies.field_types import check_types
from memfit.strategies.mechanisms.module_patterns import class_name, modules_named, repeated_blocks, unwrapped
from memfit.strategies.mechanisms.recompute import Recomputing, Region
from memfit.strategies.mechanisms.selective_saving import overloads
from memfit.strategies.mechanisms.wrap_forward import wrap_forward, wrappers

_OPERATIONS = (activation, batchnorm, conv, dropout, instancenorm, linear, normalization, pooling, sparse)


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """Settings.

    Raises:
        UsageError: they do not go together.

    Example:
        >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 3, enable_nested_tensor=False)
        >>> revert = Checkpointing("layers.*", every=2).apply(model)
        >>> revert()
    """

    modules: str | tuple[str, ...] = ()
    """Names, patterns or classes (``strategies/mechanisms/module_patterns.py``); by default the blocks that a
    model repeats."""
    every: int = 1
    """Of the modules named take the first, and every so many after it. The last, which would be computed
    again just after it was computed, is then seldom among them."""
    save_ops: str | tuple[str, ...] = ()
    """Operations whose results are kept inside blocks, as ``"aten.mm"``; the rest is computed again."""
    use_reentrant: bool = False
    """The older way of checkpointing: no ``torch.autograd.grad``, and nothing inside is seen by hooks."""
    preserve_rng_state: bool = True
    """Draw the same random numbers again. Without it dropout gets wrong gradients; who draws is warned of."""
    check: bool = False
    """Compare every operation of the recomputation with the forward's, bit by bit: slow, to find faults."""

    def __post_init__(self) -> None:
        """Check."""
        check_types(self, "checkpointing")
        if self.every < 1:
            raise UsageError(f"checkpointing: every={self.every!r} must be a whole number of at least 1.")
        for name in ("modules", "save_ops"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        if self.save_ops and self.use_reentrant:
            raise UsageError("checkpointing: save_ops needs use_reentrant=False: PyTorch has no other way.")
        for operation in self.save_ops:
            overloads(operation)

    def apply(self, model: nn.Module) -> Callable[[], None]:
        """Checkpoint a model's modules in place, and return the undo. Names and state_dict stay.

        Raises:
            UsageError: nothing is named so, or it is checkpointed already, or has no forward.
        """
        regions = self._chosen(model)
        for name, module in regions.items():
            if any(isinstance(each, Region) for each in wrappers(module)):
                raise UsageError(
                    f"checkpointing: {name} is checkpointed already; memfit.revert(model) undoes that."
                )
        undo = ExitStack()
        for name, module in regions.items():
            undo.callback(wrap_forward(module, Recomputing(self, name), Region))
        for sentence in does_not_pay(regions):
            warnings.warn(sentence, stacklevel=2)

        return undo.close

    def _chosen(self, model: nn.Module) -> dict[str, nn.Module]:
        named = (
            modules_named(model, self.modules, "checkpointing") if self.modules else repeated_blocks(model)
        )
        if not named:
            raise UsageError(
                f"checkpointing: {class_name(model)} has no list of alike blocks; say which modules: "
                "Checkpointing('encoder.*'), or the name of a class."
            )
        # Inside what was compiled: the compiler then sees what is to be computed again.
        chosen = {name: unwrapped(module) for name, module in list(named.items())[:: self.every]}
        for name, module in chosen.items():
            if type(module).forward is nn.Module.forward and "forward" not in module.__dict__:
                raise UsageError(
                    f"checkpointing: {name} is a {class_name(module)}, which has no forward; "
                    f"did you mean {name}.*?"
                )
        return chosen


def does_not_pay(regions: dict[str, nn.Module]) -> list[str]:
    """Say of which regions computing again saves nothing.

    A single operation keeps its input (Linear, Conv2d, LayerNorm) or its result (Softmax): as much as
    checkpointing it keeps. It is computed twice for nothing, and in backward its result is there once more.
    """
    alone: dict[str, list[str]] = {}
    for name, module in regions.items():
        if type(module).__module__ in {each.__name__ for each in _OPERATIONS} and not any(module.children()):
            alone.setdefault(type(module).__name__, []).append(name)
    return [
        f"Checkpointing {', '.join(names)} does not pay: a {kind} alone keeps its input or its result "
        "anyway, so that it is computed twice and saves nothing. Checkpoint what holds several operations."
        for kind, names in alone.items()
    ]
