"""The end of a window: its gradients become an update, or nothing changes.

    sums -> correct -> unscale -> clip -> step -> masters -> scheduler -> next scale
                          |               |_____________________________________|
        not finite: no step, no scheduler    interrupted or out of memory: everything is restored from a copy
                                             on the host, if there is one; if not, the run is torn

If the optimizer steps in backward, all this happens before the window's end: the copy is made when the window
opens.
"""

import operator
import re
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from memfit.errors import TornUpdateError, UsageError
from memfit.recording.optimizer_accessors import parameters_of
from memfit.strategies.apply import AppliedToOptimizer
from memfit.strategies.mechanisms.master_weights import round_copies_into_parameters
from memfit.train.loss_scaler import LossScaler
from memfit.train.ranks.rank_agreement import SingleRank, is_out_of_memory
from memfit.train.step_snapshots import OptimizerBackup
from memfit.train.training_job import SchedulerAndInterval
from memfit.train.window_gradients import GradientSums, WindowGradients

INTERRUPTED = (
    "The last update was interrupted: some parameters may be updated and others not. "
    "Load the last saved state. To avoid this, use Engine(..., protect='always'), which "
    "copies parameters and optimizer state to the host before each update and restores "
    "them."
)
_REFUSED_BY_DTENSOR = re.compile("Sharding propagation failed|does not have a sharding strategy")
"""PyTorch 2.14's words, in torch/distributed/tensor/_dispatch.py and _sharding_prop.py."""
Protect = Literal["auto", "always", "never"]


