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
from memfit.strategies.mechanisms.module_patterns import (
    backbone_blocks,
    class_name,
    module_without_compile_wrapper,
    modules_named,
    repeated_blocks,
)
from memfit.strategies.mechanisms.recompute_forward import CheckpointedForward, RecomputeSettings
from memfit.strategies.mechanisms.selective_checkpointing import operation_overloads
from memfit.strategies.mechanisms.wrap_forward import forward_wrappers, wrap_forward
from memfit.strategies.setting_checks import check_setting_types
from memfit.user_lines import warn_user

_OPERATIONS = (activation, batchnorm, conv, dropout, instancenorm, linear, normalization, pooling, sparse)


@dataclass(frozen=True, slots=True)
class Region:
    """Modules that are checkpointed alike.

    Raises:
        UsageError: it names no module, or an operation that does not exist.

    >>> Region("layers.0", save_ops="aten.addmm.default:1")
    Region(modules=('layers.0',), save_ops=('aten.addmm.default:1',), split_at=(), recompute='module')
    """

    modules: str | tuple[str, ...]
    """As in ``Checkpointing``; ``""`` is the model itself."""
    save_ops: str | tuple[str, ...] = ()
    """As in ``Checkpointing``."""
    split_at: str | tuple[str, ...] = ()
    """As in ``Checkpointing``."""
    recompute: Literal["module", "tensors"] = "module"
    """As in ``Checkpointing``."""

    def __post_init__(self) -> None:
        """Check."""
        check_setting_types(self, "checkpointing: regions")
        _as_tuples(self)
        if not self.modules:
            raise UsageError("checkpointing: a region must name its modules.")
        _check_recomputed(self)


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
    """Operations whose results are kept inside blocks, such as ``"aten.mm"``, or single calls of them, such
    as ``"aten.mm.default:2"``, the third one; the rest is recomputed. Of the operations of a block that draw
    random numbers, keep all or none: one that is kept draws nothing again, and the others would draw other
    numbers than in the forward, which makes gradients wrong without an error."""
    split_at: str | tuple[str, ...] = ()
    """Names of submodules, such as ``"mlp"``, at whose first call another part of a block begins. Backward
    recomputes the parts one by one, the last one first, each from the block's beginning: what one part saves
    exists at a time, and the parts before run once more for it. Compiled models ignore it."""
    recompute: Literal["module", "tensors"] = "module"
    """What runs again: ``module``, a block's forward; or ``tensors``, single operations of it. These are
    noted in the forward, and backward makes each tensor when it needs it, from the results that ``save_ops``
    names and from the block's inputs. No code of the module runs again. Results of less than 16 KiB are kept,
    and those of operations that draw random numbers. What changes a tensor past PyTorch's dispatcher, such as
    a Triton kernel, is not noted: compare gradients there. Compiled models ignore it; it cannot be combined
    with FSDP, which frees parameters."""
    use_reentrant: bool = False
    """PyTorch's older checkpointing: without ``torch.autograd.grad``, and hooks see nothing inside."""
    preserve_rng_state: bool = True
    """Draw the same random numbers again. Without it dropout gets wrong gradients; modules that draw are
    warned about."""
    check: bool = False
    """Compare every operation of the recomputation with the forward's, bit for bit: slow, to find faults."""
    blocks: Literal["repeated", "backbone"] = "repeated"
    """Without ``modules``: all blocks that the model repeats, or the residual blocks of its backbone."""
    regions: tuple[Region, ...] = ()
    """Modules that keep different operations, in place of ``modules`` and ``save_ops``: what ``memfit plan``
    writes."""

    def __post_init__(self) -> None:
        """Check."""
        check_setting_types(self, "checkpointing")
        if self.every < 1:
            raise UsageError(f"checkpointing: 'every' must be an integer of at least 1, not {self.every!r}.")
        _as_tuples(self)
        own = (self.modules, self.save_ops, self.split_at, self.every != 1, self.recompute != "module")
        if self.regions and any(own):
            raise UsageError(
                "checkpointing: regions name their own modules and operations. Leave out modules, every, "
                "save_ops, split_at and recompute, or leave out regions."
            )
        if self.use_reentrant and (self.save_ops or any(region.save_ops for region in self.regions)):
            raise UsageError(
                "checkpointing: save_ops needs use_reentrant=False, because PyTorch's reentrant "
                "checkpointing cannot keep the results of individual operations."
            )
        by_tensors = "tensors" in (self.recompute, *(region.recompute for region in self.regions))
        if by_tensors and (self.use_reentrant or self.check):
            raise UsageError(
                "checkpointing: recompute='tensors' runs single operations again, without the module. Leave "
                "out use_reentrant and check."
            )
        if self.use_reentrant and (self.split_at or any(region.split_at for region in self.regions)):
            raise UsageError(
                "checkpointing: split_at needs use_reentrant=False, because PyTorch's reentrant "
                "checkpointing recomputes a block at once."
            )
        _check_recomputed(self)

    def apply(self, model: nn.Module) -> Callable[[], None]:
        """Checkpoint a model's modules in place, and return the undo. Names and state_dict stay.

        Raises:
            UsageError: no module matches, or a module is checkpointed already or has no forward.
        """
        selected = self._select(model)
        for name, (module, _) in selected.items():
            if any(isinstance(each, CheckpointedForward) for each in forward_wrappers(module)):
                raise UsageError(
                    f"checkpointing: {name} is already checkpointed. Call memfit.revert(model) to undo that."
                )
        undo = ExitStack()
        for name, (module, region) in selected.items():
            settings = RecomputeSettings(
                name,
                tuple(region.save_ops),
                self.use_reentrant,
                self.preserve_rng_state,
                self.check,
                _present(name, module, region.split_at),
                region.recompute,
            )
            undo.callback(wrap_forward(module, settings, CheckpointedForward))
        if not self.regions:  # a plan has shown what its regions save
            for message in _no_saving_warnings({name: module for name, (module, _) in selected.items()}):
                warn_user(message)

        return undo.close

    def _select(self, model: nn.Module) -> dict[str, tuple[nn.Module, "Checkpointing | Region"]]:
        """Return the modules to checkpoint by name, each with its settings."""
        if self.regions:
            return self._select_regions(model)
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
        every = dict(list(named.items())[:: self.every])
        return {name: (_with_forward(name, each), self) for name, each in every.items()}

    def _select_regions(self, model: nn.Module) -> dict[str, tuple[nn.Module, "Checkpointing | Region"]]:
        selected: dict[str, tuple[nn.Module, Checkpointing | Region]] = {}
        for region in self.regions:
            is_whole = region.modules == ("",)
            named = {"": model} if is_whole else modules_named(model, region.modules, "checkpointing")
            for name, module in named.items():
                if name in selected:
                    raise UsageError(f"checkpointing: two regions name {name}. Leave out one of the two.")
                selected[name] = (_with_forward(name, module), region)
        return selected


