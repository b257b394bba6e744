"""The cache folder: where it cannot be written, memfit uses one in the temporary folder, and says so once."""

import os
import subprocess
import sys
import tempfile
import textwrap

import pytest

from memfit import native_build
from memfit.allocator import compiled_allocator
from memfit.errors import UnsuitableEnvironmentError
from memfit.native_build import cache_folder
from support.scripts import TRAIN


@pytest.fixture
def unwritable(tmp_path, monkeypatch):
    """Choose a cache folder that is a file: root may write to any folder."""
    (tmp_path / "file").write_text("")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "file"))
    monkeypatch.delenv(native_build._SAID, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path


def fallback(folder):
    return folder / "tmp" / f"memfit-cache-{os.getuid()}"


def test_an_unwritable_cache_falls_back_to_the_temporary_folder_and_says_so_once(unwritable, capsys):
    assert cache_folder("ghost") == fallback(unwritable) / "ghost"
    assert cache_folder("cudnn") == fallback(unwritable) / "cudnn"
    assert fallback(unwritable).stat().st_mode & 0o777 == 0o700
    assert capsys.readouterr().err == (
        f"memfit: cannot write to the cache folder {unwritable / 'file'}, so {fallback(unwritable)} is used. "
        "To keep the cache elsewhere, set MEMFIT_CACHE to a writable folder.\n"
    )


def test_what_an_unwritable_cache_has_is_used(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(native_build._SAID, "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "cache" / "arena" / "made").mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda path, _: not path.is_relative_to(tmp_path / "cache"))
    assert cache_folder("arena", "made") == tmp_path / "cache" / "arena"
    assert capsys.readouterr().err == ""
    assert cache_folder("arena", "other") == tmp_path / f"memfit-cache-{os.getuid()}" / "arena"


@pytest.mark.parametrize("made", ["link", "writable", "of another user"])
def test_a_folder_that_others_can_write_to_does_not_stand_in(unwritable, monkeypatch, made):
    """Another user may have put a library there."""
    if made == "link":
        (unwritable / "other").mkdir()
        fallback(unwritable).symlink_to(unwritable / "other")
    else:
        fallback(unwritable).mkdir()
        fallback(unwritable).chmod(0o777 if made == "writable" else 0o700)
    if made == "of another user":
        path = fallback(unwritable)
        monkeypatch.setattr(os, "getuid", lambda: 4242)
        path.rename(fallback(unwritable))
    with pytest.raises(UnsuitableEnvironmentError, match="Set MEMFIT_CACHE to a writable folder"):
        cache_folder("ghost")


@pytest.mark.process
def test_a_cache_from_which_no_library_can_be_loaded_is_named(monkeypatch):
    def refused(path):
        raise OSError(f"{path}: failed to map segment from shared object")

    monkeypatch.setattr(native_build.ctypes, "CDLL", refused)
    library = native_build.NativeLibrary("allocator", compiled_allocator.LIBRARY.sources, {})
    with pytest.raises(UnsuitableEnvironmentError, match=r"(?s)failed to map.*Set MEMFIT_CACHE"):
        library.load()


@pytest.mark.slow
@pytest.mark.process
def test_a_dry_run_with_an_unwritable_cache_has_its_answer_and_one_line(unwritable):
    script = unwritable / "script.py"
    script.write_text(textwrap.dedent(TRAIN) + "for _ in range(3): step()\n")
    done = subprocess.run(
        [sys.executable, "-m", "memfit", "dry-run", "script.py"],
        cwd=unwritable,
        env=os.environ | {"TMPDIR": str(unwritable / "tmp")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout[:4]) == (0, "FITS"), done.stderr
    assert done.stderr.count("cannot write to the cache folder") == 1
    assert list((fallback(unwritable) / "ghost").glob("*/build.json"))
