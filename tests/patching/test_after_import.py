"""Running a function after an import."""

import sys

from memfit.patching.after_import import call_after_import


def test_the_action_runs_once_after_the_import_unless_cancelled(tmp_path, monkeypatch):
    happened = []
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("awaited_once", "cancelled"):
        (tmp_path / f"{name}.py").write_text("")
    finders = list(sys.meta_path)
    call_after_import("awaited_once", lambda: happened.append("awaited"))
    cancel = call_after_import("cancelled", lambda: happened.append("cancelled"))
    cancel()
    cancel()
    import awaited_once
    import cancelled

    assert happened == ["awaited"]
    assert sys.meta_path == finders
    del sys.modules[awaited_once.__name__], sys.modules[cancelled.__name__]
    call_after_import("sys", lambda: happened.append("there already"))()
    assert happened == ["awaited", "there already"]