def _as_tuples(settings: Checkpointing | Region) -> None:
    for name in ("modules", "save_ops", "split_at"):
        value = getattr(settings, name)
        object.__setattr__(settings, name, (value,) if isinstance(value, str) else tuple(value))


def _check_recomputed(settings: Checkpointing | Region) -> None:
    for operation in settings.save_ops:
        operation_overloads(operation)
    by_tensors = settings.recompute == "tensors"
    if settings.split_at and (settings.save_ops or by_tensors):
        how = "is recomputed tensor by tensor" if by_tensors else "keeps the results of operations (save_ops)"
        raise UsageError(
            f"checkpointing: a block that {how} cannot be recomputed in parts (split_at). Leave out one "
            "of the two."
        )


def _present(name: str, module: nn.Module, split_at: str | tuple[str, ...]) -> tuple[str, ...]:
    names = {each for each, _ in module.named_modules()}
    for each in split_at:
        if not each or each not in names:
            near = ", ".join(sorted(names - {""})[:8])
            raise UsageError(
                f"checkpointing: split_at={each!r}: {name} has no such submodule"
                + (f". It has: {near}." if near else ", because it has no submodules.")
            )
    return tuple(split_at)


def _with_forward(name: str, module: nn.Module) -> nn.Module:
    """Return a module to checkpoint: inside a compiled one, where the compiler sees what is recomputed."""
    inside = module_without_compile_wrapper(module)
    if type(inside).forward is nn.Module.forward and "forward" not in inside.__dict__:
        raise UsageError(
            f"checkpointing: {name} is a {class_name(inside)}, which has no forward; did you mean '{name}.*'?"
        )
    return inside


def _no_saving_warnings(regions: dict[str, nn.Module]) -> list[str]:
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