class OptimizerUpdate:
    """The update of an optimizer at the end of each window.

    Args:
        optimizer: its ``step`` is the update.
        schedule: of the learning rate.
        scaler: scales the loss.
        sums: holds the gradients, if the parameters do not.
        masters: the tensors that the optimizer updates in place of parameters.
        model: its parameters are clipped in its order.
        max_grad_norm: None for no clipping.
        protect: when to copy parameters and states to the host before the step, so that they can be restored
            if memory runs out inside it. ``"auto"``: the first time, when states are allocated, and after
            the allocator had to release its cache.
        on_optimizer: its settings, as they were applied.
        ranks: that update together: all copy before an update, or none.

    Raises:
        UsageError: the optimizer steps in backward, and gradients are to be clipped as well.
    """

    def __init__(  # noqa: PLR0913 - the parts that meet here
        self,
        optimizer: torch.optim.Optimizer,
        schedule: SchedulerAndInterval,
        scaler: LossScaler,
        sums: GradientSums | None,
        masters: dict[nn.Parameter, nn.Parameter],
        model: nn.Module,
        *,
        max_grad_norm: float | None,
        protect: Protect,
        on_optimizer: AppliedToOptimizer,
        ranks: SingleRank,
    ) -> None:
        if protect not in get_args(Protect):
            raise UsageError(f"protect must be one of {', '.join(get_args(Protect))}, not {protect!r}.")
        if on_optimizer.in_backward is not None and max_grad_norm is not None:
            raise UsageError(
                "step_in_backward and max_grad_norm cannot be combined. step_in_backward updates parameters "
                "before the norm of all gradients is known. Leave out one of the two."
            )
        self.optimizer, self.schedule, self.scaler = optimizer, schedule, scaler
        self.scheduler = schedule.scheduler
        self.gradients, self.masters = WindowGradients(optimizer, sums), masters
        self._model = list(model.parameters())
        self._ordered: tuple[list[nn.Parameter], list[nn.Parameter]] = [], []
        self._max_grad_norm, self._protect, self._ranks = max_grad_norm, protect, ranks
        self._devices = {parameter.device for parameter in parameters_of(optimizer) if parameter.is_cuda}
        self._cache_releases, self._most_gradients = self._count_cache_releases(), 0
        self.offloaded, self.in_backward = on_optimizer.offloaded, on_optimizer.in_backward
        if self.in_backward is not None:
            self.in_backward.active = False
        self._backup: OptimizerBackup | None = None
        self._stepping = False
        self.scheduler_error: Exception | None = None
        """Raised by the scheduler after parameters were updated: such an update is made and counted."""

    @property
    def torn(self) -> bool:
        """Whether an update began, and was neither restored nor counted."""
        return self._stepping or (self.in_backward is not None and bool(self.in_backward.stepped))

    def begin_window(self) -> None:
        """Prepare for a window's first backward: drop gradients left by others."""
        self.gradients.begin()
        if self.in_backward is not None:
            self.in_backward.active = True
            count = sum(parameter.requires_grad for parameter in parameters_of(self.optimizer))
            self._backup = self._copy(count)

    def take_gradients(self) -> None:
        """Take gradients from here on, in addition to existing ones."""
        self.gradients.take()
        if self.in_backward is not None:
            self.in_backward.active = True

    def hooks(self) -> list[RemovableHandle]:
        """Return the hooks on parameters: handles, which keep nothing alive."""
        return self.gradients.hooks()

    def finish(self) -> None:
        """Accept the current state as complete: an update that was counted, or a state that was loaded."""
        self._stepping, self._backup = False, None
        if self.in_backward is not None:
            self.in_backward.stepped.clear()

    def values_of_masters(self) -> dict[nn.Parameter, torch.Tensor]:
        """Return the float32 copies of parameters, wherever they are."""
        if self.offloaded is None:
            return dict(self.masters)
        return {parameter: self.offloaded.value_of(master) for parameter, master in self.masters.items()}

    def finish_loading(self) -> None:
        """Accept a state that was loaded."""
        if self.offloaded is not None:
            self.offloaded.send_all()
        self.finish()

    def roll_back(self, error: BaseException) -> None:
        """Restore what an update changed before an exception ended it.

        Raises:
            TornUpdateError: memory ran out, and there is no copy to restore.
        """
        self.scaler.forget()
        self.scheduler_error = None
        if self.offloaded is not None:
            self.offloaded.finish()  # before anything is restored: copies may still write to the host
        self._most_gradients = 0  # whatever failed may fail again: the next update is at risk too
        if self.torn and self._backup is not None:
            self._backup.restore()
            round_copies_into_parameters(self.values_of_masters())
            self.finish()
        if self.offloaded is not None:
            self.offloaded.send_interrupted()
        if self.torn and is_out_of_memory(error):
            raise TornUpdateError(f"Memory ran out in an update. {INTERRUPTED}") from error

    def run(
        self, correction: float, loss: torch.Tensor, before_step: Callable[[], None]
    ) -> tuple[bool, torch.Tensor | None]:
        """Update from a window's gradients; return whether one was not finite, and their norm if clipped.

        An update is ``torn`` from its first change until ``finish``, when the engine counts it.

        Args:
            correction: the factor for the gradients.
            loss: the mean over the window, for a scheduler that watches it.
            before_step: called when the gradients are final, unless one is not finite.
        """
        self.gradients.finish(correction)
        found_inf = self.scaler.unscale(self.optimizer)
        if found_inf:
            self.scaler.update()
            self.scaler.warn_if_low()
            return True, None
        updated = [parameter for parameter in self._in_model_order() if parameter.grad is not None]
        if not (updated or (self.in_backward is not None and self.in_backward.stepped)):
            raise UsageError(
                "None of the optimizer's parameters received a gradient. Check that the loss depends on the "
                "model whose parameters the optimizer updates."
            )
        norm = None
        if self._max_grad_norm is not None:
            norm = nn.utils.clip_grad_norm_(updated, self._max_grad_norm)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # a DTensor's local part
        before_step()
        if self.in_backward is None:
            self._backup = self._copy(len(updated))
        self._stepping = True
        self._step()
        if self.offloaded is None:
            round_copies_into_parameters(self.masters)
        try:
            self.schedule.after_update(loss)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self.scheduler_error = error
        self.scaler.update()
        return False, norm

    def _step(self) -> None:
        try:
            self.optimizer.step()
        except RuntimeError as error:
            if _REFUSED_BY_DTENSOR.search(str(error)) is None:
                raise
            raise UsageError(
                f"{type(self.optimizer).__name__} cannot update parameters that fully_shard divides among "
                "the ranks: PyTorch's DTensor refuses an operation of its step "
                f"({next(iter(str(error).splitlines()))}). Use another optimizer, such as AdamW, or "
                "Sharding('zero1')."
            ) from error

    def clear(self) -> None:
        """Drop all gradients."""
        self.gradients.clear()
        if self.in_backward is not None:
            self.in_backward.active = False

    def _copy(self, count: int) -> OptimizerBackup | None:
        """Copy what an update of this many parameters may change, if it is at risk."""
        risky = self._is_risky(count)
        if not risky:
            return None
        value_of = None if self.offloaded is None else self.offloaded.value_of
        return OptimizerBackup(self.optimizer, self.scheduler, self.scaler.tensors(), value_of)

    def _is_risky(self, count: int) -> bool:
        if self._protect != "auto":
            return self._protect == "always"
        releases = self._count_cache_releases()
        risky = releases is None or releases != self._cache_releases or count > self._most_gradients
        risky = bool(self._ranks.agree("an update", risky)[0])
        self._cache_releases, self._most_gradients = releases, max(count, self._most_gradients)
        return risky

    def _count_cache_releases(self) -> int | None:
        """Return how often PyTorch's allocator had to release its cache: a sign that memory is tight.

        None if another allocator is in its place (``memfit.arena``), which does not count: assume it may be.
        """
        if self._devices and torch.cuda.get_allocator_backend() == "pluggable":
            return None
        # memory_stats sorts some 160 figures, which takes 50 us of each update.
        stats = (torch.cuda.memory_stats_as_nested_dict(device) for device in self._devices)
        return sum(int(each["num_alloc_retries"]) for each in stats)

    def _in_model_order(self) -> list[nn.Parameter]:
        """Return the optimizer's parameters in the model's order, on which the norm's last bits depend."""
        own = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        before, ordered = self._ordered
        if len(own) != len(before) or not all(map(operator.is_, own, before)):
            known = {id(self.masters.get(each, each)): place for place, each in enumerate(self._model)}
            ordered = sorted(own, key=lambda each: known.get(id(each), len(known)))
            self._ordered = own, ordered
        return ordered
