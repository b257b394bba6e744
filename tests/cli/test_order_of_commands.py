"""`memfit --help` shows first what most people come for."""

import re

from memfit.cli.main import run_command


def test_dry_run_plan_and_train_come_first_and_the_others_under_more(capsys):
    assert run_command(["--help"]) == 0
    first, more = capsys.readouterr().out.split(" More ")
    assert re.findall(r"^│ ([a-z-]+)  ", first, re.MULTILINE) == ["dry-run", "plan", "train"]
    assert {"record", "explain", "doctor"} <= set(re.findall(r"^│ ([a-z-]+)  ", more, re.MULTILINE))
