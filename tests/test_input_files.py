"""Inputs that are not files, or are too large, are refused before they are read, by everything that reads."""

import os
import socket
from pathlib import Path

import pytest

import memfit
from memfit.arenas.step_plan import read_step_plans
from memfit.errors import MemfitError
from memfit.input_files import read_input_file
from memfit.packing.csv_table import read_buffers_csv
from memfit.run.options import RunOptions
from memfit.run.parent import checked_script_argv
from memfit.strategies.read_configuration import configure
from memfit.trace.trace_file import read_trace
from memfit.train.resume import state_file

READERS = {
    "read": memfit.read,
    "trace": read_trace,
    "explain": memfit.explain,
    "diff": lambda path: memfit.diff(path, path),
    "pack": memfit.pack,
    "a table to pack": read_buffers_csv,
    "configure": configure,
    "plans": lambda path: read_step_plans(path, 1),
    "resume": state_file.load_state_file,
    "script": lambda path: checked_script_argv(path, (), RunOptions(), None),
}


@pytest.fixture(params=["a device", "a pipe", "a socket"])
def special(request, tmp_path):
    """Return a path to something that is not a file, through a link."""
    target = tmp_path / "target"
    if request.param == "a device":
        target = Path("/dev/zero")
    elif request.param == "a pipe":
        os.mkfifo(target)
    else:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(target))
        listener.close()
    (tmp_path / "link").symlink_to(target)
    return tmp_path / "link", request.param


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_device_a_pipe_and_a_socket_are_refused_without_being_opened(read, special, monkeypatch):
    path, kind = special
    monkeypatch.setattr(Path, "open", None)
    with pytest.raises(MemfitError, match=f"Cannot read {path}: it is {kind}. Name an ordinary file."):
        read(path)


@pytest.fixture
def large(tmp_path):
    """Return a file of 1 TiB that takes no space on the disk."""
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    return path


@pytest.mark.parametrize("name", sorted(READERS.keys() - {"resume"}))
def test_a_file_that_is_too_large_is_refused_without_being_read(name, large):
    with pytest.raises(MemfitError, match=r"has 1,099,511,627,776 bytes, and memfit reads such files"):
        READERS[name](large)


def test_a_file_is_read_up_to_its_limit(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_input_file(path, 5) == b"12345"
    with pytest.raises(MemfitError, match=r"it has 5 bytes, and .* only up to 4 bytes. Split it.$"):
        read_input_file(path, 4, "Split it.")
    assert len(read_input_file(Path("/proc/self/status"), 1 << 20)) > 100  # its size reads 0
    with pytest.raises(MemfitError, match="it has more than 4 bytes"):
        read_input_file(Path("/proc/self/status"), 4)
