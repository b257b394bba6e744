"""Files of states: whole or not there, and plain."""

import fcntl
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memfit.errors import FileFormatError, UsageError
from memfit.train.states import state


def test_a_file_is_whole_or_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "state"
    state.save({"version": 1}, path)

    def torn(value, file):
        file.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(OSError, match="No space left"):
        state.save({"version": 2}, path)
    assert state.load(path) == {"version": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["state"]


def test_two_processes_do_not_write_one_file(tmp_path):
    with (tmp_path / ".state.partial").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="Another process is saving"):
            state.save({"version": 1}, tmp_path / "state")
    state.save({"version": 1}, tmp_path / "state")


def test_a_run_that_is_killed_goes_on_bit_for_bit():
    """The whole of it, 50 kills: python benchmarks/killed.py"""
    script = Path(__file__).parents[2] / "benchmarks" / "killed.py"
    done = subprocess.run(
        [sys.executable, script, "--kills", "8"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "8 kills" in done.stdout
    assert "0 unfinished files left" in done.stdout


class Evil:
    def __reduce__(self):
        return print, ("run",)


@pytest.mark.parametrize(
    "content",
    [b"", b"nonsense", pickle.dumps(Evil(), 2), pickle.dumps({"version": Evil()}, 2)],
)
def test_what_is_no_state_is_refused(tmp_path, content, capsys):
    (tmp_path / "state").write_bytes(content)
    with pytest.raises(FileFormatError, match="Cannot resume from"):
        state.load(tmp_path / "state")
    assert capsys.readouterr().out == ""


def test_a_bit_that_changed_is_found(tmp_path):
    """PyTorch would load it: the parameter is another."""
    path = tmp_path / "state"
    state.save({"version": 1, "parameter": torch.full((64,), 1.5)}, path)
    content = bytearray(path.read_bytes())
    content[content.index(torch.full((64,), 1.5).numpy().tobytes())] ^= 1
    path.write_bytes(content)
    assert torch.load(path)["parameter"][0] != 1.5
    with pytest.raises(FileFormatError, match="or damaged"):
        state.load(path)


def test_something_else_is_refused(tmp_path):
    torch.save({"model": {}}, tmp_path / "state")
    with pytest.raises(FileFormatError, match="something else"):
        state.load(tmp_path / "state")
    with pytest.raises(FileNotFoundError):
        state.load(tmp_path / "nothing")


def test_random_numbers_go_on_where_they_were():
    import random

    import numpy as np

    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002, S311

    kept = state.random_state()
    first = draw()
    state.set_random_state(kept)
    assert draw() == first
