"""Activation checkpointing: a block's activations are dropped after its forward, and recomputed in backward.

    forward    block 0 ── x1 ── block 1 ── x2 ── block 2 ──> loss     kept: x0, x1, x2; dropped: all inside
    backward   block 2 again, then its backward;  block 1 again, ...;  block 0 again, ...

It costs one more forward (a third of a step's arithmetic), and only one block's activations exist at a time.
Gradients and buffers are those of plain training, bit for bit where the kernels are deterministic.

Built on ``torch.utils.checkpoint``, and does what that leaves to its callers: buffers that a forward changes
(BatchNorm's statistics) change once, every GPU draws the same random numbers again, keyword arguments and
containers work in both modes, a first layer gets gradients in reentrant mode too, and arguments that a
forward changes in place are refused.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

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
from memfit.strategies.mechanisms.module_patterns import (
    backbone_blocks,
    class_name,
    modules_named,
    repeated_blocks,
    unwrapped,
)
from memfit.strategies.mechanisms.recompute import CheckpointedForward, RecomputeSettings
from memfit.strategies.mechanisms.selective_checkpointing import operation_overloads
from memfit.strategies.mechanisms.wrap_forward import wrap_forward, wrappers
from memfit.user_frame import warn_user

_OPERATIONS = (activation, batchnorm, conv, dropout, instancenorm, linear, normalization, pooling, sparse)


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """Settings of activation checkpointing.

    Raises:
        UsageError: they contradict each other.

    Example:
        >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 3, enable_nested_tensor=False)
        >>> revert = Checkpointing("layers.*", every=2).apply(model)
        >>> revert()
    """

    modules: str | tuple[str, ...] = ()
    """Names, patterns or classes (``strategies/mechanisms/module_patterns.py``)."""
    every: int = 1
    """Checkpoint the first of the selected modules and every n-th after it. The last one, which backward
    would recompute right after its forward, is then rarely among them."""
    save_ops: str | tuple[str, ...] = ()
    """Operations whose results are kept inside blocks, such as ``"aten.mm"``; the rest is recomputed."""
    use_reentrant: bool = False
    """PyTorch's older checkpointing: without ``torch.autograd.grad``, and hooks see nothing inside."""
    preserve_rng_state: bool = True
    """Draw the same random numbers again. Without it dropout gets wrong gradients; modules that draw are
    warned about."""
    check: bool = False
    """Compare every operation of the recomputation with the forward's, bit for bit: slow, to find faults."""
    blocks: Literal["repeated", "backbone"] = "repeated"
    """Without ``modules``: all blocks that the model repeats, or the residual blocks of its backbone."""

    def __post_init__(self) -> None:
        """Check."""
        check_types(self, "checkpointing")
        if self.every < 1:
            raise UsageError(f"checkpointing: 'every' must be an integer of at least 1, not {self.every!r}.")
        for name in ("modules", "save_ops"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        if self.save_ops and self.use_reentrant:
            raise UsageError(
                "checkpointing: save_ops needs use_reentrant=False, because PyTorch's reentrant "
                "checkpointing cannot keep the results of individual operations."
            )
        for operation in self.save_ops:
            operation_overloads(operation)

    def apply(self, model: nn.Module) -> Callable[[], None]:
        """Checkpoint a model's modules in place, and return the undo. Names and state_dict stay.

        Raises:
            UsageError: no module matches, or a module is checkpointed already or has no forward.
        """
        regions = self._select(model)
        for name, module in regions.items():
            if any(isinstance(each, CheckpointedForward) for each in wrappers(module)):
                raise UsageError(
                    f"checkpointing: {name} is already checkpointed. Call memfit.revert(model) to undo that."
                )
        undo = ExitStack()
        for name, module in regions.items():
            settings = RecomputeSettings(
                name, tuple(self.save_ops), self.use_reentrant, self.preserve_rng_state, self.check
            )
            undo.callback(wrap_forward(module, settings, CheckpointedForward))
        for message in no_saving_warnings(regions):
            warn_user(message)

        return undo.close

    def _select(self, model: nn.Module) -> dict[str, nn.Module]:
        if self.modules:
            named = modules_named(model, self.modules, "checkpointing")
        else:
            named = backbone_blocks(model) if self.blocks == "backbone" else repeated_blocks(model)
        if not named:
            raise UsageError(
                f"checkpointing: {class_name(model)} has no list of repeated blocks. Name the "
                "modules, for example Checkpointing('encoder.*'), or their class, for example "
                "Checkpointing('EncoderLayer')."
            )
        # Inside compiled modules: the compiler then sees what is to be recomputed.
        selected = {name: unwrapped(module) for name, module in list(named.items())[:: self.every]}
        for name, module in selected.items():
            if type(module).forward is nn.Module.forward and "forward" not in module.__dict__:
                raise UsageError(
                    f"checkpointing: {name} is a {class_name(module)}, which has no forward; "
                    f"did you mean '{name}.*'?"
                )
        return selected


def no_saving_warnings(regions: dict[str, nn.Module]) -> list[str]:
    """Return a warning for each kind of region whose checkpointing saves nothing.

    A single operation keeps its input (Linear, Conv2d, LayerNorm) or its result (Softmax): as much as
    checkpointing it keeps. It is computed twice for nothing, and its result is allocated again in backward.
    """
    alone: dict[str, list[str]] = {}
    for name, module in regions.items():
        if type(module).__module__ in {each.__name__ for each in _OPERATIONS} and not any(module.children()):
            alone.setdefault(type(module).__name__, []).append(name)
    return [
        f"Checkpointing {', '.join(names)} saves no memory: a single {kind} keeps its input or its result "
        "anyway, and is now computed twice. Checkpoint a module of several operations instead."
        for kind, names in alone.items()
    ]
