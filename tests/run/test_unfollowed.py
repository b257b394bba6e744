"""Processes beside the script that load PyTorch without the ghost."""

import os
from types import SimpleNamespace

import pytest

from memfit.run import started_processes
from memfit.run.started_processes import read_started_processes


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
