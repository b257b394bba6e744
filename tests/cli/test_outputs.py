"""An output that would overwrite the script, an input or another output is refused before any work."""

from pathlib import Path

import pytest

from memfit.atomic_files import check_output_paths
from memfit.cli.main import main
from memfit.errors import UsageError
from memfit.run.options import RunOptions
from memfit.run.parent import checked_script_argv

SCRIPT = "raise SystemExit('ran')\n"


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """A script, and files that look like a trace and a table."""
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "run.memfit", "table.csv"):
        (tmp_path / name).write_text(SCRIPT)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(SCRIPT)
    return tmp_path


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (("dry-run", "-o", "train.py", "train.py"), "-o train.py would overwrite the script."),
        (("dry-run", "--html", "./train.py", "train.py"), "--html train.py would overwrite the script."),
        (("dry-run", "--json", "package/__main__.py", "package"), "__main__.py would overwrite the script."),
        (("dry-run", "-o", "train.py", "-m", "train"), "-o train.py would overwrite the script."),
        (("dry-run", "-o", "package/__main__.py", "-m", "package"), "would overwrite the script."),
        (("dry-run", "-o", "a", "--html", "a", "train.py"), "--html a would overwrite the file of -o."),
        (("dry-run", "-o", "a", "--json", "a", "train.py"), "--json a would overwrite the file of -o."),
        (("record", "-o", "train.py", "train.py"), "-o train.py would overwrite the script."),
        (("explain", "run.memfit", "--html", "run.memfit"), "would overwrite the input."),
        (
            ("explain", "run.memfit", "--html", "a", "--csv", "a"),
            "--csv a would overwrite the file of --html.",
        ),
        (("diff", "run.memfit", "train.py", "--json", "train.py"), "would overwrite the second run."),
        (("replay", "run.memfit", "--json", "run.memfit"), "would overwrite the input."),
        (("allocator", "run.memfit", "--json", "run.memfit"), "would overwrite the input."),
        (("pack", "table.csv", "--csv", "table.csv"), "would overwrite the input."),
    ],
)
def test_an_output_that_would_overwrite_a_file_is_refused(tokens, words, files, capsys):
    before = sorted(path.name for path in files.iterdir())
    with pytest.raises(SystemExit, match="2"):
        main(tokens)
    assert words in capsys.readouterr().err
    assert sorted(path.name for path in files.iterdir()) == before
    assert (files / "train.py").read_text() == SCRIPT


def test_a_link_to_the_script_is_the_script(files):
    (files / "link").symlink_to("train.py")
    with pytest.raises(UsageError, match="would overwrite the script"):
        check_output_paths({"-o": files / "link"}, {"the script": files / "train.py"})


def test_devices_take_any_number_of_outputs(files):
    null = Path("/dev/null")
    check_output_paths({"-o": None, "--html": null, "--json": null}, {"the script": files / "train.py"})


def test_the_python_function_refuses_to_overwrite_the_script(files):
    with pytest.raises(UsageError, match="would overwrite the script"):
        checked_script_argv("train.py", (), RunOptions(), files / "train.py")
