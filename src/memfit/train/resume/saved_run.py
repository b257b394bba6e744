"""The form of a saved run: what is there, and of what kind.

A file may be damaged, or written by others: all of it is looked at before anything of a run is changed.
"""

from typing import Annotated, Any, NotRequired, TypedDict

import msgspec
import torch
from msgspec import Meta

from memfit.errors import FileFormatError
from memfit.train.accumulation_window import Window
from memfit.train.resume.state_file import random_state, set_random_state

VERSION = 1
Count = Annotated[int, Meta(ge=0)]
Some = Annotated[int, Meta(ge=1)]


class Random(TypedDict):
    """Where generators stood."""

    python: Any
    torch: torch.Tensor
    numpy: NotRequired[dict[str, Any]]
    cuda: NotRequired[list[torch.Tensor]]
    own: list[Any]
    """The loader's."""


class Place(TypedDict):
    """Where training stood in its data: see ``Position``."""

    consumed: Count
    carried: Count
    began: Random | None
    before: Random | None
    batch_size: Some | None


class Scale(TypedDict):
    """The loss scale in force."""

    scale: Annotated[float, Meta(ge=0, le=torch.finfo(torch.float32).max)]
    growth_tracker: Count


class Saved(TypedDict):
    """A run."""

    version: int
    steps: Some
    """Micro-batches of a window."""
    micro_step: Count
    optimizer_step: Count
    epoch: Count
    finer: Annotated[int, Meta(ge=1, le=1 << 40)]
    model: dict[str, Any]
    others: dict[str, torch.Tensor]
    """What the optimizer updates and is not the model's."""
    groups: list[list[str]]
    """Names of what the optimizer updates, by parameter group."""
    optimizer: dict[str, Any]
    optimizer_class: str
    scheduler: dict[str, Any] | None
    scheduler_class: str | None
    precision: dict[str, Any]
    scaler: Scale | None
    position: Place
    random: Random
    window: Window | None
    gradients: dict[str, torch.Tensor]
    callbacks: list[tuple[str, Any]]


def checked(saved: dict[str, Any]) -> Saved:
    """Return a state whose form is right.

    Raises:
        FileFormatError: it is not; or it is of another version.
    """
    if saved.get("version") != VERSION:
        raise FileFormatError(
            f"Cannot resume: the state is of version {saved.get('version')}, and this memfit reads {VERSION}."
        )
    try:
        read = msgspec.convert(saved, Saved)
    except msgspec.ValidationError as error:
        raise FileFormatError(f"Cannot resume: the state is damaged, or no run's: {error}.") from None
    window = read["window"]
    if window is not None and not _can_be(window):
        raise FileFormatError(f"Cannot resume: the state's window cannot be, {window}.")
    if window is None and read["gradients"]:
        raise FileFormatError("Cannot resume: the state has gradients, and no window that they are of.")
    _try([read["random"], read["position"]["began"], read["position"]["before"]])
    return read


def _can_be(window: Window) -> bool:
    weighed = window.weight > 0 and window.total is not None and window.total > 0 and window.loss is not None
    nothing = window.weight == 0 and window.total is None and window.loss is None
    return 0 <= window.done <= window.planned and (weighed or nothing) and not window.interrupted


def _try(states: list[Any]) -> None:
    """Put generators where they stood; and back to where they stand."""
    now = random_state()
    try:
        for state in states:
            if state is not None:
                set_random_state(state)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        raise FileFormatError(
            f"Cannot resume: the state's random numbers cannot be drawn here ({error})."
        ) from None
    finally:
        set_random_state(now)
