"""The end of a window: gradients become an update, or nothing changes.

    sums -> correct -> unscale -> clip -> step -> masters -> scheduler -> next scale
                          |               |_____________________________________|
        not finite: no step, no scheduler    interrupted, or memory runs out: all is put back from a copy on
                                             the host, if there is one; if not, the run is torn, and says so

Where the optimizer steps in backward, all this is before the window's end: the copy is made when it begins.
"""

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from memfit.errors import TornUpdateError, UsageError
from memfit.strategies.mechanisms.optimizer_info import parameters_of
from memfit.strategies.mechanisms.step_in_backward import StepInBackward
from memfit.train import master_weights
from memfit.train.accumulation_window import Window
from memfit.train.cuda_graphs import Graphs
from memfit.train.gradient_sums import GradientSums
from memfit.train.loss_scaler import Scaler
from memfit.train.oom_retry import Backup, out_of_memory

INTERRUPTED = (
    "The last update was interrupted, and some parameters may be updated while others are not. Load the last "
    "state that was saved; Engine(protect='always') copies parameters and optimizer state to the host before "
    "each update, so that they can be put back."
)
Protect = Literal["auto", "always", "never"]


class Update:
    """What is done to an optimizer at the end of each window.

    Args:
        optimizer: whose ``step`` is the update.
        scheduler: moves with it, if there is one.
        scaler: of the loss.
        sums: where gradients are, if not on the parameters.
        masters: what the optimizer updates in place of parameters.
        max_grad_norm: None for no clipping.
        protect: when a copy of parameters and states is made on the host before the step, so that they can be
            put back if memory runs out inside it. ``"auto"``: the first time, when states are allocated, and
            after the allocator had to give back its cache.
        graphs: what steps in the optimizer's place and zeroes gradients, where it was captured.
        in_backward: parameters are updated in backward, and the step at the end finds nothing to do.

    Raises:
        UsageError: the optimizer cannot be stepped in backward, or gradients are to be clipped as well.
    """

    def __init__(  # noqa: PLR0913 - the parts that meet here
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        scaler: Scaler,
        sums: GradientSums | None,
        masters: dict[nn.Parameter, nn.Parameter],
        *,
        max_grad_norm: float | None,
        protect: Protect,
        graphs: Graphs | None = None,
        in_backward: bool = False,
    ) -> None:
        if protect not in get_args(Protect):
            raise UsageError(f"protect={protect!r} is none of {', '.join(get_args(Protect))}.")
        if in_backward and max_grad_norm is not None:
            raise UsageError(
                "step_in_backward updates parameters before the norm of all gradients is known: leave out "
                "max_grad_norm, or step_in_backward."
            )
        self.optimizer, self.scheduler, self.scaler = optimizer, scheduler, scaler
        self.sums, self.masters = sums, masters
        self._max_grad_norm, self._protect = max_grad_norm, protect
        self._devices = {one.device for one in parameters_of(optimizer) if one.is_cuda}
        self._given_back, self._most_gradients = self._cache_given_back(), 0
        self.graphs = graphs
        self._stepper = graphs or optimizer
        self.in_backward = StepInBackward(optimizer) if in_backward else None
        if self.in_backward is not None:
            self.in_backward.active = False
        self._backup: Backup | None = None
        self._stepping = False
        self.failure: Exception | None = None
        """What the scheduler raised after parameters were updated: such an update is made, and counted."""

    @property
    def torn(self) -> bool:
        """Whether an update was begun, and was neither put back nor counted."""
        return self._stepping or (self.in_backward is not None and bool(self.in_backward.stepped))

    def begin(self) -> None:
        """Be ready for a window's first backward: gradients that someone else left are not the window's."""
        if self._with_gradients() or (self.sums is not None and self.sums.left):
            self.clear()
        self.go_on()
        if self.in_backward is not None:
            self._backup = self._copy(sum(one.requires_grad for one in parameters_of(self.optimizer)))

    def go_on(self) -> None:
        """Take gradients from here on, with those that there are."""
        for taking in (self.sums, self.in_backward):
            if taking is not None:
                taking.active = True

    def hooks(self) -> list[RemovableHandle]:
        """Return what was put on parameters: handles, that keep nothing alive."""
        return [hook for taking in (self.sums, self.in_backward) if taking for hook in taking.hooks()]

    def done(self) -> None:
        """Take what is there for whole: an update that was counted, or a state that was loaded."""
        self._stepping, self._backup = False, None
        if self.in_backward is not None:
            self.in_backward.stepped.clear()

    def undo(self, error: BaseException) -> None:
        """Put back what an update changed that an exception ended.

        Raises:
            TornUpdateError: memory ran out, and there was no copy to put back.
        """
        self.scaler.forget()
        self.failure = None
        self._most_gradients = 0  # what failed may fail again: the next update is a risk, too
        if self.torn and self._backup is not None:
            self._backup.restore()
            master_weights.write(self.masters)
            self.done()
        elif self.torn and out_of_memory(error):
            raise TornUpdateError(f"Memory ran out in an update. {INTERRUPTED}") from error

    def make(self, window: Window, before_step: Callable[[], None]) -> tuple[bool, torch.Tensor | None]:
        """Update from a window's gradients; return whether one was not finite, and their norm if clipped.

        ``before_step`` is called when the gradients are final, unless one is not finite. An update is
        ``torn`` from its first change on until it is ``done``: counted by the engine.
        """
        if self.sums is not None:
            self._expect_no_others(self.sums)
            self.sums.put_back(window.correction)
        elif window.correction != 1.0:
            torch._foreach_mul_(self._gradients(), window.correction)
        found_inf = self.scaler.unscale(self.optimizer)
        if found_inf:
            self.scaler.update()
            self.scaler.warn_if_low()
            return True, None
        updated = self._with_gradients()
        if not (updated or (self.in_backward is not None and self.in_backward.stepped)):
            raise UsageError(
                "None of the optimizer's parameters has a gradient: are they those of the model that the "
                "loss comes from?"
            )
        norm = None
        if self._max_grad_norm is not None:
            norm = nn.utils.clip_grad_norm_(updated, self._max_grad_norm)
        before_step()
        if self.in_backward is None:
            self._backup = self._copy(len(updated))
        self._stepping = True
        self._stepper.step()
        master_weights.write(self.masters)
        try:
            self._schedule(window)
        except Exception as error:
            if out_of_memory(error):
                raise
            self.failure = error
        self.scaler.update()
        return False, norm

    def _schedule(self, window: Window) -> None:
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(window.mean_loss())
        elif self.scheduler is not None:
            self.scheduler.step()

    def multiply(self, factor: float) -> None:
        """Multiply the gradients so far."""
        if self.sums is not None:
            self.sums.multiply(factor)
        if gradients := self._gradients():
            torch._foreach_mul_(gradients, factor)

    def clear(self) -> None:
        """Drop all gradients."""
        self._stepper.zero_grad(set_to_none=True)
        if self.sums is not None:
            self.sums.clear()
        if self.in_backward is not None:
            self.in_backward.active = False

    def _expect_no_others(self, sums: GradientSums) -> None:
        """Complain about gradients that are not summed in float32 as the others are."""
        for parameter in self._with_gradients():
            if parameter.dtype.itemsize < torch.float32.itemsize and not sums.has(parameter):
                raise UsageError(
                    f"A parameter of shape {tuple(parameter.shape)} has a gradient, and had "
                    "requires_grad=False when the engine was made: it has no float32 sum or copy. Make the "
                    "engine after thawing."
                )

    def _copy(self, count: int) -> Backup | None:
        """Copy what an update of so many parameters may change, if it is a risk."""
        risky = self._is_risky(count)
        return Backup(self.optimizer, self.scheduler, self.scaler.tensors()) if risky else None

    def _is_risky(self, count: int) -> bool:
        if self._protect != "auto":
            return self._protect == "always"
        given_back = self._cache_given_back()
        risky = given_back is None or given_back != self._given_back or count > self._most_gradients
        self._given_back, self._most_gradients = given_back, max(count, self._most_gradients)
        return risky

    def _cache_given_back(self) -> int | None:
        """Return how often PyTorch's allocator had to give back its cache: a sign that memory is tight.

        None where another one is in its place (``memfit.arena``), which cannot be asked: then it may be.
        """
        if self._devices and torch.cuda.get_allocator_backend() == "pluggable":
            return None
        return sum(int(torch.cuda.memory_stats(device)["num_alloc_retries"]) for device in self._devices)

    def _with_gradients(self) -> list[nn.Parameter]:
        return [one for one in parameters_of(self.optimizer) if one.grad is not None]

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self._with_gradients() if parameter.grad is not None]
