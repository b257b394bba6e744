"""Offload: what backward will need waits on the host.

    activations    every tensor saved in the modules named, or in the whole model
    inputs         of checkpointed modules, the tensors that they begin again from

Tensors are copied to pinned memory beside what is computed, and fetched ahead in backward. Parameters,
buffers and views of them stay. Values are the same, bit for bit. It costs host memory for as much as moves,
and time where the bus is slower than the computation. On a CPU it does nothing, and says so.
"""

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from memfit.errors import UsageError
from memfit.strategies.field_types import check_types
from memfit.strategies.mechanisms.host_copies import Copies, InOrder, SideStream
from memfit.strategies.mechanisms.module_patterns import modules_named
from memfit.strategies.mechanisms.recompute import Region
from memfit.strategies.mechanisms.saved_tensor_offload import Mover
from memfit.strategies.mechanisms.wrap_forward import Wrapped, wrap_forward, wrappers

if TYPE_CHECKING:
    from memfit.strategies.plan import Plan


@dataclass(frozen=True, slots=True)
class Offload:
    """Settings.

    Raises:
        UsageError: they are none.
    """

    modules: str | tuple[str, ...] = ()
    """Names, patterns or classes (``mechanisms/module_patterns.py``); by default all of the model."""
    what: Literal["activations", "inputs"] = "activations"
    """All that is saved in them, or what checkpointed ones begin again from."""
    min_bytes: int = 2**20
    """Smaller memory stays: a copy costs more time than it is worth."""
    pin_memory: bool = True
    """Copy to page-locked memory, which the GPU reaches by itself; without it each copy waits for the GPU."""
    prefetch: int = 1
    """Storages on their way at once, to the host in the forward and back in backward, beside what is
    computed. They are on the device meanwhile. 0: copies take turns with what is computed."""

    def __post_init__(self) -> None:
        """Check."""
        check_types(self, "offload")
        object.__setattr__(
            self, "modules", (self.modules,) if isinstance(self.modules, str) else tuple(self.modules)
        )
        for name in ("min_bytes", "prefetch"):
            value = getattr(self, name)
            if value < 0:
                raise UsageError(f"offload: {name}={value!r} must be a whole number of at least 0.")
        if self.prefetch and not self.pin_memory:
            raise UsageError(
                "offload: prefetch needs pin_memory: copies of other memory do not run beside what "
                "is computed. Without it: prefetch=0."
            )

    def conflicts(self, plan: "Plan") -> str | None:
        """Say what in a plan does not go with it."""
        if self.what == "inputs" and plan.checkpointing is None:
            return (
                "offload: what='inputs' are those of checkpointed modules, and the plan has no "
                "checkpointing. Add Checkpointing(...), or take what='activations'."
            )
        return None

    def apply(self, model: nn.Module) -> Callable[[], None]:
        """Move what a model's modules save, and return the undo.

        Raises:
            UsageError: nothing is named so; or it is inside a checkpointed module, which saves nothing there.
        """
        chosen = self._chosen(model)
        around = Offloading(self)
        undo = ExitStack()
        for module in chosen:
            undo.callback(wrap_forward(module, around, OffloadedModule))
        undo.callback(wrap_forward(model, around, OffloadedModel))
        return undo.close

    def copies(self, device: torch.device) -> Copies | None:
        """Return the way between a device and the host; None for the host."""
        if device.type != "cuda":
            return None
        if self.prefetch == 0:
            return InOrder(device, pin_memory=self.pin_memory)
        return SideStream(device)

    def _chosen(self, model: nn.Module) -> list[nn.Module]:
        regions = {
            name: module
            for name, module in model.named_modules()
            if any(isinstance(each, Region) for each in wrappers(module))
        }
        named = modules_named(model, self.modules, "offload") if self.modules else {"": model}
        if self.what == "inputs":
            inside = {id(part) for module in named.values() for part in module.modules()}
            found = [module for module in regions.values() if id(module) in inside]
            if not found:
                raise UsageError(
                    "offload: what='inputs' are those of checkpointed modules; none is checkpointed."
                )
            return found
        for name, region in regions.items():
            parts = {id(part) for part in region.modules()} - {id(region)}
            lost = [own for own, module in named.items() if id(module) in parts]
            if lost:
                raise UsageError(
                    f"offload: {lost[0]} is inside {name}, which is checkpointed: what it saves is dropped "
                    "and computed again. Offload what is around it, or what='inputs'."
                )
        return list(named.values())


class Offloading:
    """Where the saved tensors of one model go. A copy of it begins anew."""

    def __init__(self, settings: Offload) -> None:
        self._settings = settings
        self.mover = Mover(settings.copies, settings.min_bytes, settings.prefetch)
        self._said = False

    def __reduce__(self) -> tuple[type["Offloading"], tuple[Offload]]:
        """Leave out what is on its way."""
        return Offloading, (self._settings,)

    def say_if_nothing_moved(self) -> None:
        """Say it once, after a first forward that saved something."""
        if self._said or self.mover.count or self.mover.reachable is None:
            return
        self._said = True
        if not self.mover.reachable:
            warnings.warn("offload does nothing here: what is saved is on the CPU already.", stacklevel=2)
            return
        warnings.warn(
            f"offload moved nothing: no saved tensor has {self._settings.min_bytes:,} B (min_bytes) that are "
            "no parameter's and no buffer's.",
            stacklevel=2,
        )


# Neither is traced by torch.compile. What is compiled inside saves its tensors when it runs: there the
# hooks see them.
class OffloadedModule(Wrapped):
    """The forward of a module whose saved tensors move."""

    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Have them moved, if there will be a backward."""
        if not torch.is_grad_enabled():
            return self.__wrapped__(*args, **kwargs)
        with self.around.mover.hooks():
            return self.__wrapped__(*args, **kwargs)


class OffloadedModel(Wrapped):
    """The forward of the whole model: what is its own stays on the device."""

    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Begin and end a forward."""
        offloading: Offloading = self.around
        on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if on_gpu and torch.cuda.is_current_stream_capturing():
            raise UsageError(
                "offload does not go into CUDA graphs: it takes host memory, and gives it back, in every "
                "step. Checkpointing does."
            )
        offloading.mover.begin(self.module)
        result = self.__wrapped__(*args, **kwargs)
        offloading.say_if_nothing_moved()
        return result
