"""What waits for an import."""

import sys

from memfit.ghost.patching.after_import import after_import


def test_it_happens_once_the_module_is_there_or_not_at_all(tmp_path, monkeypatch):
    happened = []
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("awaited_once", "given_up"):
        (tmp_path / f"{name}.py").write_text("")
    finders = list(sys.meta_path)
    after_import("awaited_once", lambda: happened.append("awaited"))
    give_up = after_import("given_up", lambda: happened.append("given up"))
    give_up()
    give_up()
    import awaited_once
    import given_up

    assert happened == ["awaited"]
    assert sys.meta_path == finders
    del sys.modules[awaited_once.__name__], sys.modules[given_up.__name__]
    after_import("sys", lambda: happened.append("there already"))()
    assert happened == ["awaited", "there already"]
