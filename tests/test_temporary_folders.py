"""Temporary folders of killed processes are removed by the next, and nothing else is."""

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from memfit import temporary_folders
from memfit.temporary_folders import (
    PREFIX,
    TemporaryFolder,
    keep_folder_from_removal,
    remove_abandoned_folders,
)


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Make an empty folder the folder for temporary files, and forget that others were looked for."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    remove_abandoned_folders.cache_clear()
    return tmp_path


def left_behind(folder, name="memfit-left"):
    """Make a folder as a killed process leaves it."""
    path = folder / name
    os.close(keep_folder_from_removal(path))
    (path / "more").mkdir()
    (path / "more" / "file").write_text("left")
    return path


@pytest.mark.process
def test_the_next_process_removes_the_folder_of_a_killed_one_and_leaves_that_of_a_living_one(temporary):
    code = (
        "from memfit.temporary_folders import TemporaryFolder\n"
        "folder = TemporaryFolder()\n"
        "print(folder.name, flush=True)\n"
        "import time; time.sleep(60)\n"
    )
    environment = os.environ | {"TMPDIR": str(temporary)}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    killed, living = (Path(process.stdout.readline().strip()) for process in processes)
    processes[0].kill()
    processes[0].wait()
    assert killed.parent == living.parent == temporary
    with TemporaryFolder() as name:
        assert sorted(temporary.iterdir()) == sorted([living, Path(name)])
    processes[1].send_signal(signal.SIGKILL)
    for process in processes:
        process.communicate()


def test_folders_without_the_mark_files_and_links_are_not_removed(temporary):
    (temporary / "memfit-unmarked").mkdir()
    (temporary / "memfit-file").write_text("")
    kept = left_behind(temporary, "kept")  # by its name, not memfit's
    (temporary / "memfit-link").symlink_to(kept)
    linked = temporary / "memfit-linked-mark"
    linked.mkdir()
    (linked / temporary_folders._MARK).symlink_to(kept / temporary_folders._MARK)
    before = sorted(temporary.rglob("*"))
    removed = left_behind(temporary)
    remove_abandoned_folders()
    assert not removed.exists()
    assert sorted(temporary.rglob("*")) == before


def test_a_link_within_a_folder_is_removed_and_not_followed(temporary):
    other = temporary / "other"
    other.mkdir()
    (other / "file").write_text("")
    removed = left_behind(temporary)
    (removed / "link").symlink_to(other)
    remove_abandoned_folders()
    assert sorted(temporary.rglob("*")) == [other, other / "file"]


def test_folders_of_other_users_are_not_removed(temporary, monkeypatch):
    path = left_behind(temporary)
    monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    remove_abandoned_folders()
    assert path.exists()


def test_a_process_looks_once(temporary):
    remove_abandoned_folders()
    path = left_behind(temporary)
    with TemporaryFolder():
        assert path.exists()


def test_a_folder_that_is_being_removed_is_made_again_before_it_is_held(temporary):
    """Another process holds its lock, as while it removes the folder."""
    path = left_behind(temporary)
    with (path / temporary_folders._MARK).open() as mark:
        fcntl.flock(mark, fcntl.LOCK_EX)
        held = []
        thread = threading.Thread(target=lambda: held.append(keep_folder_from_removal(path)))
        thread.start()
        thread.join(0.2)
        assert not held
        (path / temporary_folders._MARK).unlink()
    thread.join()
    remove_abandoned_folders()
    assert (path / temporary_folders._MARK).exists()
    os.close(held[0])


def test_the_last_of_several_that_hold_a_folder_releases_it(temporary):
    path = temporary / f"{PREFIX}ranks"
    first, second = keep_folder_from_removal(path), keep_folder_from_removal(path)
    os.close(first)
    remove_abandoned_folders()
    assert path.exists()
    os.close(second)
    remove_abandoned_folders.cache_clear()
    remove_abandoned_folders()
    assert not path.exists()


def test_a_folder_is_removed_at_the_end_of_its_block(temporary):
    with TemporaryFolder() as name:
        Path(name, "file").write_text("")
    assert not list(temporary.iterdir())
