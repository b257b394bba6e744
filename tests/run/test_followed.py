"""What memfit does in the Python processes that a script starts."""

import sys

from memfit.run.child import run_hidden_sitecustomize


def test_the_sitecustomize_of_the_user_still_runs(tmp_path, monkeypatch, capsys):
    for name in ("ours", "mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sitecustomize.py").write_text(f"print('{name}')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "ours"), str(tmp_path / "mine")])
    run_hidden_sitecustomize(str(tmp_path / "ours"))
    assert capsys.readouterr().out == "mine\n"
