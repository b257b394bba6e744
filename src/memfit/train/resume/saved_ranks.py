"""The format of a saved run of several ranks: its common file, and the file of each rank.

Both are checked before anything in them is used; together they make a ``SavedRun``, which is checked again.
"""

import re
from typing import Annotated, Any, TypedDict, TypeVar

import msgspec
import torch
from msgspec import Meta

from memfit.errors import FileFormatError
from memfit.train.resume.saved_run import VERSION, Count, PositiveCount, SavedPosition, SavedRandomState

FOLDER_NAME = re.compile(r"^\d+-[0-9a-f]{12}$")


class Entries(TypedDict):
    """The optimizer's state of one parameter."""

    tensors: list[str]
    """Names of its tensors, which the folder holds."""
    values: dict[str, Any]
    """All else."""


class SharedFile(TypedDict):
    """What all ranks share."""

    version: int
    ranks: PositiveCount
    """The number of ranks that saved."""
    folder: Annotated[str, Meta(pattern=FOLDER_NAME.pattern)]
    owners: list[Count]
    """For each parameter of the optimizer, the rank whose file has its ``Entries``."""
    run: dict[str, Any]


class RankFile(TypedDict):
    """What differs between ranks."""

    version: int
    rank: Count
    entries: dict[int, Entries]
    run: dict[str, Any]


class _SharedRun(TypedDict):
    groups: list[list[str]]
    optimizer: list[dict[str, Any]]


class _OwnRun(TypedDict):
    model: dict[str, Any]
    gradients: dict[str, torch.Tensor]
    position: SavedPosition
    random: SavedRandomState


_File = TypeVar("_File", SharedFile, RankFile)


def validated_shared(saved: dict[str, Any]) -> SharedFile:
    """Return a common file's content if its format is valid.

    Raises:
        FileFormatError: it is invalid, or has another version.
    """
    file = _validated(saved, SharedFile, _SharedRun)
    names = sum(map(len, file["run"]["groups"]))
    if len(file["owners"]) != names or any(owner >= file["ranks"] for owner in file["owners"]):
        raise FileFormatError(
            f"Cannot resume: the state is damaged. It names {len(file['owners'])} owners of the optimizer's "
            f"{names} parameters, up to rank {max(file['owners'], default=0)} of {file['ranks']}."
        )
    return file


def validated_rank(saved: dict[str, Any], rank: int) -> RankFile:
    """Return the content of a rank's file if its format is valid.

    Raises:
        FileFormatError: it is invalid, has another version, or is another rank's.
    """
    file = _validated(saved, RankFile, _OwnRun)
    if file["rank"] != rank:
        raise FileFormatError(
            f"Cannot resume: the state is damaged. The file of rank {rank} is that of rank {file['rank']}."
        )
    return file


def _validated(saved: dict[str, Any], kind: type[_File], run: type) -> _File:
    if saved.get("version") != VERSION:
        raise FileFormatError(
            f"Cannot resume: the state has version {saved.get('version')}, but this memfit reads "
            f"only version {VERSION}."
        )
    try:
        file: _File = msgspec.convert(saved, kind)
        msgspec.convert(file["run"], run)
    except msgspec.ValidationError as error:
        raise FileFormatError(
            f"Cannot resume: the state is damaged, or is not the state of a training run ({error})."
        ) from None
    return file
