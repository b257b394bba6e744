"""The optimizer's state: how its step is carried out, in how many bits it keeps state, and when it steps.

    implementation   for-loop   one parameter after the other: the smallest temporaries, the most launches
                     foreach    lists of parameters at once: temporaries as large as the parameters
                     fused      one kernel: no temporaries; not for every class, dtype and device
    bits             32         exp_avg and exp_avg_sq as PyTorch keeps them: 8 bytes a parameter
                     8, 4       quantised in blocks: about 2 and 1 bytes a parameter; another result
    step_in_backward            ── backward of layer n ──┬── of layer n-1 ──┬── ...
                                                  step, free          step, free

Implementations may round differently, in last bits. Fewer bits give another result, though training usually
ends as well. Stepping in backward gives the same result bit for bit, and gradients never exist all at once;
what needs them all at once is refused: accumulation, global clipping, loss scaling, master weights.
"""

import functools
import importlib
import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import _device_dtype_check_for_fused

from memfit.errors import UsageError
from memfit.strategies.field_types import check_types
from memfit.strategies.mechanisms.optimizer_info import name_of

if TYPE_CHECKING:
    from memfit.strategies.plan import Plan

Implementation = Literal["foreach", "fused", "for-loop"]
Backend = Literal["torchao", "bitsandbytes"]

# What torch.optim takes for each: foreach and fused exclude each other (torch/optim/adam.py, 2.14).
IMPLEMENTATIONS = {
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
    "for-loop": {"foreach": False, "fused": False},
}
BACKENDS: dict[str, tuple[int, ...]] = {"torchao": (8, 4), "bitsandbytes": (8,)}
"""Packages with optimizers of fewer bits, and the bits they have."""

# Which tensors' state is quantised: optim/adam.py of torchao 0.18, optim/optimizer.py of bitsandbytes 0.50.
_SMALLEST = 4096
_BLOCKS = {("torchao", 8): 256, ("torchao", 4): 128}

# Choices of torch.optim's that neither package has: dropped, if they only say how; the others are refused.
_ONLY_HOW = {"foreach", "fused", "decoupled_weight_decay"}
_REFUSED = ("maximize", "capturable", "differentiable")


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """Settings.

    Raises:
        UsageError: they do not go together.

    >>> OptimizerState(bits=8).backend
    'torchao'
    """

    implementation: Implementation | None = None
    """Of PyTorch's own optimizers; None leaves the choice to PyTorch."""
    bits: Literal[32, 8, 4] = 32
    """Of one number of Adam's or AdamW's state."""
    backend: Backend | None = None
    """The package with the optimizer of fewer bits; torchao by default."""
    step_in_backward: bool = False
    """Whether each parameter is updated as soon as its gradient is complete, which then is freed."""

    def __post_init__(self) -> None:
        """Check, and fill in the package."""
        check_types(self, "optimizer_state")
        if self.bits == 32:  # noqa: PLR2004 - bits of PyTorch's own
            if self.backend is not None:
                raise UsageError(
                    f"optimizer_state: backend={self.backend!r} needs bits=8: 32 are PyTorch's own."
                )
            return
        if self.implementation is not None:
            raise UsageError(
                f"optimizer_state: implementation={self.implementation!r} is of PyTorch's own optimizers; "
                f"one of {self.bits} bits has only its own. Choose one of the two."
            )
        backend = self.backend or "torchao"
        if self.bits not in BACKENDS[backend]:
            raise UsageError(f"optimizer_state: {backend} has no optimizer of {self.bits} bits; torchao has.")
        object.__setattr__(self, "backend", backend)

    def conflicts(self, plan: "Plan") -> str | None:
        """Say what of a plan cannot be together with this; None if all can."""
        if not self.step_in_backward:
            return None
        accumulation, precision = plan.accumulation, plan.precision
        if accumulation is not None and accumulation.several:
            return (
                "step_in_backward updates parameters in each backward, so that a window of several "
                "micro-batches would be several updates: leave out the accumulation, or step_in_backward."
            )
        if precision is not None and precision.dtype == "fp16":
            return (
                "step_in_backward updates parameters before all gradients are known, and loss scaling skips "
                "the whole update if one is not finite: choose bf16, or leave out step_in_backward."
            )
        if precision is not None and precision.master_weights:
            return (
                "step_in_backward updates the parameters that have gradients, and with master_weights the "
                "optimizer has others: leave out one of the two."
            )
        return None

    def notes(self, model: nn.Module) -> list[str]:
        """Say how much of a model's state is of fewer bits: small tensors stay as they are."""
        if self.backend is None:
            return []
        sizes = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
        block = _BLOCKS.get((self.backend, self.bits), 1)
        quantised = sum(size for size in sizes if size >= _SMALLEST and size % block == 0)
        share = f"{quantised:,} of {sum(sizes):,} parameters have a state of {self.bits} bits"
        return [f"optimizer_state: {share}; tensors under {_SMALLEST:,} are kept whole (exact)"]

    def optimizer(self, optimizer: Optimizer, model: nn.Module) -> Optimizer:
        """Turn an optimizer into the wanted one, in place: a scheduler that holds it holds the new one.

        Args:
            optimizer: before its first step.
            model: whose parameters it updates.

        Returns:
            The same object.

        Raises:
            UsageError: its class, hyperparameters or device do not allow it, a package is missing, or it has
                stepped.
        """
        if self.step_in_backward:
            for name, module in model.named_modules():
                if isinstance(module, DistributedDataParallel):
                    raise UsageError(
                        f"step_in_backward cannot be with DistributedDataParallel ({name or 'the model'}): "
                        "parameters would be updated before their gradients are summed over ranks."
                    )
        if self.implementation is None and self.bits == 32:  # noqa: PLR2004
            return optimizer
        if any(state.get("step", 1) for state in optimizer.state.values()):  # Adagrad begins with one, at 0
            raise UsageError(
                f"{name_of(optimizer)} has stepped, and its state would be lost: choose optimizer_state "
                "before, and load a saved state afterwards."
            )
        if self.implementation is not None:
            _choose(optimizer, self.implementation)
        else:
            _become(optimizer, _of_fewer_bits(optimizer, self.bits, self.backend or "torchao"))
        return optimizer


