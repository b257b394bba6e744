"""Tensors of a saved run of several ranks: a folder of torch.distributed.checkpoint, checked when it is read.

    .metadata        which tensors there are, and where in which file each of their chunks is: a pickle
    __0_0.distcp     chunks, each as ``torch.save`` writes it: one file per rank

PyTorch's own reader unpickles both: a damaged or foreign folder could run code. Here the index is decoded as
plain data, everything in it is compared with the files' sizes before memory is allocated, and the checksum of
each chunk is verified. PyTorch plans which rank reads which part of which chunk.

Source: torch/distributed/checkpoint/metadata.py and filesystem.py, PyTorch 2.10 to 2.14.
"""

import io
import math
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from memfit.errors import FileFormatError, OutputError
from memfit.input_files import check_ordinary_file, read_input_file
from memfit.trace.safe_pickle import NotPlainDataError, UnconstructedObject, load_plain_pickle
from memfit.train.resume.state_file import UNREADABLE

_MOST_INDEX_BYTES = 1 << 32
_FILE = re.compile(r"__\d+_\d+\.distcp")
_OF_METADATA = "torch.distributed.checkpoint.metadata"


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A part of a tensor, and where its bytes are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a folder."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


def save_tensors(tensors: Mapping[str, torch.Tensor], folder: Path, group: Any) -> None:
    """Write tensors to a new folder; every rank of a process group calls this, with its shards.

    Raises:
        OutputError: a rank could not write; all ranks raise it.
    """
    writer = FileSystemWriter(folder, single_file_per_rank=True, thread_count=1)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        save(dict(tensors), storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as error:
        raise OutputError(f"Cannot save the run to {folder}: {_causes(error)}") from error


def load_tensors(
    tensors: Mapping[str, torch.Tensor], stored: Mapping[str, StoredTensor], folder: Path, group: Any
) -> None:
    """Read tensors of a folder into these, of the same shapes; every rank calls this, with its shards.

    Raises:
        FileFormatError: a chunk that a rank needs is damaged; all ranks raise it.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process may read it
            reader = _TensorReader(folder, stored)
            load(dict(tensors), storage_reader=reader, planner=planner, process_group=group)
    except CheckpointException as error:
        raise FileFormatError(f"Cannot resume from {folder}: {_causes(error)}") from error


def _causes(error: CheckpointException) -> str:
    failures = sorted(error.failures.items())
    return "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in failures)


class _TensorReader(StorageReader):
    """Reads the chunks that PyTorch's planner asks for."""

    def __init__(self, folder: Path, stored: Mapping[str, StoredTensor]) -> None:
        self._folder, self._stored = folder, stored
        self._chunks = {
            (name, chunk.offsets): chunk for name, tensor in stored.items() for chunk in tensor.chunks
        }

    def read_metadata(self) -> Metadata:
        """Return the index, as PyTorch's planner needs it."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(tensor.dtype),
                    torch.Size(tensor.shape),
                    [
                        ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                        for chunk in tensor.chunks
                    ],
                )
                for name, tensor in self._stored.items()
            }
        )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Copy what this rank needs of each chunk."""
        for item in plan.items:
            index: MetadataIndex = item.storage_index
            chunk = self._chunks[index.fqn, tuple(index.offset or ())]
            part = _read_chunk(self._folder, chunk, index.fqn)
            for dimension, (offset, length) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                part = part.narrow(dimension, offset, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to reset: a reader reads one folder."""

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        """Accept no other folder."""
        return False


def _read_chunk(folder: Path, chunk: StoredChunk, name: str) -> torch.Tensor:
    with (folder / chunk.file).open("rb") as file:
        file.seek(chunk.start)
        content = io.BytesIO(file.read(chunk.length))
    try:
        with zipfile.ZipFile(content) as records:
            damaged = records.testzip()  # torch.load does not verify the checksums that torch.save writes
        if damaged is not None:
            raise ValueError(f"the checksum of {damaged} does not match")
        content.seek(0)
        tensor = torch.load(content, map_location="cpu", weights_only=True)
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != chunk.sizes:
            raise ValueError(f"it does not hold a tensor of shape {chunk.sizes}")
    except pickle.UnpicklingError:
        raise FileFormatError(f"{name!r} in {chunk.file} is damaged (it holds more than tensors).") from None
    except UNREADABLE as error:
        raise FileFormatError(f"{name!r} in {chunk.file} is damaged ({error}).") from None
    return tensor


# ---- The index -----------------------------------------------------------------------------------------


def read_tensor_index(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a folder, by name.

    Raises:
        FileFormatError: the folder is incomplete, damaged, or was written by another program.
    """
    path = folder / ".metadata"
    content = read_input_file(path, _MOST_INDEX_BYTES)
    try:
        index = _state(load_plain_pickle(content, objects=True), "Metadata")
        places = {_name_and_offsets(key): _place(value) for key, value in index["storage_data"].items()}
        found = {
            name: _stored_tensor(name, _state(value, "TensorStorageMetadata"), places)
            for name, value in index["state_dict_metadata"].items()
        }
        _expect_present(folder, found)
    except NotPlainDataError as error:
        raise FileFormatError(f"Cannot resume from {folder}: its .metadata {error}.") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileFormatError(
            f"Cannot resume from {folder}: it is not the state of a training run, or is damaged ({error})."
        ) from None
    return found


def _state(value: Any, name: str, module: str = _OF_METADATA) -> Any:
    """Return the state of an object of this class, which PyTorch gives to every instance."""
    if (
        not isinstance(value, UnconstructedObject)
        or value.name != f"{module}.{name}"
        or value.arguments != ()
    ):
        raise ValueError(f"{_named(value)} in place of a {name}")
    return value.state


def _named(value: Any) -> str:
    return value.name if isinstance(value, UnconstructedObject) else type(value).__name__


def _numbers(value: Any) -> tuple[int, ...]:
    """Return the numbers of a ``torch.Size``."""
    if not isinstance(value, UnconstructedObject) or value.name != "torch.Size" or not value.arguments:
        raise ValueError(f"{_named(value)} in place of a torch.Size")
    (numbers,) = value.arguments
    if type(numbers) is not tuple or not all(type(each) is int and each >= 0 for each in numbers):
        raise ValueError("a size is not a tuple of numbers")
    return numbers


def _name_and_offsets(value: Any) -> tuple[str, tuple[int, ...]]:
    index = _state(value, "MetadataIndex")
    return index["fqn"], _numbers(index["offset"])


def _place(value: Any) -> tuple[str, int, int]:
    place = _state(value, "_StorageInfo", "torch.distributed.checkpoint.filesystem")
    file, start, length = place["relative_path"], place["offset"], place["length"]
    if not _FILE.fullmatch(file) or type(start) is not int or type(length) is not int or start < 0:
        raise ValueError(f"a chunk is at {start!r} in {file!r}")
    if place.get("transform_descriptors") is not None:
        raise ValueError("its chunks are compressed or encrypted")
    return file, start, length


def _stored_tensor(
    name: str, tensor: dict[str, Any], places: dict[tuple[str, tuple[int, ...]], tuple[str, int, int]]
) -> StoredTensor:
    dtype, shape = _dtype(tensor["properties"]), _numbers(tensor["size"])
    chunks = []
    for each in tensor["chunks"]:
        chunk = _state(each, "ChunkStorageMetadata")
        offsets, sizes = _numbers(chunk["offsets"]), _numbers(chunk["sizes"])
        found = StoredChunk(offsets, sizes, *places[name, offsets])
        if not len(shape) == len(offsets) == len(sizes) or any(
            offset + size > whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)
        ):
            raise ValueError(f"a chunk is outside {name!r}")
        if math.prod(sizes) * dtype.itemsize > found.length:
            raise ValueError(f"{name!r} has {found.length} bytes for a chunk of shape {sizes}")
        chunks.append(found)
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        raise ValueError(f"the chunks of {name!r} do not make up its shape {shape}")
    return StoredTensor(dtype, shape, tuple(chunks))


def _dtype(properties: Any) -> torch.dtype:
    named = _state(properties, "TensorProperties")[0]
    module, _, name = named.name.partition(".")
    found = getattr(torch, name, None) if module == "torch" and named.arguments is None else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{named.name} is not a dtype")  # noqa: TRY004 - of the file, not of an argument
    return found


def _expect_present(folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
    ends: dict[str, int] = {}
    for tensor in tensors.values():
        for chunk in tensor.chunks:
            ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.start + chunk.length)
    for file, end in ends.items():
        path = folder / file
        if not path.exists():
            raise ValueError(f"{file} is missing")
        check_ordinary_file(path)
        if path.stat().st_size < end:
            raise ValueError(f"{file} is truncated")
