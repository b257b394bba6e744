"""The optimizer: its implementation, how many bits its state has, where that waits, and when it steps.

    implementation   for-loop   one parameter after the other: the smallest temporaries, the most launches
                     foreach    lists of parameters at once: temporaries as large as the parameters
                     fused      one kernel: no temporaries; not for every class, dtype and device
    bits             32         exp_avg and exp_avg_sq as PyTorch keeps them: 8 bytes per parameter
                     8, 4       quantised in blocks: about 2 and 1 bytes per parameter; results differ
    offload                     the state waits in pinned memory of the host, and is on the device only while
                                its parameters are updated, there
    step_in_backward            ── backward of layer n ──┬── of layer n-1 ──┬── ...
                                                  step, free          step, free

Implementations may round the last bits differently. Fewer bits give different results, though training
usually ends equally well. Offload gives the same result bit for bit: its cost is host memory for the state,
and time where the bus is slower than the computation beside it. Stepping in backward gives the same result
bit for bit, and gradients never exist all at once; settings that need them all at once are refused:
accumulation, global clipping, loss scaling, master weights.
"""

import importlib
import inspect
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import _device_dtype_check_for_fused

from memfit.errors import UsageError
from memfit.recording.optimizer_accessors import optimizer_name
from memfit.strategies.mechanisms.optimizer_step import check_step_is_not_replaced, step_tracked_by_schedulers
from memfit.strategies.setting_checks import check_setting_types

Implementation = Literal["foreach", "fused", "for-loop"]
Backend = Literal["torchao", "bitsandbytes"]

# The arguments of torch.optim for each: foreach and fused exclude each other (torch/optim/adam.py, 2.14).
IMPLEMENTATIONS = {
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
    "for-loop": {"foreach": False, "fused": False},
}
BACKENDS: dict[str, tuple[int, ...]] = {"torchao": (8, 4), "bitsandbytes": (8,)}
"""Packages with low-bit optimizers, and the bits they offer."""

# Which tensors' state is quantised: optim/adam.py in torchao 0.18, optim/optimizer.py in bitsandbytes 0.50.
_SMALLEST = 4096
_BLOCKS = {("torchao", 8): 256, ("torchao", 4): 128}

# torch.optim's options that neither package has: dropped if they only choose an implementation, else refused.
_DROPPED = {"foreach", "fused", "decoupled_weight_decay"}
_REFUSED = ("maximize", "capturable", "differentiable")


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """Settings of the optimizer.

    Raises:
        UsageError: they contradict each other.

    >>> OptimizerState(bits=8).backend, OptimizerState(bits=4).backend
    ('bitsandbytes', 'torchao')
    """

    implementation: Implementation | None = None
    """The implementation of PyTorch's own optimizers; None leaves the choice to PyTorch."""
    bits: Literal[32, 8, 4] = 32
    """Bits per number of Adam's or AdamW's state."""
    backend: Backend | None = None
    """The package with the low-bit optimizer; by default bitsandbytes for 8 bits, and torchao, whose step is
    compiled for half a minute, for 4."""
    step_in_backward: bool = False
    """Update each parameter as soon as its gradient is complete, and free the gradient."""
    offload: bool = False
    """Keep the state on the host between updates (``mechanisms/offloaded_optimizer_state.py``). On a CPU this
    does nothing, and warns."""

    def __post_init__(self) -> None:
        """Check, and fill in the package."""
        check_setting_types(self, "optimizer_state")
        if self.bits == 32:  # noqa: PLR2004 - bits of PyTorch's own
            if self.backend is not None:
                raise UsageError(
                    f"optimizer_state: backend={self.backend!r} provides only low-bit optimizers. Set "
                    "bits=8 too, or leave out backend."
                )
            return
        if self.implementation is not None:
            raise UsageError(
                f"optimizer_state: implementation={self.implementation!r} chooses an implementation "
                f"of PyTorch's own optimizer, but bits={self.bits} replaces that optimizer. Set only "
                "one of the two."
            )
        backend = self.backend or ("bitsandbytes" if self.bits == 8 else "torchao")  # noqa: PLR2004
        if self.bits not in BACKENDS[backend]:
            raise UsageError(
                f"optimizer_state: {backend} has no {self.bits}-bit optimizer. Use backend='torchao'."
            )
        object.__setattr__(self, "backend", backend)

    def notes(self, model: nn.Module) -> list[str]:
        """Return how much of a model's state has fewer bits: small tensors keep 32-bit state."""
        if self.backend is None:
            return []
        sizes = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
        block = _BLOCKS.get((self.backend, self.bits), 1)
        quantised = sum(size for size in sizes if size >= _SMALLEST and size % block == 0)
        share = f"{quantised:,} of {sum(sizes):,} parameters have {self.bits}-bit state"
        return [f"optimizer_state: {share}; tensors under {_SMALLEST:,} elements keep 32 bits (exact)"]

    def optimizer(self, optimizer: Optimizer, *models: nn.Module) -> Optimizer:
        """Convert an optimizer in place: a scheduler that holds it holds the converted one.

        Args:
            optimizer: before its first step.
            models: those whose parameters it updates.

        Returns:
            The same object.

        Raises:
            UsageError: its class, hyperparameters or device do not allow it, a package is missing, or it has
                already stepped.
        """
        if self.step_in_backward:
            for name, module in chain.from_iterable(model.named_modules() for model in models):
                if isinstance(module, DistributedDataParallel):
                    raise UsageError(
                        "step_in_backward does not work with DistributedDataParallel, which wraps "
                        f"{name or 'the model'}. Parameters would be updated before their gradients are "
                        "reduced across ranks. Leave out step_in_backward."
                    )
        if self.implementation is None and self.bits == 32:  # noqa: PLR2004
            return optimizer
        if any(state.get("step", 1) for state in optimizer.state.values()):  # Adagrad starts with step 0
            raise UsageError(
                f"{optimizer_name(optimizer)} has already taken a step, and converting it now would lose its "
                "state. Apply the plan before the optimizer's first step. If you load a saved optimizer "
                "state, load it after applying the plan."
            )
        if self.implementation is not None:
            _choose(optimizer, self.implementation)
        else:
            _become(optimizer, _low_bit_optimizer(optimizer, self.bits, self.backend or "torchao"))
        return optimizer


