"""Have an unmodified script accumulate gradients: only every n-th update is made.

    script's loop     forward, backward, step, zero_grad    forward, backward, step, zero_grad
    n = 2             micro-batch 1       -    -            micro-batch 2      made  made

It is how the script runs once its loop accumulates: gradients stay allocated through the forwards between two
updates. The batch size is changed elsewhere.
"""

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from memfit.ghost.ranks.collective_release_times import wait_until_collectives_released
from memfit.patching.patches import Patch
from memfit.strategies.mechanisms.optimizer_step import mark_as_step_wrapper, unwrapped_optimizer_step

if TYPE_CHECKING:
    from memfit.patching.installed_hooks import InstalledHooks

_OPTIMIZER = Patch(
    "torch.optim.optimizer:Optimizer",
    "__init__",
    "zero_grad",
    why="update only every few steps",
)
_MODULE = Patch("torch.nn.modules.module:Module", "zero_grad", why="keep gradients until the update")
_DDP = Patch(
    "torch.nn.parallel.distributed:DistributedDataParallel", "forward", why="keep gradients until the update"
)

_TWO = (
    "it has more than one optimizer, and memfit cannot tell which updates belong to the same batch. "
    "Accumulate in the script's own loop."
)
_DROPS = (
    "it releases gradients other than by zero_grad, so memfit cannot keep them from one micro-batch to the "
    "next. Accumulate in the script's own loop."
)
_CLOSURE = "{} evaluates the model several times in an update, so memfit cannot divide its batches."


class HeldBackUpdates:
    """Skips updates, and the clearing of gradients that belongs to them.

    Args:
        every: of so many calls of ``optimizer.step``, the last makes an update.
        refuse: called with the reason if the script cannot accumulate like this.
        settles: whether collectives settle at each skipped update, as they do at an update. In a run whose
            GPU work finishes late, they would wait for ever.
    """

    def __init__(self, every: int, refuse: Callable[[str], None], *, settles: bool = True) -> None:
        self._every, self._settles = every, settles
        self._refuse = refuse
        self._calls = 0
        self._may_clear = True
        self._optimizer: torch.optim.Optimizer | None = None
        self._gradients: list[StorageWeakRef] = []
        """Those that a skipped update left."""

    def install(self, hooks: "InstalledHooks") -> None:
        """Hook optimizers, and what clears gradients."""
        hooks.call_after(_OPTIMIZER, "__init__", self._hold_back)
        hooks.wrap(_OPTIMIZER, "zero_grad", self._cleared)
        hooks.wrap(_MODULE, "zero_grad", self._cleared)
        hooks.wrap(_DDP, "forward", self._distributed)

    def _hold_back(self, optimizer: torch.optim.Optimizer) -> None:
        def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self._step(optimizer, *args, **kwargs)

        held_back = types.MethodType(mark_as_step_wrapper(step), optimizer)
        optimizer.step = held_back  # type: ignore[method-assign]  # as schedulers do

    def _step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if self._optimizer is None:
            self._optimizer = optimizer
            if isinstance(optimizer, torch.optim.LBFGS):
                self._refuse(_CLOSURE.format(type(optimizer).__name__))
        if self._optimizer is not optimizer:
            self._refuse(_TWO)
        if any(gradient.expired() for gradient in self._gradients):  # type: ignore[no-untyped-call]
            self._refuse(_DROPS)
        self._calls += 1
        if self._calls % self._every == 0:
            self._gradients.clear()
            result = unwrapped_optimizer_step(optimizer)(*args, **kwargs)
            self._may_clear = True
            return result
        closure = args[0] if args else kwargs.get("closure")
        loss = None
        if closure is not None:  # it runs the forward and the backward, as in Lightning
            with torch.enable_grad():
                loss = closure()
        self._may_clear = False
        if not self._gradients:
            self._gradients = [
                StorageWeakRef(each.grad.untyped_storage())  # type: ignore[no-untyped-call]
                for group in optimizer.param_groups
                for each in group["params"]
                if each.grad is not None and each.grad.layout is torch.strided
            ]
        if self._settles:
            wait_until_collectives_released()
        return loss

    def _distributed(
        self, original: Callable[..., Any], model: DistributedDataParallel, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a model, which moves its gradients to other buckets once: after its first backward."""
        had_rebuilt = model._has_rebuilt_buckets
        result = original(model, *args, **kwargs)
        if model._has_rebuilt_buckets and not had_rebuilt:
            self._gradients.clear()
        return result

    def _cleared(self, original: Callable[..., None], owner: Any, *args: Any, **kwargs: Any) -> None:
        if self._may_clear:  # a closure may clear them inside the step that makes the update
            original(owner, *args, **kwargs)
