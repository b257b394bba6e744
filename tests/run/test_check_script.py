"""A script that Python refuses is refused before anything runs, as Python states it."""

import builtins
import subprocess
import sys
import traceback
import zipapp
from pathlib import Path

import pytest

import memfit
from memfit.errors import MemfitError, TargetError, UsageError
from memfit.run.run_script_as_python import (
    check_script_path,
    print_exception_as_python_does,
    run_script_as_main,
)

LATIN = "# café\n".encode("latin-1")


@pytest.mark.parametrize(
    ("source", "stated"),
    [
        (
            LATIN,
            "SyntaxError: line 1 contains the byte 0xe9, which is not utf-8. Declare the ",
        ),
        (b"x = 1\n" + LATIN, "SyntaxError: line 2 contains the byte 0xe9, which is not utf-8."),
        (b"# coding: ascii\n\n" + LATIN, "SyntaxError: line 3 contains the byte 0xe9, which is not ascii."),
        (b"x = '\0'\n", "SyntaxError: source code string cannot contain null bytes"),
        (b"x = " + b"-" * 200_000 + b"1", "MemoryError"),
    ],
)
def test_what_python_cannot_read_is_refused_in_one_line(tmp_path, source, stated):
    path = tmp_path / "train.py"
    path.write_bytes(source)
    with pytest.raises(TargetError) as caught:
        check_script_path(path)
    assert str(caught.value).startswith(f"Python refuses {path}: {stated}")
    assert "\n" not in str(caught.value)


def test_from_python_arguments_are_words_and_not_one_text():
    with pytest.raises(UsageError, match=r"are a list of words: \['--resume', '--epochs', '4'\]"):
        memfit.dry_run(__file__, "--resume --epochs 4")
    with pytest.raises(UsageError, match=r"resume_with is a list of words: \['--resume'\]"):
        memfit.dry_run(__file__, whole=True, resume_with="--resume")


def test_python_in_place_of_the_script_is_to_be_left_out():
    with pytest.raises(UsageError, match=r"No such script: python3\. Leave out python3"):
        check_script_path(Path("python3"))


@pytest.mark.parametrize("model", ["torchvision:resnet50", "timm:vit_base", "hf:org/model"])
def test_a_model_in_place_of_a_script_gets_what_replaces_it(model):
    with pytest.raises(UsageError, match=rf"No such script: {model}\. .* memfit\.estimate\(model, inputs\)"):
        check_script_path(Path(model))


def test_invalid_syntax_is_shown_as_python_shows_it(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import torch\nif torch print\n")
    with pytest.raises(TargetError) as caught:
        check_script_path(path)
    with pytest.raises(SyntaxError) as stated:
        compile(path.read_bytes(), str(path), "exec")
    shown = "".join(traceback.format_exception_only(stated.value)).rstrip()
    assert shown.splitlines()[:2] == [f'  File "{path}", line 2', "    if torch print"]
    assert str(caught.value) == f"Python refuses {path}:\n{shown}"
    path.write_text("# coding: nonsense\n")
    with pytest.raises(TargetError, match=r"SyntaxError: unknown encoding: nonsense$"):
        check_script_path(path)


@pytest.mark.process
@pytest.mark.parametrize("source", [LATIN, b"# coding: latin-1\n" + LATIN, b"x = '\0'\n", b"return\n"])
def test_a_script_is_refused_if_and_only_if_python_refuses_it(tmp_path, source):
    path = tmp_path / "train.py"
    path.write_bytes(source)
    refused = subprocess.run([sys.executable, "-I", path], capture_output=True, check=False).returncode
    try:
        check_script_path(path)
    except TargetError:
        assert refused
    else:
        assert not refused


def test_a_script_is_not_run_and_warns_in_its_own_process_only(tmp_path, monkeypatch):
    monkeypatch.setattr(builtins, "ran", False, raising=False)
    path = tmp_path / "train.py"
    path.write_text("import builtins\nbuiltins.ran = '\\d'\n")
    check_script_path(path)  # warnings are errors in tests
    assert builtins.ran is False


def test_a_folder_is_checked_by_its_main(tmp_path):
    with pytest.raises(MemfitError, match=r"is a folder without a __main__.py"):
        check_script_path(tmp_path)
    (tmp_path / "__main__.py").write_bytes(LATIN)
    with pytest.raises(TargetError, match=r"Python refuses .*__main__.py: SyntaxError: line 1"):
        check_script_path(tmp_path)


def test_a_zip_with_a_main_runs_as_with_python(tmp_path, monkeypatch):
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "__main__.py").write_text("import builtins, sys\nbuiltins.ran = [__name__, *sys.argv]\n")
    path = tmp_path / "app.pyz"
    zipapp.create_archive(folder, path)
    check_script_path(path)
    monkeypatch.setattr(builtins, "ran", [], raising=False)
    monkeypatch.setattr(sys, "argv", [])
    run_script_as_main((str(path), "--big"), module=False)
    assert builtins.ran == ["__main__", str(path), "--big"]


@pytest.mark.parametrize("planned", [False, True])
def test_a_refusal_under_a_plan_is_said_in_place_of_a_traceback(capsys, planned):
    with pytest.raises(UsageError) as raised:
        check_script_path(Path("none.py"))
    print_exception_as_python_does(raised.value, "", planned=planned)
    said = capsys.readouterr().err
    assert ("Traceback" in said) is not planned
    assert ("memfit: NOT APPLIED at test_check_script.py:" in said) is planned