# ---- Implementation of the step --------------------------------------------------------------------------


def _choose(optimizer: Optimizer, implementation: Implementation) -> None:
    """Set foreach and fused, if the class can be constructed with them."""
    chosen, taken = IMPLEMENTATIONS[implementation], inspect.signature(type(optimizer)).parameters
    lacking = [name for name, wanted in chosen.items() if wanted and name not in taken]
    if lacking:
        raise UsageError(f"{optimizer_name(optimizer)} has no {implementation} implementation.")
    chosen = {name: wanted for name, wanted in chosen.items() if name in taken}
    defaults = {name: value for name, value in optimizer.defaults.items() if name in taken} | chosen
    try:
        made = type(optimizer)([group | chosen for group in optimizer.param_groups], **defaults)
        if implementation == "fused":  # as PyTorch does in the first step
            for group in made.param_groups:
                for parameter in group["params"]:
                    _device_dtype_check_for_fused(parameter)
    except (RuntimeError, TypeError, ValueError) as error:
        raise UsageError(
            f"{optimizer_name(optimizer)} cannot use the {implementation} implementation: {error}"
        ) from None
    _become(optimizer, made)
    # A saved state records the implementation of its run; this run keeps its own choice.
    optimizer.register_load_state_dict_pre_hook(
        lambda _, state: state | {"param_groups": [group | chosen for group in state["param_groups"]]}
    )


# ---- Bits of the state -----------------------------------------------------------------------------------


def _low_bit_optimizer(optimizer: Optimizer, bits: int, backend: str) -> Optimizer:
    """Return a low-bit optimizer with the same hyperparameters and groups."""
    groups = optimizer.param_groups
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise UsageError(
            f"There is no {bits}-bit version of {optimizer_name(optimizer)}. Use torch.optim.Adam or AdamW."
        )
    for option in _REFUSED:
        if any(group.get(option) for group in groups):
            raise UsageError(f"{option}=True is not supported by {backend}'s optimizers. Leave it out.")
    decoupled = isinstance(optimizer, torch.optim.AdamW) or any(
        group.get("decoupled_weight_decay") for group in groups
    )
    if backend == "bitsandbytes":
        if any(group["amsgrad"] for group in groups):
            raise UsageError(
                "amsgrad=True is not supported by bitsandbytes' 8-bit optimizers. Use "
                "backend='torchao', which supports it."
            )
        if not decoupled and any(group["weight_decay"] for group in groups):
            # Seen with 0.50.2: its Adam with weight decay returns what AdamW returns.
            raise UsageError(
                "bitsandbytes' Adam applies weight decay as AdamW does, not as torch.optim.Adam "
                "does: use AdamW, set weight_decay=0, or pass backend='torchao'."
            )
    try:
        package = importlib.import_module(f"{backend}.optim")
    except ImportError as error:
        raise UsageError(
            f"optimizer_state: bits={bits} needs the package {backend} ({error}). Run pip install "
            f"'memfit[{backend}]'."
        ) from None
    kept = [{name: value for name, value in group.items() if name not in _DROPPED} for group in groups]
    names = ("lr", "betas", "eps", "weight_decay", "amsgrad")
    made: Optimizer = getattr(package, f"{'AdamW' if decoupled else 'Adam'}{bits}bit")(
        kept, **{name: optimizer.defaults[name] for name in names}
    )
    return made


def _become(optimizer: Optimizer, other: Optimizer) -> None:
    """Give an optimizer the class, groups and state of another that has not stepped; its hooks stay.

    Raises:
        UsageError: its ``step`` was replaced.
    """
    check_step_is_not_replaced(optimizer)
    step = vars(optimizer).get("step")
    hooks = {name: value for name, value in vars(optimizer).items() if name.endswith("_hooks")}
    optimizer.__class__ = type(other)
    vars(optimizer).update(vars(other) | hooks)
    if step is not None:
        calls_own = hasattr(step, "calls_own_step")
        vars(optimizer)["step"] = step if calls_own else step_tracked_by_schedulers(optimizer)
