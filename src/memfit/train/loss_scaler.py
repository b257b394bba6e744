"""Loss scaling: PyTorch's own, which also reports whether a gradient was not finite."""

from typing import Annotated, TypedDict

import torch
from msgspec import Meta

from memfit.recording.optimizer_accessors import parameters_of
from memfit.strategies.precision import LossScale
from memfit.train.ranks.rank_agreement import SingleRank
from memfit.user_lines import warn_user

_LOW = 2.0**-10
"""A loss scale below which no training works: its float16 gradients would overflow unscaled."""


class LossScaleState(TypedDict):
    """The loss scale in force, as saved."""

    scale: Annotated[float, Meta(ge=0, le=torch.finfo(torch.float32).max)]
    growth_tracker: Annotated[int, Meta(ge=0)]


class _GradScaler(torch.amp.GradScaler):
    def found_inf(self, optimizer: torch.optim.Optimizer, ranks: SingleRank) -> bool:
        """Return whether unscaling found a gradient that is not finite, on any rank: ``update`` backs off."""
        found = self._found_inf_per_device(optimizer)
        (anywhere,) = ranks.agree("an update", any(bool(flag.item()) for flag in found.values()))
        if anywhere:
            for flag in found.values():
                flag.fill_(1.0)
        return bool(anywhere)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        """Create both tensors or none: with only one, GradScaler would never create the other."""
        try:
            super()._lazy_init_scale_growth_tracker(dev)
        except BaseException:
            self._scale = self._growth_tracker = None
            raise

    def forget(self) -> None:
        """Reset to the state before ``unscale_``: the step that began will not complete."""
        self._per_optimizer_states.clear()


class LossScaler:
    """Loss scaling for one engine; does nothing without settings.

    Args:
        settings: None for no scaling.
        device: the device type, ``cuda`` or ``cpu``.
        ranks: that have the same scale, and skip the same windows.
    """

    def __init__(self, settings: LossScale | None, device: str, ranks: SingleRank) -> None:
        self._settings, self._ranks = settings, ranks
        self._warned = False
        self._static = settings is not None and settings.is_static
        self._scaler = None if settings is None else _GradScaler(device, **settings.scaler_arguments())

    @property
    def scale(self) -> float | None:
        """The current factor; None without scaling."""
        return None if self._scaler is None else self._scaler.get_scale()

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return a loss multiplied by the scale."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> bool:
        """Divide an optimizer's gradients by the scale; return whether any of them is not finite."""
        if self._scaler is None:
            return False
        if self._scaler._scale is None:  # a run may resume just before an update, without a loss
            self._scaler._lazy_init_scale_growth_tracker(next(parameters_of(optimizer)).device)
        self._scaler.unscale_(optimizer)
        return self._scaler.found_inf(optimizer, self._ranks)

    def update(self) -> None:
        """Set the next window's scale from what ``unscale`` found."""
        if self._scaler is not None and self._settings is not None:
            self._scaler.update(self._settings.init_scale if self._static else None)

    def warn_if_low(self) -> None:
        """Warn if skipped windows have lowered the scale so far that float16's range cannot be the cause."""
        if self._scaler is None or self._static or self._warned or self._scaler.get_scale() >= _LOW:
            return
        self._warned = True
        warn_user(
            "Every update is skipped: gradients are not finite even at a loss scale of "
            f"{self._scaler.get_scale():g}. The limited range of float16 is therefore not the cause. Check "
            "the loss itself.",
        )

    def forget(self) -> None:
        """Discard a window whose update failed."""
        if self._scaler is not None:
            self._scaler.forget()

    def tensors(self) -> list[torch.Tensor]:
        """Return what an update changes in place: the scale, and the number of windows since it grew."""
        if self._scaler is None:
            return []
        found = (self._scaler._scale, self._scaler._growth_tracker)
        return [tensor for tensor in found if tensor is not None]

    def state_dict(self) -> LossScaleState | None:
        """Return what a resumed run needs; None without scaling."""
        if self._scaler is None:
            return None
        state = self._scaler.state_dict()
        return {"scale": state["scale"], "growth_tracker": state["_growth_tracker"]}

    def load_state_dict(self, state: LossScaleState | None) -> None:
        """Continue from a saved scale with the settings of this run: a static scale stays as set.

        Without a saved scale, from a run without scaling, the scale starts from its initial value.
        """
        if self._scaler is not None and state is not None and not self._static:
            own = self._scaler.state_dict()
            steps = min(state["growth_tracker"], own["growth_interval"] - 1)  # it grows when they are equal
            self._scaler.load_state_dict(own | {"scale": state["scale"], "_growth_tracker": steps})

    def can_resume(self, state: LossScaleState | None) -> bool:
        """Return whether ``load_state_dict`` allows saved gradients to be unscaled correctly."""
        if self._scaler is None or state is None:
            return self._scaler is None and state is None
        return not self._static or self._scaler.get_scale() == state["scale"]