# ---- How a step is carried out --------------------------------------------------------------------------


def _choose(optimizer: Optimizer, implementation: Implementation) -> None:
    """Set foreach and fused, if a new optimizer of the class with them could be made."""
    chosen, taken = IMPLEMENTATIONS[implementation], inspect.signature(type(optimizer)).parameters
    lacking = [name for name, wanted in chosen.items() if wanted and name not in taken]
    if lacking:
        raise UsageError(f"{name_of(optimizer)} has no {implementation} implementation.")
    chosen = {name: wanted for name, wanted in chosen.items() if name in taken}
    defaults = {name: value for name, value in optimizer.defaults.items() if name in taken} | chosen
    try:
        made = type(optimizer)([group | chosen for group in optimizer.param_groups], **defaults)
        if implementation == "fused":  # as PyTorch does in the first step
            for group in made.param_groups:
                for parameter in group["params"]:
                    _device_dtype_check_for_fused(parameter)
    except (RuntimeError, TypeError, ValueError) as error:
        raise UsageError(f"{name_of(optimizer)} cannot be {implementation}: {error}") from None
    _become(optimizer, made)
    # A saved state says how it was made; the choice is of this run.
    optimizer.register_load_state_dict_pre_hook(
        lambda _, state: state | {"param_groups": [group | chosen for group in state["param_groups"]]}
    )


# ---- In how many bits state is kept ---------------------------------------------------------------------


def _of_fewer_bits(optimizer: Optimizer, bits: int, backend: str) -> Optimizer:
    """Return an optimizer of the same hyperparameters and groups."""
    groups = optimizer.param_groups
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise UsageError(
            f"There is no {name_of(optimizer)} of {bits} bits: torch.optim.Adam and AdamW have one."
        )
    for option in _REFUSED:
        if any(group.get(option) for group in groups):
            raise UsageError(f"{option}=True: {backend}'s optimizers have no such option.")
    decoupled = isinstance(optimizer, torch.optim.AdamW) or any(
        group.get("decoupled_weight_decay") for group in groups
    )
    if backend == "bitsandbytes":
        if any(group["amsgrad"] for group in groups):
            raise UsageError(
                "amsgrad=True: bitsandbytes' 8-bit optimizers have no such option; torchao's have."
            )
        if not decoupled and any(group["weight_decay"] for group in groups):
            # Seen with 0.50.2: its Adam with weight decay gives what AdamW gives.
            raise UsageError(
                "bitsandbytes' Adam decouples weight decay, as AdamW does: say AdamW, weight_decay=0 or "
                'backend="torchao".'
            )
    try:
        package = importlib.import_module(f"{backend}.optim")
    except ImportError as error:
        raise UsageError(f"{bits} bits need {backend}: pip install 'memfit[{backend}]' ({error}).") from None
    kept = [{name: value for name, value in group.items() if name not in _ONLY_HOW} for group in groups]
    names = ("lr", "betas", "eps", "weight_decay", "amsgrad")
    made: Optimizer = getattr(package, f"{'AdamW' if decoupled else 'Adam'}{bits}bit")(
        kept, **{name: optimizer.defaults[name] for name in names}
    )
    return made


def _become(optimizer: Optimizer, other: Optimizer) -> None:
    """Turn an optimizer into another that has not stepped: class, groups and state; its hooks stay.

    Raises:
        UsageError: someone put another step in place of its own.
    """
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise UsageError(
            f"The step of {name_of(optimizer)} was replaced: choose optimizer_state before that."
        )
    hooks = {name: value for name, value in vars(optimizer).items() if name.endswith("_hooks")}
    optimizer.__class__ = type(other)
    vars(optimizer).update(vars(other) | hooks)
    if step is not None:
        vars(optimizer)["step"] = _watched(optimizer)


def _watched(optimizer: Optimizer) -> Callable[..., Any]:
    """Return the step of an optimizer that has a scheduler, which wants to know that it was called.

    Source: ``patch_track_step_called`` in torch/optim/lr_scheduler.py, 2.14.
    """
    step, reference = type(optimizer).step, weakref.ref(optimizer)

    @functools.wraps(step)
    def watched(*args: Any, **kwargs: Any) -> Any:
        held = reference()
        held._opt_called = True  # type: ignore[union-attr]
        return step(held, *args, **kwargs)  # type: ignore[arg-type]

    watched._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return watched
