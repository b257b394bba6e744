"""What a plan changes about an optimizer: settings of ``memfit.OptimizerState``."""

from collections.abc import Iterator, Mapping
from typing import Any


def optimizer_state(settings: Mapping[str, Any]) -> Iterator[str]:
    """Name the settings, in a few words each."""
    if "bits" in settings:
        yield f"{settings['bits']}-bit optimizer state"
    if settings.get("offload"):
        yield "optimizer state offloaded"
    if settings.get("step_in_backward"):
        yield "step in backward"


def optimizer_changes(settings: Mapping[str, Any]) -> Iterator[str]:
    """Say what a plan changes about the optimizer."""
    if "bits" in settings:
        yield f"The optimizer's state has {settings['bits']} bits ({settings.get('backend', 'torchao')})."
    if settings.get("offload"):
        yield "The optimizer's state waits on the host between updates, which are made on the GPU."
    if settings.get("step_in_backward"):
        yield "The backward updates each parameter once its gradient is complete, and frees the gradient."
