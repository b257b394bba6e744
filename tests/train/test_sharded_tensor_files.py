"""Tensors of a saved run of several ranks: only plain data is read, and only if all of it fits the files."""

import io
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load

from memfit.errors import FileFormatError
from memfit.train.resume.sharded_tensor_files import (
    load_sharded_tensors,
    read_tensor_index,
    save_sharded_tensors,
)


def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "model.a": torch.randn(5, 3, generator=generator),
        "step": torch.tensor(3),
        "none": torch.zeros(0),
    }


@pytest.fixture
def folder(tmp_path):
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        save_sharded_tensors(tensors(), tmp_path / "saved", None)
    return tmp_path / "saved"


def loaded(folder):
    found = {name: torch.full_like(each, -1) for name, each in tensors().items()}
    load_sharded_tensors(found, read_tensor_index(folder), folder, None)
    return found


def test_tensors_are_read_as_they_were_written(folder):
    for name, tensor in loaded(folder).items():
        assert torch.equal(tensor, tensors()[name])
        stored = read_tensor_index(folder).state_dict_metadata[name]
        assert (stored.size, stored.properties.dtype) == (tensor.shape, tensor.dtype)


def test_pytorchs_own_reader_reads_them_too(folder):
    found = {"model.a": torch.zeros(5, 3)}
    with pytest.warns(UserWarning, match=r"torch.distributed is disabled"):
        load(found, checkpoint_id=folder)
    assert torch.equal(found["model.a"], tensors()["model.a"])


def change(folder, edit):
    """Edit the index as PyTorch reads it, and write it again."""
    metadata = FileSystemReader(folder).read_metadata()
    edit(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, 4))


def place(metadata, name="model.a"):
    return next(value for key, value in metadata.storage_data.items() if key.fqn == name)


def outside(metadata):
    place(metadata).relative_path = "../../etc/__0_0.distcp"


def compressed(metadata):
    place(metadata).transform_descriptors = ["zstd"]


def longer(metadata):
    place(metadata).length = 1 << 40


def before_the_file(metadata):
    place(metadata).offset = -1


def huge(metadata):
    tensor = metadata.state_dict_metadata["model.a"]
    tensor.size = torch.Size((1 << 40, 3))
    tensor.chunks[0].sizes = torch.Size((1 << 40, 3))


def incomplete(metadata):
    metadata.state_dict_metadata["model.a"].chunks[0].sizes = torch.Size((4, 3))


def beyond(metadata):
    chunk = metadata.state_dict_metadata["model.a"].chunks[0]
    chunk.sizes = torch.Size((6, 3))


def unplaced(metadata):
    metadata.storage_data = {}


def of_bytes(metadata):
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    metadata.state_dict_metadata["model.a"] = BytesStorageMetadata()


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (outside, "a chunk is at"),
        (compressed, "compressed or encrypted"),
        (longer, "is truncated"),
        (before_the_file, "a chunk is at -1"),
        (huge, "bytes for a chunk of shape"),
        (incomplete, "do not make up its shape"),
        (beyond, "a chunk is outside"),
        (unplaced, "model.a"),
        (of_bytes, "BytesStorageMetadata in place of a TensorStorageMetadata"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(folder, edit, reason):
    change(folder, edit)
    with pytest.raises(FileFormatError, match=f"Cannot resume from .*{reason}"):
        read_tensor_index(folder)


class Command:
    def __reduce__(self):
        return Path.touch, (Path("hacked"),)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"nonsense",
        pickle.dumps(Command(), 4),
        pickle.dumps(Metadata({"model.a": Command()}, storage_data={}), 4),
        pickle.dumps({"state_dict_metadata": {}}, 4),
    ],
)
def test_nothing_in_a_foreign_index_is_run(folder, content, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(FileFormatError, match="Cannot resume from"):
        read_tensor_index(folder)
    assert not Path("hacked").exists()


def test_nothing_in_a_foreign_chunk_is_run(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = io.BytesIO()
    torch.save(Command(), file)
    (folder / "__0_0.distcp").write_bytes(file.getvalue().ljust(4000, b"\0"))

    def first(metadata):
        for each in metadata.storage_data.values():
            each.offset, each.length = 0, len(file.getvalue())

    change(folder, first)
    with pytest.raises(FileFormatError, match=r"in __0_0.distcp is damaged \(it holds more than tensors"):
        loaded(folder)
    assert not Path("hacked").exists()


def test_a_flipped_bit_of_a_tensor_is_detected(folder):
    """PyTorch's own reader would load the tensor, with another value."""
    path = folder / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[content.index(tensors()["model.a"].numpy().tobytes())] ^= 1
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match=r"'model.a' in __0_0.distcp is damaged .*checksum"):
        loaded(folder)


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata"])
def test_a_missing_file_is_refused(folder, file):
    (folder / file).unlink()
    with pytest.raises(FileFormatError, match=f"{file}.* is missing|Cannot read .*{file}"):
        read_tensor_index(folder)


def test_a_tensor_of_another_shape_in_a_chunk_is_refused(folder, monkeypatch):
    monkeypatch.setattr(torch, "load", lambda *_, **__: torch.zeros(2))
    with pytest.raises(FileFormatError, match="does not hold a tensor of shape"):
        loaded(folder)
