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
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
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
from torch.futures import Future

from memfit.errors import FileFormatError, OutputError
from memfit.input_files import check_ordinary_file_or_folder, read_input_file
from memfit.trace.safe_pickle import NotPlainDataError, UnconstructedObject, load_plain_pickle
from memfit.train.resume.state_file import UNREADABLE

_MOST_INDEX_BYTES = 1 << 32
_FILE = re.compile(r"__\d+_\d+\.distcp")
_Places = dict[MetadataIndex, _StorageInfo]


def save_sharded_tensors(tensors: Mapping[str, torch.Tensor], folder: Path, group: Any) -> None:
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


def load_sharded_tensors(
    tensors: Mapping[str, torch.Tensor], index: Metadata, folder: Path, group: Any
) -> None:
    """Read tensors of a folder into these, of the same shapes; every rank calls this, with its shards."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process may read it
            reader = _CheckedReader(folder, index)
            load(dict(tensors), storage_reader=reader, planner=planner, process_group=group)
    except CheckpointException as error:
        raise FileFormatError(f"Cannot resume from {folder}: {_causes(error)}") from error


def _causes(error: CheckpointException) -> str:
    failures = sorted(error.failures.items())
    return "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in failures)


class _CheckedReader(FileSystemReader):
    """Reads the chunks that PyTorch's planner asks for, by an index that was checked."""

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._folder, self._index = folder, index

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Return the index."""
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Copy what this rank needs of each chunk."""
        for item in plan.items:
            part = self._read_chunk(item.storage_index)
            target = planner.resolve_tensor(item).detach()
            target.copy_(narrow_tensor_by_index(part, item.storage_offsets, item.lengths))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_chunk(self, index: Any) -> torch.Tensor:
        place, name = self.storage_data[index], index.fqn
        stored: Any = self._index.state_dict_metadata[name]
        sizes = stored.chunks[index.index].sizes
        with (self._folder / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            content = io.BytesIO(file.read(place.length))
        try:
            with zipfile.ZipFile(content) as records:
                damaged = records.testzip()  # torch.load does not verify the checksums that torch.save writes
            if damaged is not None:
                raise ValueError(f"the checksum of {damaged} does not match")
            content.seek(0)
            tensor = torch.load(content, map_location="cpu", weights_only=True)
            if not isinstance(tensor, torch.Tensor) or tensor.shape != sizes:
                raise ValueError(f"it does not hold a tensor of shape {tuple(sizes)}")
        except pickle.UnpicklingError:
            raise FileFormatError(
                f"{name!r} in {place.relative_path} is damaged (it holds more than tensors)."
            ) from None
        except UNREADABLE as error:
            raise FileFormatError(f"{name!r} in {place.relative_path} is damaged ({error}).") from None
        return tensor


# ---- The index -----------------------------------------------------------------------------------------


def read_tensor_index(folder: Path) -> Metadata:
    """Return which tensors a folder has, and where."""
    content = read_input_file(folder / ".metadata", _MOST_INDEX_BYTES)
    try:
        index = _state(load_plain_pickle(content, objects=True), Metadata)
        places = {_name_and_offsets(key): _place(value) for key, value in index["storage_data"].items()}
        found: dict[str, Any] = {
            name: _tensor(name, _state(value, TensorStorageMetadata), places)
            for name, value in index["state_dict_metadata"].items()
        }
        _expect_present(folder, places)
    except NotPlainDataError as error:
        raise FileFormatError(f"Cannot resume from {folder}: its .metadata {error}.") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileFormatError(
            f"Cannot resume from {folder}: it is not the state of a training run, or is damaged ({error})."
        ) from None
    return Metadata(found, storage_data=places)


def _state(value: Any, kind: type) -> Any:
    """Return the state of an object of this class, which PyTorch gives to every instance."""
    if (
        not isinstance(value, UnconstructedObject)
        or value.name != f"{kind.__module__}.{kind.__name__}"
        or value.arguments != ()
    ):
        raise ValueError(f"{_named(value)} in place of a {kind.__name__}")
    return value.state


def _named(value: Any) -> str:
    return value.name if isinstance(value, UnconstructedObject) else type(value).__name__


def _size(value: Any) -> torch.Size:
    if not isinstance(value, UnconstructedObject) or value.name != "torch.Size" or not value.arguments:
        raise ValueError(f"{_named(value)} in place of a torch.Size")
    (numbers,) = value.arguments
    if type(numbers) is not tuple or not all(type(each) is int and each >= 0 for each in numbers):
        raise ValueError("a size is not a tuple of numbers")
    return torch.Size(numbers)


def _name_and_offsets(value: Any) -> MetadataIndex:
    index = _state(value, MetadataIndex)
    return MetadataIndex(index["fqn"], _size(index["offset"]))


def _place(value: Any) -> _StorageInfo:
    place = _state(value, _StorageInfo)
    file, start, length = place["relative_path"], place["offset"], place["length"]
    if not _FILE.fullmatch(file) or type(start) is not int or type(length) is not int or start < 0:
        raise ValueError(f"a chunk is at {start!r} in {file!r}")
    if place.get("transform_descriptors") is not None:
        raise ValueError("its chunks are compressed or encrypted")
    return _StorageInfo(file, start, length)


def _tensor(name: str, tensor: dict[str, Any], places: _Places) -> TensorStorageMetadata:
    dtype, shape = _dtype(tensor["properties"]), _size(tensor["size"])
    chunks = []
    for each in tensor["chunks"]:
        chunk = _state(each, ChunkStorageMetadata)
        offsets, sizes = _size(chunk["offsets"]), _size(chunk["sizes"])
        length = places[MetadataIndex(name, offsets)].length
        if not len(shape) == len(offsets) == len(sizes) or any(
            offset + size > whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)
        ):
            raise ValueError(f"a chunk is outside {name!r}")
        if math.prod(sizes) * dtype.itemsize > length:
            raise ValueError(f"{name!r} has {length} bytes for a chunk of shape {tuple(sizes)}")
        chunks.append(ChunkStorageMetadata(offsets, sizes))
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        raise ValueError(f"the chunks of {name!r} do not make up its shape {tuple(shape)}")
    return TensorStorageMetadata(TensorProperties(dtype), shape, chunks)


def _dtype(properties: Any) -> torch.dtype:
    named = _state(properties, TensorProperties)[0]
    module, _, name = named.name.partition(".")
    found = getattr(torch, name, None) if module == "torch" and named.arguments is None else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{named.name} is not a dtype")  # noqa: TRY004 - of the file, not of an argument
    return found


def _expect_present(folder: Path, places: _Places) -> None:
    for place in places.values():
        path = folder / place.relative_path
        if not path.exists():
            raise ValueError(f"{path.name} is missing")
        check_ordinary_file_or_folder(path)
        if path.stat().st_size < place.offset + place.length:
            raise ValueError(f"{path.name} is truncated")
