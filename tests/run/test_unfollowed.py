"""Processes beside the script that load PyTorch without the ghost."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from memfit.run import follow_started_processes as started_processes
from memfit.run.follow_started_processes import read_started_processes


@pytest.mark.parametrize(("command", "recorded"), [(["python", "other.py"], ["python other.py"]), ([], [])])
def test_a_process_that_is_ending_is_not_recorded_by_a_map_of_which_parts_are_gone(
    command, recorded, tmp_path, monkeypatch
):
    """This process stands for the other: its map has the C library, and not the ghost."""
    monkeypatch.setattr(started_processes, "_INTERVAL", 0.0)
    monkeypatch.setattr(started_processes, "_TORCH", "/libc.so")
    monkeypatch.setattr(started_processes, "_started", lambda *_: {os.getpid()})
    monkeypatch.setattr(started_processes, "_command", lambda _: command)
    ghost = SimpleNamespace(build=SimpleNamespace(library="/no/such/library.so"))
    settings = SimpleNamespace(ghost=ghost, folder=str(tmp_path))
    started_processes.UnfollowedProcesses(0, settings).look()
    assert [child.name for child in read_started_processes(tmp_path)] == recorded


def test_a_process_that_has_the_ghost_behind_a_link_is_followed(tmp_path, monkeypatch):
    """A map shows the file itself; the C library of this process stands for the ghost."""
    maps = (line.split() for line in Path("/proc/self/maps").read_text().splitlines())
    loaded = next(line[-1] for line in maps if "/libc.so" in line[-1])
    (tmp_path / "cache").symlink_to(Path(loaded).parent)
    monkeypatch.setattr(started_processes, "_INTERVAL", 0.0)
    monkeypatch.setattr(started_processes, "_TORCH", "/libc.so")
    monkeypatch.setattr(started_processes, "_started", lambda *_: {os.getpid()})
    ghost = SimpleNamespace(build=SimpleNamespace(library=tmp_path / "cache" / Path(loaded).name))
    settings = SimpleNamespace(ghost=ghost, folder=str(tmp_path))
    started_processes.UnfollowedProcesses(0, settings).look()
    assert read_started_processes(tmp_path) == ()
