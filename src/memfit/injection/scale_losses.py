"""Scale the losses of an unmodified script for float16, as a loop with ``torch.amp.GradScaler`` does.

    backward          of loss * scale; gradients are divided by the scale before the script sees them
    optimizer.step    left out if a gradient is not finite, and the scale backs off

A script that has a GradScaler of its own goes on scaling losses itself.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from memfit.patching.patches import Patch
from memfit.recording.optimizer_accessors import parameters_of
from memfit.strategies.mechanisms.optimizer_step import guard_optimizer_step
from memfit.strategies.precision import LossScale

if TYPE_CHECKING:
    from memfit.patching.installed_hooks import InstalledHooks

_OPTIMIZER = Patch("torch.optim.optimizer:Optimizer", "__init__", why="skip updates that are not finite")
_BACKWARD = Patch("torch.autograd", "backward", why="scale the loss for float16")
_SCALER = Patch("torch.amp.grad_scaler:GradScaler", "scale", why="see that the script scales losses itself")


class LossScaling:
    """Scales the losses of a script."""

    def __init__(self, settings: LossScale | None) -> None:
        self._settings = settings
        self._active = False
        """Whether a model of the script computes in float16."""
        self._by_script = False
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._scale: torch.Tensor | None = None
        self._grown = torch.zeros(0)
        """Updates since the scale has grown, like the scale on the GPU."""
        self._found: dict[torch.device, torch.Tensor] = {}
        """Whether a gradient was not finite since the last update: 1 or 0."""
        self._updated = False
        """Whether an optimizer has made an update, or left it out, since the last backward."""

    def install(self, hooks: "InstalledHooks") -> None:
        """Hook backwards, and the creation of optimizers."""
        if self._settings is None:
            return
        hooks.call_after(_OPTIMIZER, "__init__", self.created)
        hooks.wrap(_BACKWARD, "backward", self._backward)
        hooks.wrap(_SCALER, "scale", self._scaled_by_script)

    def activate(self) -> None:
        """Scale losses from now on: a model of the script computes in float16."""
        self._active = True
        self._guard_updates()

    def created(self, *optimizers: torch.optim.Optimizer | None) -> None:
        """Have optimizers, if they exist, leave out updates that are not finite.

        From now on: the first backward may come in a closure, when the optimizer's step has begun.
        """
        self._optimizers += [weakref.ref(each) for each in optimizers if each is not None]
        self._guard_updates()

    def scales(self) -> bool:
        """Return whether the next backward is that of a scaled loss: not one inside of another."""
        return self._active and not self._by_script and torch._C._current_graph_task_id() == -1

    def _scaled_by_script(
        self, original: Any, scaler: torch.amp.GradScaler, *args: Any, **kwargs: Any
    ) -> Any:
        self._by_script |= scaler.is_enabled()
        return original(scaler, *args, **kwargs)

    def _backward(
        self, original: Callable[..., None], tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        settings, plain = self._settings, all(isinstance(each, torch.Tensor) for each in roots)
        if settings is None or not plain or not self.scales():
            return original(tensors, grad_tensors, *args, **kwargs)
        self._guard_updates()
        scale = self._next_scale(settings, roots[0].device)
        one = grad_tensors is None or isinstance(grad_tensors, torch.Tensor)
        given = [grad_tensors] * len(roots) if one else grad_tensors
        upstream = [
            (scale if each is None else each * scale).to(root.dtype).view_as(root)
            for root, each in zip(roots, given, strict=True)
        ]
        for gradients in self._gradients():  # those of earlier backwards: all are divided below
            torch._foreach_mul_(gradients, scale.to(gradients[0].device))
        try:
            return original(roots, upstream, *args, **kwargs)
        finally:
            inverse = scale.double().reciprocal().float()  # as GradScaler has it
            for gradients in self._gradients():
                device = gradients[0].device
                found = self._found.setdefault(device, torch.zeros((), device=device))
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse.to(device))

    def _gradients(self) -> Iterator[list[torch.Tensor]]:
        """Yield the gradients of all optimizers, by device and dtype."""
        alive = [optimizer for each in self._optimizers if (optimizer := each()) is not None]
        found: dict[Any, dict[int, torch.Tensor]] = defaultdict(dict)
        for gradient in (each.grad for optimizer in alive for each in parameters_of(optimizer)):
            if gradient is not None:
                values = gradient._values() if gradient.is_sparse else gradient
                found[values.device, values.dtype][id(gradient)] = values
        yield from (list(each.values()) for each in found.values())

    def _next_scale(self, settings: LossScale, device: torch.device) -> torch.Tensor:
        """Return the scale of the next backward: another after an update, unless it is static."""
        if self._scale is None:
            self._scale = torch.full((), settings.init_scale, device=device)
            self._grown = torch.zeros((), dtype=torch.int32, device=device)
        if self._updated:
            self._updated = False
            found = torch.stack([each.to(device) for each in self._found.values()]).amax()
            if not settings.is_static:
                torch._amp_update_scale_(
                    self._scale,
                    self._grown,
                    found,
                    settings.growth_factor,
                    settings.backoff_factor,
                    settings.growth_interval,
                )
            for each in self._found.values():
                each.zero_()
        return self._scale

    def _guard_updates(self) -> None:
        """Guard what has no guard yet, or has got another own step since."""
        for optimizer in filter(None, (each() for each in self._optimizers)):
            if self._active and self._settings is not None:
                guard_optimizer_step(optimizer, self._may_update)

    def _may_update(self) -> bool:
        self._updated = bool(self._found)
        return not any(each.item() for each in self._found.values())
