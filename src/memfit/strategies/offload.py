"""Offload: tensors saved for backward wait on the host.

    activations    every tensor saved in the named modules, or in the whole model
    inputs         the inputs of checkpointed modules, from which they are recomputed

Tensors are copied to pinned memory beside the computation, and prefetched in backward. Parameters, buffers
and views of them stay on the device. Values are the same, bit for bit. The cost is host memory for everything
that moves, and time where the bus is slower than the computation. On a CPU offload does nothing, and warns.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch._compile import _disable_dynamo

from memfit.errors import UsageError
from memfit.strategies.mechanisms.host_copies import HostCopier, SideStreamCopier
from memfit.strategies.mechanisms.module_patterns import modules_named
from memfit.strategies.mechanisms.recompute_forward import CheckpointedForward
from memfit.strategies.mechanisms.saved_tensor_offload import SavedTensorOffloader
from memfit.strategies.mechanisms.wrap_forward import WrappedForward, forward_wrappers, wrap_forward
from memfit.strategies.setting_checks import check_setting_types
from memfit.user_lines import warn_user


@dataclass(frozen=True, slots=True)
class Offload:
    """Settings of offloading.

    Raises:
        UsageError: a value is invalid.
    """

    modules: str | tuple[str, ...] = ()
    """Names, patterns or classes (``mechanisms/module_patterns.py``); by default all of the model."""
    what: Literal["activations", "inputs"] = "activations"
    """Everything saved in them, or the inputs of checkpointed ones."""
    min_bytes: int = 2**20
    """Smaller storages stay: copying them costs more time than it is worth."""
    pin_memory: bool = True
    """Copy to page-locked memory, which the GPU accesses directly; without it each copy waits for the GPU."""
    prefetch: int = 1
    """Storages on their way at once, to the host in the forward and back in backward, beside the computation.
    They occupy the device meanwhile. 0: copies take turns with the computation."""

    def __post_init__(self) -> None:
        """Check."""
        check_setting_types(self, "offload")
        object.__setattr__(
            self, "modules", (self.modules,) if isinstance(self.modules, str) else tuple(self.modules)
        )
        for name in ("min_bytes", "prefetch"):
            value = getattr(self, name)
            if value < 0:
                raise UsageError(f"offload: '{name}' must be an integer of at least 0, not {value!r}.")
        if self.prefetch and not self.pin_memory:
            raise UsageError(
                "offload: prefetch needs pin_memory, because copies of pageable memory cannot "
                "overlap with the computation. Set pin_memory=True, or prefetch=0."
            )

    def apply(self, model: nn.Module) -> Callable[[], None]:
        """Offload what a model's modules save, and return the undo.

        Raises:
            UsageError: no module matches; or one is inside a checkpointed module, which saves nothing there.
        """
        selected = self._select(model)
        around = OffloadedActivations(self)
        undo = ExitStack()
        for module in selected:
            undo.callback(wrap_forward(module, around, OffloadedModuleForward))
        undo.callback(wrap_forward(model, around, OffloadedModelForward))
        return undo.close

    def copies(self, device: torch.device) -> HostCopier | None:
        """Return what copies between a device and the host; None for the host."""
        if device.type != "cuda":
            return None
        if self.prefetch == 0:
            return HostCopier(device, pin_memory=self.pin_memory)
        return SideStreamCopier(device)

    def _select(self, model: nn.Module) -> list[nn.Module]:
        regions = {
            name: module
            for name, module in model.named_modules()
            if any(isinstance(each, CheckpointedForward) for each in forward_wrappers(module))
        }
        named = modules_named(model, self.modules, "offload") if self.modules else {"": model}
        if self.what == "inputs":
            inside = {id(part) for module in named.values() for part in module.modules()}
            found = [module for module in regions.values() if id(module) in inside]
            if not found:
                raise UsageError(
                    "offload: what='inputs' offloads the inputs of checkpointed modules, but none of the "
                    "selected modules is checkpointed. Select a module that contains a checkpointed one, or "
                    "pass what='activations' to Offload."
                )
            return found
        for name, region in regions.items():
            parts = {id(part) for part in region.modules()} - {id(region)}
            inner = [own for own, module in named.items() if id(module) in parts]
            if inner:
                raise UsageError(
                    f"offload does nothing for {inner[0]}, because it is inside the checkpointed module "
                    f"{name}. The tensors that {inner[0]} saves are dropped and recomputed. Offload a module "
                    f"that contains {name}, or pass what='inputs' to Offload."
                )
        return list(named.values())


class OffloadedActivations:
    """The saved tensors of one model on their way to the host. A copy of it starts empty."""

    def __init__(self, settings: Offload) -> None:
        self._settings = settings
        self.offloader = SavedTensorOffloader(settings.copies, settings.min_bytes, settings.prefetch)
        self._warned = False

    def __reduce__(self) -> tuple[type["OffloadedActivations"], tuple[Offload]]:
        """Leave out storages that are on their way."""
        return OffloadedActivations, (self._settings,)

    def warn_if_nothing_moved(self) -> None:
        """Warn once, after the first forward that saved something."""
        if self._warned or self.offloader.count or self.offloader.saw_movable_device is None:
            return
        self._warned = True
        if not self.offloader.saw_movable_device:
            warn_user("offload does nothing here: saved tensors are already on the CPU.")
            return
        warn_user(
            "offload moved nothing to the host: every saved tensor is smaller than min_bytes "
            f"({self._settings.min_bytes:,} B). Parameters and buffers do not count: they always stay on the "
            "device.",
        )


# torch.compile traces neither wrapper. A compiled module inside saves its tensors when it runs: the hooks see
# them there.
class OffloadedModuleForward(WrappedForward):
    """The forward of a module whose saved tensors are offloaded."""

    @_disable_dynamo(recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Offload what the forward saves, if gradients are enabled."""
        if not torch.is_grad_enabled():
            return self.__wrapped__(*args, **kwargs)
        with self.around.offloader.hooks():
            return self.__wrapped__(*args, **kwargs)


class OffloadedModelForward(WrappedForward):
    """The forward of the whole model: its parameters and buffers stay on the device."""

    @_disable_dynamo(recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a forward."""
        state: OffloadedActivations = self.around
        on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if on_gpu and torch.cuda.is_current_stream_capturing():
            raise UsageError(
                "offload cannot be captured into a CUDA graph: it allocates and frees host memory in every "
                "step. Use checkpointing instead."
            )
        state.offloader.begin_forward(self.module)
        result = self.__wrapped__(*args, **kwargs)
        state.warn_if_nothing_moved()
        return result
