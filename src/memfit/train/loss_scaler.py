"""Loss scaling: PyTorch's own, which says whether a step was applied."""

import warnings

import torch

from memfit.strategies.mechanisms.optimizer_info import parameters_of
from memfit.strategies.precision import LossScale
from memfit.train.resume.saved_run import Scale

_LOW = 2.0**-10
"""A loss scale that no training needs: float16 gradients of that size would have overflowed unscaled."""


class _GradScaler(torch.amp.GradScaler):
    def found_inf(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether unscaling an optimizer's gradients met one that is not finite."""
        found = self._found_inf_per_device(optimizer)
        return any(bool(flag.item()) for flag in found.values())

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        """Make both tensors or none: with one alone, GradScaler would never make the other."""
        try:
            super()._lazy_init_scale_growth_tracker(dev)
        except BaseException:
            self._scale = self._growth_tracker = None
            raise

    def make_ready(self, device: torch.device) -> None:
        """Have the scale on a device, as the first loss would: a run may go on just before an update."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device)

    def forget(self) -> None:
        """Be as before ``unscale_``: a step that was begun will not be ended."""
        self._per_optimizer_states.clear()


class Scaler:
    """What loss scaling does to a window: once each, at its end.

    Args:
        settings: None for no scaling.
        device: kind of device, ``cuda`` or ``cpu``.
    """

    def __init__(self, settings: LossScale | None, device: str) -> None:
        self._settings = settings
        self._warned = False
        self._static = settings is not None and settings.mode == "static"
        self._scaler = (
            None
            if settings is None
            else _GradScaler(
                device,
                init_scale=settings.init_scale,
                growth_factor=max(settings.growth_factor, 1.0 + 1e-9),  # GradScaler takes no 1.0
                backoff_factor=settings.backoff_factor,
                growth_interval=settings.growth_interval,
            )
        )

    @property
    def scale(self) -> float | None:
        """The factor in force; None without scaling."""
        return None if self._scaler is None else self._scaler.get_scale()

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return a loss times the scale."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> bool:
        """Divide an optimizer's gradients by the scale; return whether one of them is not finite."""
        if self._scaler is None:
            return False
        self._scaler.make_ready(next(parameters_of(optimizer)).device)
        self._scaler.unscale_(optimizer)
        return self._scaler.found_inf(optimizer)

    def update(self) -> None:
        """Set the next window's scale, by what ``unscale`` found."""
        if self._scaler is not None and self._settings is not None:
            self._scaler.update(self._settings.init_scale if self._static else None)

    def warn_if_low(self) -> None:
        """Say so, if skipped windows have brought the scale to where it cannot be float16's range."""
        if self._scaler is None or self._static or self._warned or self._scaler.get_scale() >= _LOW:
            return
        self._warned = True
        warnings.warn(
            "Windows are skipped, one after the other: gradients are not finite at a loss scale of "
            f"{self._scaler.get_scale():g}, too. It is not float16's range: look at the loss itself.",
            stacklevel=2,
        )

    def forget(self) -> None:
        """Forget a window whose update failed."""
        if self._scaler is not None:
            self._scaler.forget()

    def tensors(self) -> list[torch.Tensor]:
        """Return what an update changes in place: the scale, and windows since it grew."""
        if self._scaler is None:
            return []
        return [one for one in (self._scaler._scale, self._scaler._growth_tracker) if one is not None]

    def state_dict(self) -> Scale | None:
        """Return what a resumed run needs; None without scaling."""
        if self._scaler is None:
            return None
        state = self._scaler.state_dict()
        return {"scale": state["scale"], "growth_tracker": state["_growth_tracker"]}

    def load_state_dict(self, state: Scale | None) -> None:
        """Go on from the scale of a state, by the settings of this run: a static one stays what it is.

        Without one, of a run without scaling, it begins anew.
        """
        if self._scaler is not None and state is not None and not self._static:
            own = self._scaler.state_dict()
            steps = min(state["growth_tracker"], own["growth_interval"] - 1)  # it grows when they are equal
            self._scaler.load_state_dict(own | {"scale": state["scale"], "_growth_tracker": steps})

    def would_go_on(self, state: Scale | None) -> bool:
        """Whether gradients of a loss that was scaled so are unscaled rightly after ``load_state_dict``."""
        if self._scaler is None or state is None:
            return self._scaler is None and state is None
        return not self._static or self._scaler.get_scale() == state["scale"]
