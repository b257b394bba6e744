"""A verdict on the first training steps names the evaluation that they did not reach."""

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.process, pytest.mark.warm]

SCRIPT = """
import torch

model, teacher = torch.nn.Linear(8, 8).cuda(), torch.nn.Linear(8, 8).cuda().eval()
optimizer = torch.optim.SGD(model.parameters())


def evaluate():
    (
        model  # a call over several lines
        .eval()
    )
    model(torch.ones(1, 8, device="cuda"))


for step in range(6):
    model(torch.ones(1, 8, device="cuda")).sum().backward()
    optimizer.step()
    if step == 3:
        evaluate()
"""
LINE = 1 + SCRIPT.splitlines().index("        model  # a call over several lines")


def test_an_evaluation_that_was_not_reached_is_named(dry_run):
    run = dry_run(SCRIPT)
    assert run.answer["end"]["evaluation"] == f"{run.folder / 'script.py'}:{LINE}"
    assert f"Not run: the eval() in script.py:{LINE}, perhaps an evaluation, and other later parts" in run.out


def test_an_evaluation_that_ran_is_not_named(dry_run):
    run = dry_run(SCRIPT, options=("--steps", "5"))
    assert run.answer["end"]["evaluation"] == ""
    assert dry_run(SCRIPT, options=("--to-end",)).answer["end"]["evaluation"] == ""


@pytest.mark.slow
def test_evaluations_are_found_in_modules_and_in_modules_that_the_script_imports(dry_run, tmp_path):
    (tmp_path / "trainer.py").write_text("def test(model):\n    model.eval()\n    frame.eval('a + b')\n")
    imported = dry_run(f"import trainer\n{SCRIPT}".replace(".eval()\n", ".train()\n").replace(".eval()", ""))
    assert imported.answer["end"]["evaluation"] == f"{tmp_path / 'trainer.py'}:2"
    restored = (
        "def decode(model):\n    model.eval()\n\n\ndef test(model):\n    model.eval()\n    model.train()\n"
    )
    (tmp_path / "validator.py").write_text(restored)
    both = dry_run(
        f"import trainer, validator\n{SCRIPT}".replace(".eval()\n", ".train()\n").replace(".eval()", "")
    )
    assert both.answer["end"]["evaluation"] == f"{tmp_path / 'validator.py'}:6"  # it goes on with training
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "memfit", "dry-run", "-m", "script"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert f"Not run: the eval() in script.py:{LINE}" in done.stdout


def test_an_evaluation_in_other_words_is_not_named(dry_run):
    """The call of ``eval`` of an override, through a wrapper, or by ``train(False)`` in a helper."""
    script = """
        import torch
        class Net(torch.nn.Linear):
            def eval(self):
                return self.train(False)
        model = Net(8, 8).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for step in range(6):
            model.eval()
            model.train()
            model(torch.ones(1, 8, device="cuda")).sum().backward()
            optimizer.step()
    """
    assert dry_run(script).answer["end"]["evaluation"] == ""
