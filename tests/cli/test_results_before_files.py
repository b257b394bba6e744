"""A result is printed before its files are written: a full disk must not cost the user the answer."""

import json
import os
import subprocess
import sys
import textwrap
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from memfit.cli.main import main
from memfit.trace.trace_file import write_trace
from support.html_reports import run
from support.scripts import TRAIN

FULL = "No space left on device"
FULL_DEVICE = Path("/dev/full")


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """A trace, and a table of buffers, in the working folder."""
    monkeypatch.chdir(tmp_path)
    write_trace(run(), tmp_path / "run.memfit")
    (tmp_path / "table.csv").write_text("id,lower,upper,size\na,0,2,4\nb,1,3,4\n")
    return tmp_path


@pytest.fixture
def full_disk(monkeypatch):
    """Let every file fail to reach the disk."""

    def sync(_descriptor):
        raise OSError(28, FULL)

    monkeypatch.setattr(os, "fsync", sync)


def exit_code(*tokens):
    with pytest.raises(SystemExit) as stop:
        main(tokens)
    return stop.value.code


FILES = [
    (("explain", "run.memfit", "--html", "a", "--csv", "b"), "FITS SO FAR   needs "),
    (("explain", "run.memfit", "--snapshot", "a", "--csv", "b"), "FITS SO FAR   needs "),
    (("explain", "run.memfit", "--json", "a"), "FITS SO FAR   needs "),
    (("diff", "run.memfit", "run.memfit", "--json", "a"), "before  peak in: step 1"),
    (("replay", "run.memfit", "--json", "a"), "PYTORCH_ALLOC_CONF"),
    (("pack", "table.csv", "--json", "a", "--csv", "b"), "PACKED   "),
]


@pytest.mark.parametrize(("tokens", "result"), FILES)
@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_costs_no_result(tokens, result, capsys):
    assert exit_code(*tokens) == 3
    out, err = capsys.readouterr()
    assert result in out
    assert err.startswith("memfit: Cannot write ")
    missing = [line.rpartition("/")[2] for line in err.splitlines()]
    assert sorted(missing) == [
        f"{name}: {FULL}. Free some space, or name a file on another disk." for name in tokens if name in "ab"
    ]


@pytest.mark.parametrize(("tokens", "_result"), FILES)
def test_a_full_standard_output_costs_no_file(tokens, _result, files, capsys):
    with FULL_DEVICE.open("w") as device, redirect_stdout(device):
        assert exit_code(*tokens) == 3
    assert capsys.readouterr().err == f"memfit: Cannot write to standard output: {FULL}.\n"
    assert all((files / name).stat().st_size for name in tokens if name in "ab")


def test_a_reader_that_leaves_costs_no_file(files, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe, redirect_stdout(pipe):
        assert exit_code("explain", "run.memfit", "--csv", "a") == 141
    assert capsys.readouterr().err == ""
    assert (files / "a").stat().st_size


def test_an_interruption_while_files_are_written_says_so(monkeypatch, capsys):
    def interrupt(_descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    assert exit_code("explain", "run.memfit", "--csv", "a") == 130
    out, err = capsys.readouterr()
    assert out.startswith("FITS SO FAR   needs ")
    assert err == "memfit: interrupted; not all files were written.\n"


@pytest.mark.process
def test_python_reports_a_full_standard_output_once():
    with FULL_DEVICE.open("w") as device:
        command = [sys.executable, "-m", "memfit", "explain", "run.memfit", "--json", "-"]
        done = subprocess.run(command, stdout=device, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (3, f"memfit: Cannot write to standard output: {FULL}.\n")


def test_a_dry_run_prints_its_verdict_although_its_files_cannot_be_written(dry_run, tmp_path):
    """The script removes the folder that the files were to be written to."""
    (tmp_path / "out").mkdir()
    script = "import os; os.rmdir('out')\n" + textwrap.dedent(TRAIN) + "for _ in range(3): step()\n"
    done = dry_run(script, options=("-o", "out/run.memfit", "--html", "out/a.html"))
    assert done.code == 3
    assert done.out.startswith("FITS SO FAR   needs ")
    assert json.loads((tmp_path / "answer.json").read_text())["verdict"] == "fits"
    assert [line.split(": ")[-2:] for line in done.err.splitlines()[-2:]] == [
        [
            f"Cannot write {tmp_path}/out/{name}",
            "No such file or directory. Name a file in a folder that you can write to.",
        ]
        for name in ("a.html", "run.memfit")
    ]
