"""The formats of a saved run: of one process, and of several ranks in a common file and a file of each rank.

A file may be damaged, or written by another program: all of it is checked before a run is changed. The files
of ranks together make a ``SavedRun``, which is checked again.
"""

import re
from typing import Annotated, Any, NotRequired, TypedDict, TypeVar

import msgspec
import torch
from msgspec import Meta

from memfit.errors import FileFormatError
from memfit.random_state import get_random_state, set_random_state
from memfit.train.accumulation_window import AccumulationWindow
from memfit.train.data.loader_order import SavedLoaderOrder
from memfit.train.loss_scaler import LossScaleState

VERSION = 1
FOLDER_NAME = re.compile(r"^\d+-[0-9a-f]{12}$")
Count = Annotated[int, Meta(ge=0)]
PositiveCount = Annotated[int, Meta(ge=1)]
_File = TypeVar("_File")


class SavedRandomState(TypedDict):
    """The states of random number generators."""

    python: Any
    torch: torch.Tensor
    numpy: NotRequired[dict[str, Any]]
    cuda: NotRequired[list[torch.Tensor]]
    own: list[Any]
    """The loader's own generators."""


class SavedPosition(TypedDict):
    """The position in the data: see ``LoaderPosition``."""

    consumed: Count
    carried: Count
    began: SavedRandomState | None
    before: SavedRandomState | None
    batch_size: PositiveCount | None
    order: NotRequired[SavedLoaderOrder]


class SavedRun(TypedDict):
    """A saved run."""

    version: int
    steps: PositiveCount
    """Micro-batches of a window."""
    micro_step: Count
    optimizer_step: Count
    epoch: Count
    finer: Annotated[int, Meta(ge=1, le=1 << 40)]
    model: dict[str, Any]
    others: dict[str, torch.Tensor]
    """Tensors outside the model's ``state_dict``: non-persistent buffers, a loss's parameters."""
    groups: list[list[str]]
    """Names of the parameters in each of the optimizer's groups."""
    optimizer: dict[str, Any]
    optimizer_class: str
    scheduler: dict[str, Any] | None
    scheduler_class: str | None
    schedule: NotRequired[str]
    """When the scheduler steps, in words."""
    precision: dict[str, Any]
    scaler: LossScaleState | None
    position: SavedPosition
    random: SavedRandomState
    window: AccumulationWindow | None
    gradients: dict[str, torch.Tensor]
    callbacks: list[tuple[str, Any]]


class SavedOptimizerParameterState(TypedDict):
    """The optimizer's state of one parameter."""

    tensors: list[str]
    """Names of its tensors, which the folder holds."""
    values: dict[str, Any]
    """All else."""


class SharedRunFile(TypedDict):
    """The file that all ranks share."""

    version: int
    ranks: PositiveCount
    """The number of ranks that saved."""
    folder: Annotated[str, Meta(pattern=FOLDER_NAME.pattern)]
    owners: list[Count]
    """For each parameter of the optimizer, the rank whose file has its ``SavedOptimizerParameterState``."""
    run: dict[str, Any]


class RankRunFile(TypedDict):
    """The file of one rank: all that differs between ranks."""

    version: int
    rank: Count
    entries: dict[int, SavedOptimizerParameterState]
    run: dict[str, Any]


class _SharedRun(TypedDict):
    groups: list[list[str]]
    optimizer: list[dict[str, Any]]


class _OwnRun(TypedDict):
    model: dict[str, Any]
    gradients: dict[str, torch.Tensor]
    position: SavedPosition
    random: SavedRandomState


def check_saved_run(saved: dict[str, Any]) -> SavedRun:
    """Return a state if its format is valid."""
    read = _converted(saved, SavedRun)
    window = read["window"]
    if window is not None and not _is_possible(window):
        raise FileFormatError(
            "Cannot resume: the state is damaged. The counts and sums of its accumulation window "
            f"contradict each other: {window}."
        )
    if window is None and read["gradients"]:
        raise FileFormatError(
            "Cannot resume: the state is damaged. It has gradients, but no accumulation window."
        )
    _try_generators([read["random"], read["position"]["began"], read["position"]["before"]])
    return read


def check_shared_run_file(saved: dict[str, Any]) -> SharedRunFile:
    """Return a common file's content if its format is valid."""
    file = _converted(saved, SharedRunFile, _SharedRun)
    names = sum(map(len, file["run"]["groups"]))
    if len(file["owners"]) != names or any(owner >= file["ranks"] for owner in file["owners"]):
        raise FileFormatError(
            f"Cannot resume: the state is damaged. It names {len(file['owners'])} owners of the optimizer's "
            f"{names} parameters, up to rank {max(file['owners'], default=0)} of {file['ranks']}."
        )
    return file


def check_rank_run_file(saved: dict[str, Any], rank: int) -> RankRunFile:
    """Return the content of a rank's file if its format is valid."""
    file = _converted(saved, RankRunFile, _OwnRun)
    if file["rank"] != rank:
        raise FileFormatError(
            f"Cannot resume: the state is damaged. The file of rank {rank} is that of rank {file['rank']}."
        )
    return file


def _converted(saved: dict[str, Any], kind: type[_File], run: type | None = None) -> _File:
    """Return what a file holds if it has this format; ``run`` is that of its entry of this name."""
    if saved.get("version") != VERSION:
        raise FileFormatError(
            f"Cannot resume: the state has version {saved.get('version')}, but this memfit reads "
            f"only version {VERSION}."
        )
    try:
        file = msgspec.convert(saved, kind)
        if run is not None:
            msgspec.convert(saved["run"], run)
    except msgspec.ValidationError as error:
        raise FileFormatError(
            f"Cannot resume: the state is damaged, or is not the state of a training run ({error})."
        ) from None
    return file


def _is_possible(window: AccumulationWindow) -> bool:
    weighted = window.weight > 0 and window.total is not None and window.total > 0 and window.loss is not None
    empty = window.weight == 0 and window.total is None and window.loss is None
    return 0 <= window.done <= window.planned and (weighted or empty) and not window.interrupted


def _try_generators(states: list[Any]) -> None:
    """Check that generators accept the saved states; restore their current ones."""
    now = get_random_state()
    try:
        for state in states:
            if state is not None:
                set_random_state(state)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        raise FileFormatError(
            "Cannot resume: this machine's random number generators do not accept the saved states "
            f"({error})."
        ) from None
    finally:
        set_random_state(now)
