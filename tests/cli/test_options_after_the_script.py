"""Options of memfit that stand after the script are refused; a script's own options reach the script."""

import pytest

from memfit.cli.main import app, main
from memfit.cli.script_arguments import insert_dashes_before_script


def refusal(capsys, *tokens):
    """Return the error that a command line ends with, and assert that it is wrong usage."""
    with pytest.raises(SystemExit, match="2"):
        main(tokens)
    out, err = capsys.readouterr()
    assert out == ""
    return err


def test_both_orders_are_shown(capsys):
    assert refusal(capsys, "dry-run", "gan.py", "--gpu", "T4", "--lr=0.1", "--fail") == (
        "memfit: --gpu and --fail must come before the script, like all options of memfit dry-run. Write:\n"
        "    memfit dry-run --gpu T4 --fail gan.py --lr=0.1\n"
        "If the script itself has these options, write -- before the script:\n"
        "    memfit dry-run -- gan.py --gpu T4 --lr=0.1 --fail\n"
    )


@pytest.mark.parametrize(
    ("typed", "advised", "names"),
    [
        (
            "{} --gpu T4 --steps 9 -b 8 --fail",
            "--gpu T4 --fail -- {} --steps 9 -b 8",
            "--gpu and --steps",
        ),
        ("{} --gpu 1 --steps 9", "-- {} --gpu 1 --steps 9", "--gpu and --steps"),
        ("{} --fail --gpu=T4 --lr 1 -- --steps 9", "--fail --gpu=T4 -- {} --lr 1 -- --steps 9", "--gpu"),
        ("{} --gpu", "-- {} --gpu", "--gpu"),
        ("torchrun {} --fail --steps 9", "--fail -- torchrun {} --steps 9", "--steps"),
    ],
)
def test_options_that_the_script_has_too_stay_with_it_in_the_example(tmp_path, capsys, typed, advised, names):
    script = tmp_path / "cnn.py"
    script.write_text("""parser.add_argument("--gpu"); parser.add_argument('--steps', type=int)""")
    err = refusal(capsys, "dry-run", *typed.format(script).split())
    assert err.startswith(f"memfit: memfit dry-run and the script both seem to have {names}. Write")
    assert err.endswith(f". For example:\n    memfit dry-run {advised.format(script)}\n")


def test_two_dashes_after_the_script_belong_before_it(capsys):
    assert refusal(capsys, "dry-run", "--fail", "cnn.py", "--", "--gpu", "0") == (
        "memfit: Write -- before the script, not after it:\n    memfit dry-run --fail -- cnn.py --gpu 0\n"
    )


@pytest.mark.parametrize("python", ["python", "python3.11"])
def test_python_before_the_script_is_left_out(capsys, python):
    assert "No such script: missing.py" in refusal(capsys, "dry-run", python, "missing.py", "-x")
    assert "--fail missing.py\n" in refusal(capsys, "dry-run", python, "missing.py", "--fail")


def test_python_with_a_module_is_memfits_own_option(capsys):
    found = refusal(capsys, "dry-run", "python", "-m", "missing.trainer", "--fail")
    assert "    memfit dry-run -m --fail missing.trainer\n" in found


def test_options_of_python_are_refused(capsys):
    found = refusal(capsys, "dry-run", "python", "-u", "train.py")
    assert found.startswith("memfit: The script runs in memfit's own Python: leave out python -u.")


def test_a_script_in_place_of_a_command_gets_the_command(capsys):
    expected = "memfit: No such command: train.py. To run a script, write memfit dry-run train.py --lr 1\n"
    assert refusal(capsys, "train.py", "--lr", "1") == expected


@pytest.mark.parametrize(
    "tokens",
    [
        ("dry-run", "train.py", "--fail"),
        ("dry-run", "--steps", "2", "train.py", "--steps", "9"),
        ("dry-run", "train.py", "--steps=9"),
        ("dry-run", "train.py", "-o", "run.memfit"),
        ("dry-run", "train.py", "--no-labels"),
        ("dry-run", "-m", "pkg.train", "--memory", "12GiB"),
        ("record", "train.py", "--to-end"),
    ],
)
def test_an_option_of_memfit_after_the_script_is_refused(tokens, capsys):
    assert "must come before the script" in refusal(capsys, *tokens)


@pytest.mark.parametrize(
    "tokens",
    [
        ("dry-run", "missing.py", "--epochs", "3", "-x"),
        ("dry-run", "missing.py", "--help"),
        ("dry-run", "--", "missing.py", "--steps", "3", "--fail"),
        ("dry-run", "missing.py", "--", "data", "--fail"),
        ("record", "missing.py", "--gpu", "0"),  # an option of dry-run alone
    ],
)
def test_options_of_the_script_reach_the_script(tokens, capsys):
    assert "No such script: missing.py" in refusal(capsys, *tokens)


def test_options_that_a_launcher_has_too_are_the_launchers(capsys):
    for launcher in (["torchrun"], ["-m", "torch.distributed.run"]):
        typed = [*launcher, "--nnodes", "2", "-m", "pkg.train"]
        split = insert_dashes_before_script(["dry-run", *typed], app)
        assert [each for each in split if each != "--"] == ["dry-run", *typed]
        assert "--steps must come before" in refusal(capsys, "dry-run", *typed, "--steps", "1")
